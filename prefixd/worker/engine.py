"""Continuous batching: which tokens of which requests each forward pass computes, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prefixd.worker.errors import RequestError
from prefixd.worker.kv_memory import KvMemory
from prefixd.worker.model import CausalModel
from prefixd.worker.protocol import Cancel, Done, Extend, Start, Step, Update
from prefixd.worker.run import Run, check_start
from prefixd.worker.sampling import Chosen, choose_tokens
from prefixd_swap.errors import OutOfMemoryError, SwapError


@dataclass(frozen=True, slots=True)
class _Part:
    """The next `count` tokens of a run; `row` is the last one's place in the batch if it is sampled from."""

    run: Run
    count: int
    row: int | None


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass that has been handed to the device."""

    updates: list[Update]
    tokens: int
    started_s: float


class Engine:
    """Runs requests side by side. Every method returns the messages to send, in order.

    kv: memory of the model's geometry, for `sequence_capacity` tokens a request.
    max_step_tokens: most tokens a pass computes; decoding goes first and is not limited by it.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: CausalModel,
        kv: KvMemory,
        max_step_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._kv = kv
        self._block_tokens = model.spec.geometry.block_tokens
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._runs: dict[int, Run] = {}
        self._closed: list[Done] = []  # requests that nothing on the device uses any more
        self._computing = False
        self._later: list[Done] = []  # for requests to be ended after the pass that is being computed
        self._unreported: list[_Pass] = []  # those that nobody has waited for yet

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes while `step` calls its `meanwhile`."""
        return self._model.asynchronous

    @property
    def runnable(self) -> bool:
        """Whether `step` would compute something."""
        return any(run.pending > 0 for run in self._runs.values())

    def start(self, message: Start) -> list[Step | Done]:
        """Take a request. One that cannot run answers with Done at once."""
        if message.id in self._runs:
            return [Done(message.id, "error", f"request {message.id} is already running; use another id")]
        try:
            check_start(message, self._block_tokens, self._model.spec)
            memory = self._kv.open(message.frames)
        except OutOfMemoryError as error:
            return [Done(message.id, "no_memory", str(error))]
        except RequestError as error:
            return [Done(message.id, "error", str(error))]
        except SwapError as error:
            return [Done(message.id, "error", _unmappable(message.frames, error))]
        run = Run(message, memory, self._block_tokens, self._model.spec)
        self._runs[run.id] = run
        if run.ended:
            self._finish(run, Done(run.id, run.ended))
        return self.poll()

    def extend(self, message: Extend) -> list[Step | Done]:
        """Give a request more frames."""
        run = self._runs.get(message.id)
        if run is not None:
            try:
                self._kv.extend(run.memory, message.frames)
            except SwapError as error:
                self._end(run, _failed(run, message.frames, error))
        return self.poll()

    def cancel(self, message: Cancel) -> list[Step | Done]:
        """End a request; one that is being computed ends after the pass."""
        run = self._runs.get(message.id)
        if run is not None:
            self._end(run, Done(run.id, "cancelled"))
        return self.poll()

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Step | Done]:
        """One forward pass over what can run now; nothing if nothing can.

        `meanwhile` is called while the device computes; it may call `start`, `extend` and `cancel`, so that the memory
        of the next pass is mapped beside this one.
        """
        started = self._clock()
        parts = self._plan()
        if not parts:
            return self.poll()
        tokens = [token for part in parts for token in _next_tokens(part)]
        step = self._kv.step([part.run.segment(part.count) for part in parts])
        sampled = [part for part in parts if part.row is not None]
        self._computing = True
        logits = self._model.forward(tokens, step, [part.row for part in sampled if part.row is not None])
        if meanwhile is not None:
            meanwhile()
        chosen = choose_tokens(logits, [part.run.choice for part in sampled])
        self._computing = False
        for part in parts:
            part.run.computed += part.count
        done: list[Done] = []
        news: dict[int, Chosen] = {}
        for part, choice in zip(sampled, chosen, strict=True):
            run = part.run
            if choice is None:
                done.append(Done(run.id, "error", "the model's logits are not finite; its weights may be damaged"))
                continue
            run.append(choice.token)
            news[run.id] = choice
            if run.ended:
                done.append(Done(run.id, run.ended))
        broken = {message.id for message in done if message.reason == "error"}
        updates = _updates([part for part in parts if part.run.id not in broken], news)
        self._unreported.append(_Pass(updates, len(tokens), started))
        # A sampled token has waited for all that came before it. A pass without one is reported with the next that has.
        messages: list[Step | Done] = []
        if sampled or not self._model.asynchronous:
            messages += self._report()
        for message in [*done, *self._later]:
            if message.id in self._runs:
                self._finish(self._runs[message.id], message)
        self._later.clear()
        return [*messages, *self.poll()]

    def flush(self) -> list[Step | Done]:
        """Wait for the device, and report what has been computed: nothing is left to wait for then."""
        if self._unreported:
            self._model.synchronize()
        return [*self._report(), *self.poll(wait=True)]

    def poll(self, wait: bool = False) -> list[Step | Done]:
        """The requests that have ended and whose frames nothing uses any more; with `wait` all that have ended."""
        self._kv.poll(wait)
        closed, self._closed = self._closed, []
        if not closed or not self._unreported:
            return [*closed]
        self._model.synchronize()  # what a request's last pass filled is told before its end
        return [*self._report(), *closed]

    def close(self) -> None:
        """Let go of everything; the requests get no answer."""
        for run in list(self._runs.values()):
            self._finish(run, Done(run.id, "cancelled"))
        self._kv.poll(wait=True)

    def _plan(self) -> list[_Part]:
        """Runs that decode first, a token each; then prompts, as they came, with what is left."""
        ready = self._ready()
        decoding = [run for run in ready if run.decoding]
        # However many decode, a prompt moves on by a block, so that it cannot starve.
        budget = max(self._max_step_tokens - len(decoding), self._block_tokens)
        counts = [(run, 1) for run in decoding]
        for run in ready:
            if not run.decoding and budget > 0:
                count = min(run.pending, budget)
                budget -= count
                counts.append((run, count))
        parts = []
        row = -1
        for run, count in counts:
            row += count
            parts.append(_Part(run, count, row if run.computed + count == len(run.tokens) else None))
        return parts

    def _ready(self) -> list[Run]:
        """The runs with tokens to compute whose memory is mapped; waits for a mapping only if no run's is."""
        pending = [run for run in self._runs.values() if run.pending > 0]
        ready = [run for run in pending if self._kv.ready(run.memory)] or pending
        usable = []
        for run in ready:
            try:
                self._kv.wait(run.memory)
                usable.append(run)
            except SwapError as error:
                self._finish(run, _failed(run, [], error))
        return usable

    def _report(self) -> list[Step]:
        """What the passes did of which the device has computed all, as one step."""
        passes, self._unreported = self._unreported, []
        if not passes:
            return []
        updates = [update for each in passes for update in each.updates]
        return [Step(updates, sum(each.tokens for each in passes), self._clock() - passes[0].started_s)]

    def _end(self, run: Run, done: Done) -> None:
        if self._computing:
            self._later.append(done)
        else:
            self._finish(run, done)

    def _finish(self, run: Run, done: Done) -> None:
        """Let go of the run's memory; `done` is sent once nothing on the device uses it any more."""
        del self._runs[run.id]
        self._kv.close(run.memory, lambda: self._closed.append(done))


def _failed(run: Run, frames: list[int], error: SwapError) -> Done:
    if isinstance(error, OutOfMemoryError):
        return Done(run.id, "no_memory", str(error))
    return Done(run.id, "error", _unmappable(frames, error))


def _unmappable(frames: list[int], error: SwapError) -> str:
    named = f"frames {frames}" if frames else "its frames"
    return f"{named} cannot be mapped: {error}"


def _next_tokens(part: _Part) -> list[int]:
    return part.run.tokens[part.run.computed : part.run.computed + part.count]


def _updates(parts: list[_Part], news: dict[int, Chosen]) -> list[Update]:
    """One for every run with a new token or a newly filled block."""
    updates = []
    for part in parts:
        run = part.run
        filled = run.filled_blocks
        if run.id in news or filled > run.reported_blocks:
            run.reported_blocks = filled
            new = news.get(run.id)
            logprobs = [new.logprobs] if new and new.logprobs else []
            updates.append(Update(run.id, [new.token] if new else [], filled, logprobs))
    return updates
