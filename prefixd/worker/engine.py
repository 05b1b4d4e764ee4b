"""Continuous batching: which tokens of which requests each forward pass computes, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prefixd.worker.errors import RequestError
from prefixd.worker.model import CausalModel
from prefixd.worker.protocol import Cancel, Done, Extend, Start, Step, Update
from prefixd.worker.run import Run, check_start
from prefixd.worker.sampling import Chosen, choose_tokens
from prefixd_swap.errors import OutOfMemoryError, SwapError
from prefixd_swap.vmem import FrameId, VirtualTensorPool


@dataclass(frozen=True, slots=True)
class _Part:
    """The next `count` tokens of a run; `row` is the last one's place in the batch if it is sampled from."""

    run: Run
    count: int
    row: int | None


class Engine:
    """Runs requests side by side. Every method returns the messages to send, in order.

    tensors: of the model's device and geometry, for `sequence_capacity` tokens each.
    max_step_tokens: most tokens a pass computes; decoding goes first and is not limited by it.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: CausalModel,
        tensors: VirtualTensorPool,
        max_step_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._block_tokens = model.spec.geometry.block_tokens
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._runs: dict[int, Run] = {}

    @property
    def runnable(self) -> bool:
        """Whether `step` would compute something."""
        return any(run.pending > 0 for run in self._runs.values())

    def start(self, message: Start) -> list[Done]:
        """Take a request. One that cannot run answers with Done at once."""
        if message.id in self._runs:
            return [Done(message.id, "error", f"request {message.id} is already running; use another id")]
        try:
            check_start(message, self._block_tokens, self._model.spec)
            memory = self._tensors.acquire()
        except OutOfMemoryError as error:
            return [Done(message.id, "no_memory", str(error))]
        except (RequestError, SwapError) as error:
            return [Done(message.id, "error", str(error))]
        run = Run(message, memory, self._block_tokens, self._model.spec)
        self._runs[run.id] = run
        done = self._map(run, message.frames)
        if not done and run.ended:
            done = [self._finish(run, Done(run.id, run.ended))]
        return done

    def extend(self, message: Extend) -> list[Done]:
        """Give a request more frames."""
        run = self._runs.get(message.id)
        return self._map(run, message.frames) if run else []

    def cancel(self, message: Cancel) -> list[Done]:
        """End a request."""
        run = self._runs.get(message.id)
        return [self._finish(run, Done(run.id, "cancelled"))] if run else []

    def step(self) -> list[Step | Done]:
        """One forward pass over what can run now; nothing if nothing can."""
        started = self._clock()
        parts = self._plan()
        if not parts:
            return []
        tokens = [token for part in parts for token in _next_tokens(part)]
        segments = [part.run.segment(part.count) for part in parts]
        sampled = [part for part in parts if part.row is not None]
        logits = self._model.forward(tokens, segments, [part.row for part in sampled if part.row is not None])
        chosen = choose_tokens(logits, [part.run.choice for part in sampled])
        self._model.synchronize()
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
        messages: list[Step | Done] = [Step(updates, len(tokens), self._clock() - started)]
        messages += [self._finish(self._runs[message.id], message) for message in done]
        return messages

    def close(self) -> None:
        """Unmap everything; the requests get no answer."""
        for run in list(self._runs.values()):
            self._finish(run, Done(run.id, "cancelled"))

    def _plan(self) -> list[_Part]:
        """Runs that decode first, a token each; then prompts, as they came, with what is left."""
        ready = [run for run in self._runs.values() if run.pending > 0]
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

    def _map(self, run: Run, frames: list[int]) -> list[Done]:
        try:
            run.memory.extend([FrameId(frame) for frame in frames])
        except OutOfMemoryError as error:
            return [self._finish(run, Done(run.id, "no_memory", str(error)))]
        except SwapError as error:
            return [self._finish(run, Done(run.id, "error", f"frames {frames} cannot be mapped: {error}"))]
        return []

    def _finish(self, run: Run, done: Done) -> Done:
        """Unmap the run's frames behind everything queued on the device; only then may `done` be sent."""
        self._model.synchronize()
        self._tensors.release(run.memory)
        del self._runs[run.id]
        return done


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
