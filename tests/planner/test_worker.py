"""The worker that computes nothing says what the real one says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from prefixd.base.sampling import Sampling
from prefixd.planner.planned_worker import SimulatedWorker
from prefixd.planner.simulation.event_loop import SimulatedTimeLoop
from prefixd.serving.kv_shape import KvShape
from prefixd.worker_protocol.protocol import Arrived, Cancel, Done, Extend, GroupShape, Start, Step, ToWorker

KV = KvShape((GroupShape("full", None, 1, 1),), 4)


class OneSecond:
    def pass_s(self, parts: Sequence[tuple[int, int]], begun: int = 0, /) -> float:
        return 1.0

    def assumptions(self) -> list[str]:
        return []


def test_what_arrives_behind_computed_blocks_is_passed_over() -> None:
    steps: list[tuple[float, Step]] = []
    ends: list[Done] = []

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        worker = SimulatedWorker(
            OneSecond(), KV, 4, lambda request, first, count: [request] * count, clock,
            on_step=lambda step: steps.append((clock(), step)), on_done=ends.append,
        )  # fmt: skip
        worker.start()
        tokens = np.arange(17, dtype="<u4").tobytes()
        worker.send(
            Start(id=7, tokens=tokens, generated=0, cached_blocks=0, frames=[0, 1], sampling=Sampling(max_tokens=1))
        )
        await asyncio.sleep(0.5)
        worker.send(Arrived(id=7, first=2, frames=[5, 6]))
        await asyncio.sleep(4)
        worker.send(Extend(id=7, frames=[2]))
        await asyncio.sleep(4)
        await worker.stop()

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        runner.run(run())
    assert [(at, step.computed_tokens, step.context_tokens) for at, step in steps] == [
        (1, 4, 0),
        (2, 4, 4),
        (5.5, 1, 16),
    ]
    assert [update.filled_blocks for _, step in steps for update in step.updates] == [1, 4, 4]
    assert steps[-1][1].updates[0].tokens == [7] and [done.reason for done in ends] == ["length"]


class HalfToBegin(OneSecond):
    def pass_s(self, parts: Sequence[tuple[int, int]], begun: int = 0, /) -> float:
        return 1.0 + 0.5 * begun


class PassByPass(SimulatedWorker):
    def _alike_passes(self, plan: object) -> int:
        return 1


def start(request: int, tokens: int, cached: int, room: int, most: int) -> Start:
    """A prompt of so many tokens of which so many blocks are cached, with frames for `room` blocks."""
    sampling = Sampling(max_tokens=most)
    return Start(
        id=request, tokens=bytes(4 * tokens), generated=0, cached_blocks=cached, frames=[0] * room, sampling=sampling
    )


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[float, ToWorker]]:
    """What a daemon says and when. No message comes at the very end of a pass: passes last halves of seconds, and each
    message has a fraction of its own."""
    told: list[tuple[int, ToWorker]] = []
    for request in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, 15))
        blocks = draw(st.integers(1, 12))
        cached = draw(st.integers(0, blocks - 1) | st.just(blocks - 1))
        tokens = max(4 * blocks - draw(st.integers(0, 3)), 4 * cached + 1)
        room, most = draw(st.integers(cached + 1, blocks)), draw(st.integers(1, 20))
        told.append((at, start(request, tokens, cached, room, most)))
        for frames in draw(st.lists(st.integers(1, 4), max_size=6)):
            at += draw(st.integers(0, 12))
            told.append((at, Extend(request, [0] * frames)))
        if draw(st.booleans()):
            told.append((at + draw(st.integers(1, 30)), Cancel(request)))
    told.sort(key=lambda each: each[0])
    return [(at + place / 128, message) for place, (at, message) in enumerate(told)]


def heard(kind: type[SimulatedWorker], told: list[tuple[float, ToWorker]]) -> tuple[object, ...]:
    """When a worker tells first tokens and ends, and what it did in all."""
    first: dict[int, float] = {}
    ends: list[tuple[int, str, float]] = []
    steps = 0

    async def run() -> tuple[float, int, int]:
        clock = asyncio.get_running_loop().time

        def on_step(step: Step) -> None:
            nonlocal steps
            steps += 1
            for update in step.updates:
                if update.tokens:
                    first.setdefault(update.id, clock())

        worker = kind(
            HalfToBegin(), KV, 8, lambda request, begin, count: [request] * count, clock,
            on_step=on_step, on_done=lambda done: ends.append((done.id, done.reason, clock())),
        )  # fmt: skip
        worker.start()
        for at, message in told:
            await asyncio.sleep(at - clock())
            worker.send(message)
        await asyncio.sleep(500)
        await worker.stop()
        return worker.counters.busy_s, worker.counters.passes, worker.counters.computed_tokens

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        counted = runner.run(run())
    return first, ends, counted, steps


@given(conversations())
@example([(0.0, start(0, 48, 0, 12, 3)), (2.125, start(1, 9, 2, 3, 3))])  # decodes at once beside a long prompt
def test_passes_told_together_are_the_passes_told_one_by_one(told: list[tuple[float, ToWorker]]) -> None:
    *one_by_one, passes = heard(PassByPass, told)
    *together, steps = heard(SimulatedWorker, told)
    assert together == one_by_one
    assert isinstance(passes, int) and isinstance(steps, int) and steps <= passes


def test_nothing_that_changes_no_pass_ends_a_stretch() -> None:
    told: list[tuple[float, ToWorker]] = [
        (0.0, start(0, 48, 0, 12, 3)),
        (1.125, Extend(0, [0])),
        (2.125, start(1, 48, 0, 12, 1)),
    ]
    # The first prompt; its other tokens, beside the second prompt; the rest of that, and its last two tokens.
    assert heard(SimulatedWorker, told)[-1] == 4
    assert heard(PassByPass, told)[-1] == 6 + 2 + 4 + 1


def test_frames_of_a_prompt_that_come_bit_by_bit_come_in_time() -> None:
    """As for windows: those for a pass, those for the next one, and more when the worker tells of a pass."""
    computed: list[int] = []

    async def run() -> None:
        given, told = 5, asyncio.Event()
        worker = SimulatedWorker(
            OneSecond(), KV, 8, lambda request, begin, count: [request] * count, asyncio.get_running_loop().time,
            on_step=lambda step: (computed.append(step.computed_tokens), told.set()), on_done=lambda done: None,
        )  # fmt: skip
        worker.start()
        worker.send(start(0, 48, 0, given, 1))
        while given < 12:
            await told.wait()
            told.clear()
            for _ in range(3):  # it takes the daemon a while to find them
                await asyncio.sleep(0)
            worker.send(Extend(0, [0, 0]))
            given += 2
        await asyncio.sleep(10)
        await worker.stop()

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        runner.run(run())
    assert computed == [8] * 6


def test_full_blocks_are_told_together_up_to_a_64th_of_a_block_late() -> None:
    told: list[dict[int, int]] = []

    async def run() -> None:
        worker = SimulatedWorker(
            OneSecond(), KvShape((GroupShape("full", None, 1, 1),), 128), 512,
            lambda request, begin, count: [request] * count, asyncio.get_running_loop().time,
            on_step=lambda step: told.append({update.id: update.filled_blocks for update in step.updates}),
            on_done=lambda done: None,
        )  # fmt: skip
        worker.start()
        for request, tokens in enumerate((124, 122, 121)):
            worker.send(start(request, tokens, 0, 2, 50))
        await asyncio.sleep(20)
        await worker.stop()

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        runner.run(run())
    # Six passes after the first one they have 130, 128 and 127 tokens.
    assert told[:3] == [{0: 0, 1: 0, 2: 0}, {0: 1, 1: 1, 2: 0}, {0: 1, 1: 1, 2: 1}]
