"""A relay between an attacker's connection and the daemon that holds back the end of each message."""

from __future__ import annotations

import asyncio
from contextlib import suppress

_PIECE = 1 << 18
_TOGETHER_S = 2.0


class Relay:
    """Forwards `most` bytes of each message, and the rest when all relays of `together` have reached that point, or
    after two seconds.

    Handles one connection at a time, and one message: `begin` announces the next one. Forwards everything that the
    daemon sends.
    """

    def __init__(self, to: str, most: int, together: asyncio.Barrier) -> None:
        self._to = to
        self._most = most
        self._together = together
        self._left = most
        self.moments = 0
        """Number of times that all relays forwarded the rest together."""

    async def listen(self) -> asyncio.Server:
        """Listens on a free port of this host, until the returned server is closed."""
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    def begin(self) -> None:
        """Announces that the next bytes are another message."""
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
