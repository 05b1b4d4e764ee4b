"""The worker that computes nothing says what the real one says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from prefixd.planner.worker import SimulatedWorker
from prefixd.server.kv_shape import KvShape
from prefixd.worker.protocol import Arrived, Done, Extend, FullAttention, GroupShape, Sampling, Start, Step
from prefixd_swap.simulated_time import SimulatedTimeLoop

KV = KvShape((GroupShape("full", FullAttention(), 1, 1),), 4)


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
