"""A relay between an attacker's connection and the daemon that holds back the end of what is sent."""

from __future__ import annotations

import asyncio
from contextlib import suppress

_PIECE = 1 << 18
_TOGETHER_S = 2.0


class Relay:
    """Lets `most` bytes of each message through, and the rest when all relays of `together` have come as far, or after
    two seconds.

    One connection at a time, and one message: `begin` says that the next one comes. Everything that the daemon sends
    goes through.
    """

    def __init__(self, to: str, most: int, together: asyncio.Barrier) -> None:
        self._to = to
        self._most = most
        self._together = together
        self._left = most
        self.moments = 0
        """How often all relays let the rest through together."""

    async def listen(self) -> asyncio.Server:
        """On a free port of this host; serves until that is closed."""
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    def begin(self) -> None:
        """What is sent from here on is another message."""
        self._left = self._most

    async def _serve(self, sent: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        host, _, port = self._to.rpartition(":")
        received, daemon = await asyncio.open_connection(host, int(port))
        with suppress(ConnectionError):
            await asyncio.gather(self._forward(sent, daemon), _copy(received, answers))
        daemon.close()
        answers.close()

    async def _forward(self, sent: asyncio.StreamReader, daemon: asyncio.StreamWriter) -> None:
        while piece := await sent.read(_PIECE):
            before, self._left = self._left, self._left - len(piece)
            if self._left <= 0 < before:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TOGETHER_S):
                        await self._together.wait()
                        self.moments += 1
            daemon.write(piece)
            await daemon.drain()
        daemon.write_eof()


async def _copy(received: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
    while piece := await received.read(_PIECE):
        answers.write(piece)
        await answers.drain()
