"""Turns that cost time, in simulated time."""

from __future__ import annotations

import asyncio

from prefixd.base.tenancy.fairness import PacedLine
from prefixd.planner.simulation.event_loop import SimulatedTimeLoop


async def _turns(line: PacedLine, count: int, cost_s: float) -> list[float]:
    time, began_s = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
    passed: list[float] = []
    for _ in range(count):
        await line.turn(cost_s)
        passed.append(round(time() - began_s, 6))
    return passed


def test_turns_are_as_far_apart_as_they_cost() -> None:
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        assert runner.run(_turns(PacedLine(), 4, 0.5)) == [0, 0.5, 1, 1.5]


def test_after_a_pause_a_burst_costs_no_wait() -> None:
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        assert runner.run(_turns(PacedLine(burst_s=1.0), 5, 0.5)) == [0, 0, 0, 0.5, 1]


def test_who_gives_up_pays_nothing() -> None:
    async def work() -> None:
        line = PacedLine()
        await line.turn(1.0)
        waiting = asyncio.create_task(line.turn(100.0))
        await asyncio.sleep(0.5)
        assert not line.idle
        waiting.cancel()
        await asyncio.sleep(0.6)
        assert line.idle

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        runner.run(work())
