"""Whether the daemon takes new work."""

from __future__ import annotations

import asyncio


class Draining(asyncio.Event):
    """Set while the daemon takes no new work."""

    def __init__(self) -> None:
        super().__init__()
        self._over = asyncio.Event()
        self._over.set()

    def set(self) -> None:
        """Takes no new work from now on."""
        self._over.clear()
        super().set()

    def clear(self) -> None:
        """Takes new work again."""
        super().clear()
        self._over.set()

    async def wait_over(self) -> bool:
        """Waits until the daemon takes new work; returns True."""
        return await self._over.wait()
