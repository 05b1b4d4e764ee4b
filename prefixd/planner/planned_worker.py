"""A worker that computes nothing: it answers as the real one does, after the time that a pass would take.

`_plan` follows `prefixd.worker.step_plan.StepPlanner.plan`: decoding runs go first, a token each; then prompts in the
order of arrival, with the rest of `max_step_tokens`.

Passes are alike until a run ends, fills a block with its output, reaches the end of its frames or its first token. The
worker reports alike passes as one `Step`, since handling a message takes longer than a pass; it reports a full block up
to a 64th of a block late, with the blocks that other runs fill meanwhile. A message from the daemon that changes the
next passes ends such a stretch with the present pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from prefixd.planner.machine.pass_costs import ComputeCosts
from prefixd.serving.kv_shape import KvShape
from prefixd.worker_protocol.protocol import Arrived, Cancel, Done, Extend, Start, Step, ToWorker, Update

_MOST_PASSES = 1 << 16
_MOST_PROMPT_PASSES = 8  # so that blocks of a long prompt are entered not much later than they are filled
_LATE_PART = 64  # a full block may be reported up to a 64th of its tokens late

Outputs = Callable[[int, int, int], list[int]]
"""`(request, first, count)`: the tokens that a request generates, from its `first` one on."""


@dataclass(slots=True)
class _Run:
    """A request as the worker sees it."""

    start: Start
    known: int  # tokens of the prompt and of the output so far
    computed: int
    reach: int  # tokens that its frames are for
    reported_blocks: int
    generated: int
    kept: int = 0  # states of `start.state.keep` so far
    cancelled: bool = False
    begun: bool = False  # has been in a pass
    arrived: tuple[int, int] | None = None  # first and end of tokens that came from the cache meanwhile

    @property
    def pending(self) -> int:
        return min(self.known, self.reach if self.arrived is None else self.arrived[0]) - self.computed

    @property
    def decoding(self) -> bool:
        return self.known - self.computed == 1

    def advance(self, count: int) -> None:
        """Adds `count` computed tokens and skips the arrived tokens behind them."""
        self.computed += count
        if self.arrived is not None and self.computed >= self.arrived[0]:
            self.computed, self.arrived = self.arrived[1], None

    @property
    def left(self) -> int:
        return self.start.sampling.max_tokens - self.generated


@dataclass(slots=True)
class WorkerCounters:
    """The worker's time, passes and computed tokens so far."""

    busy_s: float = 0.0
    passes: int = 0
    computed_tokens: int = 0


class SimulatedWorker:
    """Runs requests side by side in virtual time.

    Args:
        costs: seconds of a pass.
        kv: the model's blocks.
        max_step_tokens: most tokens that a pass computes; decoding goes first and is not limited by it.
        outputs: the tokens that requests generate.
        clock: seconds.
        on_step: called with each step.
        on_done: called with each end of a request.
    """

    def __init__(
        self,
        costs: ComputeCosts,
        kv: KvShape,
        max_step_tokens: int,
        outputs: Outputs,
        clock: Callable[[], float],
        *,
        on_step: Callable[[Step], None],
        on_done: Callable[[Done], None],
    ) -> None:
        self.counters = WorkerCounters()
        self._costs = costs
        self._block_tokens = kv.block_tokens
        self._slots = len(kv.block_widths)
        self._max_step_tokens = max_step_tokens
        self._outputs = outputs
        self._clock = clock
        self._on_step = on_step
        self._on_done = on_done
        self._runs: dict[int, _Run] = {}
        self._full = False  # the passes under way have no room for another prompt
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Computes in the background until `stop`."""
        self._task = asyncio.create_task(self._work(), name="simulated worker")
        return self._task

    async def stop(self) -> None:
        """Ends the worker; running requests get no answer."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def send(self, message: ToWorker) -> None:
        """Handles a message from the daemon."""
        if isinstance(message, Start):
            blocks = message.cached_blocks
            started = self._runs[message.id] = _Run(
                message,
                len(message.tokens) // 4,
                blocks * self._block_tokens,
                self._tokens_in(message.frames),
                blocks,
                message.generated,
            )
            if self._full and not started.decoding:
                return  # the prompts under way go first
        elif isinstance(message, Extend):
            if (run := self._runs.get(message.id)) is not None:
                goes_on = run.reach >= run.known
                run.reach += self._tokens_in(message.frames)
                if goes_on:
                    return
        elif isinstance(message, Arrived):
            if (run := self._runs.get(message.id)) is not None:
                first = message.first * self._block_tokens
                run.arrived = first, first + self._tokens_in(message.frames)
                run.reach = run.arrived[1]
                run.advance(0)
        elif isinstance(message, Cancel) and (run := self._runs.get(message.id)) is not None:
            run.cancelled = True
        self._changed.set()

    def _tokens_in(self, frames: Sequence[int]) -> int:
        return len(frames) // self._slots * self._block_tokens

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            for run in [run for run in self._runs.values() if run.cancelled]:
                self._end(run, "cancelled")
            plan = self._plan()
            if not plan:
                await self._changed.wait()
                continue
            passes = self._alike_passes(plan)
            # The mean of a stretch, since every pass also attends to the tokens of the pass before.
            parts = [(count, run.computed + count * (passes - 1) // 2) for run, count in plan]
            begun = sum(not run.begun for run, _ in plan)
            pass_s = self._costs.pass_s(parts)
            begin_s = self._costs.pass_s(parts, begun) - pass_s if begun else 0.0  # the first pass takes longer by it
            began_s = self._clock() + begin_s
            if passes == 1:
                await asyncio.sleep(begin_s + pass_s)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(begin_s + passes * pass_s):
                        await self._changed.wait()
                    done = min(passes, max(0, int((self._clock() - began_s) / pass_s)) + 1)
                    await asyncio.sleep(max(0.0, began_s + done * pass_s - self._clock()))
                    passes = done
            self._finish(plan, passes, begin_s + passes * pass_s)
            await asyncio.sleep(0)  # the daemon answers what it can at once

    def _plan(self) -> list[tuple[_Run, int]]:
        ready = [run for run in self._runs.values() if run.pending > 0]
        plan = [(run, 1) for run in ready if run.decoding]
        budget = max(self._max_step_tokens - len(plan), self._block_tokens)
        for run in ready:
            if not run.decoding and budget > 0:
                count = min(run.pending, budget)
                budget -= count
                plan.append((run, count))
        self._full = budget <= 0
        return plan

    def _alike_passes(self, plan: list[tuple[_Run, int]]) -> int:
        """How many of the next passes are alike."""
        size = self._block_tokens
        late = size // _LATE_PART
        passes = _MOST_PROMPT_PASSES if any(not run.decoding for run, _ in plan) else _MOST_PASSES
        for run, count in plan:
            if not run.decoding:
                if run.reach < run.known:
                    return 1  # the daemon sends the frames of its prompt bit by bit, ahead of the reported passes
                passes = min(passes, run.pending // count)
            elif run.generated == run.start.generated:
                return 1  # a first token is reported at once, also after a prompt cached except for one token
            else:
                passes = min(passes, run.left, run.reach - run.computed, size - run.computed % size + late)
        return max(1, passes)

    def _finish(self, plan: list[tuple[_Run, int]], passes: int, elapsed_s: float) -> None:
        updates: list[Update] = []
        ended: list[_Run] = []
        computed = context = 0
        for run, count in plan:
            count *= passes
            computed += count
            context += count * run.computed
            run.begun = True
            run.advance(count)
            news: list[int] = []
            if run.computed >= run.known:
                fresh = run.computed - run.known + 1
                news = self._outputs(run.start.id, run.generated, fresh)
                run.generated += fresh
                run.known += fresh
                if run.left <= 0:
                    ended.append(run)
            filled = run.computed // self._block_tokens
            if news or filled > run.reported_blocks:
                run.reported_blocks = filled
                updates.append(Update(run.start.id, news, filled, kept=self._kept(run)))
        self.counters.busy_s += elapsed_s
        self.counters.passes += passes
        self.counters.computed_tokens += computed
        self._on_step(Step(updates, computed, elapsed_s, passes=passes, context_tokens=context // max(1, computed)))
        for run in ended:
            self._end(run, "length")

    def _kept(self, run: _Run) -> list[int]:
        if run.start.state is None:
            return []
        blocks = [each.blocks for each in run.start.state.keep[run.kept :]]
        kept = [count for count in blocks if count * self._block_tokens <= run.computed]
        run.kept += len(kept)
        return kept

    def _end(self, run: _Run, reason: str) -> None:
        del self._runs[run.start.id]
        tail = 0
        if run.start.state is not None and run.start.state.tail:
            tail = run.computed // self._block_tokens
        self._on_done(Done(run.start.id, "cancelled" if reason == "cancelled" else "length", tail_blocks=tail))
