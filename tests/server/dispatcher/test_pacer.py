from __future__ import annotations

import asyncio

import pytest

from prefixd.server import pacer
from prefixd.server.pacer import Pacer


async def test_others_run_after_a_slice_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacer, "_SLICE_ROWS", 1000)
    monkeypatch.setattr(pacer, "_CALL_ROWS", 100)
    turns: list[int] = []

    async def other() -> None:
        for turn in range(3):
            turns.append(turn)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    paced = Pacer()
    for _ in range(4):  # 4 * (100 + 100)
        await paced.worked(100)
    assert not turns
    await paced.worked(100)
    assert turns == [0]
    await paced.worked(5000)
    assert turns == [0, 1]
    await paced.worked(899)
    assert turns == [0, 1]
    await task
