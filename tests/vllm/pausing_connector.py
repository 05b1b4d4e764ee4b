"""PrefixdConnector whose copies stop in the middle, so that a test can do something just then.

Loaded by vLLM in place of the connector. `PAUSE_DIR` names a folder. A load (or a save) whose copy finds a file
`pause-load` (`pause-save`) there copies half of its bytes, writes the file `reached-load`, and goes on with the other
half once `pause-load` is gone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from prefixd.integrations.engine.copying.block_transfers import Transfers
from prefixd.integrations.vllm import worker_half
from prefixd.integrations.vllm.connector import PrefixdConnector
from prefixd_swap import CopyEngine

__all__ = ["PrefixdConnector"]

_POLL_S = 0.005
_doing: ContextVar[str] = ContextVar("doing")


class PausingCopyEngine(CopyEngine):
    """Stops half-way through a copy when it is told to."""

    def __init__(self, inner: CopyEngine) -> None:
        self._inner = inner
        self._folder = Path(os.environ["PAUSE_DIR"])

    async def copy(self, pairs: Sequence[Any]) -> None:
        pause = self._folder / f"pause-{_doing.get()}"
        half = len(pairs) // 2
        await self._inner.copy(pairs[:half])
        if pause.exists():
            (self._folder / f"reached-{_doing.get()}").touch()
            while pause.exists():
                await asyncio.sleep(_POLL_S)
        await self._inner.copy(pairs[half:])

    def close(self) -> None:
        self._inner.close()


class PausingTransfers(Transfers):
    """Says to its copy engine what it copies for."""

    def __init__(self, link: Any, geometry: Any, pages: Any, rank: int, engine: CopyEngine, *rest: Any) -> None:
        super().__init__(link, geometry, pages, rank, PausingCopyEngine(engine), *rest)

    async def _load(self, *arguments: Any) -> None:
        _doing.set("load")
        await super()._load(*arguments)

    async def _save(self, *arguments: Any) -> None:
        _doing.set("save")
        await super()._save(*arguments)


worker_half.Transfers = PausingTransfers
