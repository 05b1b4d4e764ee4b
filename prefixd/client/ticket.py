"""The ticket by which a client shows a daemon on its own host which user it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

DOOR_SUFFIX = "-memory"
"""Beside the daemon's socket lies its local door, under the socket's name and this."""
_FRESH_S = 3600.0  # a ticket is good for a day
_FETCH_S = 5.0
_ANSWER_LIMIT = 4096


class Ticket:
    """Fetched before the first call, again once an hour, and when a daemon refuses it.

    Where there is no door (the socket alone was mounted into a container), calls go without one, and the daemon takes
    us for a client of its default tenant, if it lets us in at all.

    Args:
        socket: path of the daemon's unix socket.
        clock: seconds, as `prefixd.clocks.elapsed_s`.
    """

    def __init__(self, socket: str, clock: Callable[[], float]) -> None:
        self._door = socket + DOOR_SUFFIX
        self._clock = clock
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._fetched_s: float | None = None
        self._fetching = asyncio.Lock()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call carries."""
        return self._metadata

    @property
    def fresh(self) -> bool:
        """Whether it need not be fetched now."""
        return self._fetched_s is not None and self._clock() - self._fetched_s < _FRESH_S

    async def fetch(self) -> None:
        """Fetches it, unless it is fresh or there is nobody to ask."""
        async with self._fetching:
            if not self.fresh:
                await self._fetch()

    async def replace(self, refused: tuple[tuple[str, str], ...]) -> bool:
        """The daemon refused a call that carried `refused`: it has another key than the one that signed it. Fetches
        another ticket, once for all calls that were refused together; False where there is none to be had.
        """
        async with self._fetching:
            if self._metadata == refused:
                await self._fetch()
            return self._metadata != refused

    async def _fetch(self) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_FETCH_S):
                answer = await self._ask()
            self._metadata = (("authorization", f"Ticket {answer}"),) if answer else ()
            self._fetched_s = self._clock()

    async def _ask(self) -> str:
        reader, writer = await asyncio.open_unix_connection(self._door)
        try:
            writer.write(b"ticket\n")
            answer = await reader.read(_ANSWER_LIMIT)
        finally:
            writer.close()
        try:
            said = json.loads(answer)
        except ValueError:  # a daemon that knows no tickets hangs up
            return ""
        return str(said.get("ticket", "")) if isinstance(said, dict) else ""
