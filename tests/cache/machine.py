"""What state machines of the whole cache share: a cache of their own, its event loop, and how it ends."""

from __future__ import annotations

import asyncio
import tempfile
from abc import abstractmethod
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis.stateful import RuleBasedStateMachine

from tests.rig import Rig

T = TypeVar("T")


class RigMachine(RuleBasedStateMachine):
    """A state machine around a cache in a temporary folder."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="prefixd-test-")
        self.loop = asyncio.new_event_loop()
        self.rig = self.run(self.make(Path(self.folder.name)))

    @abstractmethod
    async def make(self, path: Path) -> Rig:
        """The cache, on a disk at `path`."""

    @abstractmethod
    def let_go(self) -> None:
        """Ends what the worker holds; leases and reservations end with their sessions."""

    async def rest(self) -> None:
        """Does what is left to do in the background."""
        await self.rig.cache.mover.quiesce()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work`, then what it left to do in the background, so that every run of an example is the same."""

        async def and_rest() -> T:
            try:
                return await work
            finally:
                if hasattr(self, "rig"):
                    await self.rest()

        return self.loop.run_until_complete(asyncio.wait_for(and_rest(), 60))

    def teardown(self) -> None:
        """Closes the cache, which has to agree with its disk."""

        async def end() -> None:
            self.let_go()
            await self.rig.check_disk()
            await self.rig.close()

        try:
            self.run(end())
        finally:
            self.loop.close()
            self.folder.cleanup()
