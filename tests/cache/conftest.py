"""Makes and closes the caches of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.base.long_work import pacer
from tests.rig import MakeRig, Rig


@pytest.fixture
async def make_rig(tmp_path: Path) -> AsyncIterator[MakeRig]:
    """Makes caches; when the test ends each must add up, agree with its disk, and close."""
    made: list[Rig] = []

    def make(**how: Any) -> Rig:
        made.append(Rig(tmp_path / f"disk{len(made)}", **how))
        return made[-1]

    yield make
    for rig in made:
        await rig.check_disk()
        await rig.close()


class _OpenGate:
    async def pass_through(self) -> None:
        await asyncio.sleep(0)


@pytest.fixture
def turns_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long work can be driven by `send`, a slice at a time, without an event loop."""
    monkeypatch.setattr(pacer, "_gate", _OpenGate)
