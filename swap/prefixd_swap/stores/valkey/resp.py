"""One connection that speaks RESP2, the protocol of Valkey and Redis, and reads values into the caller's memory.

A client library returns each value as a new `bytes` object, after up to five copies on the event loop. Here the kernel
writes a value into the caller's memory: while the parser is inside a value, `get_buffer` gives that memory to the loop.
Only bytes that arrive together with a reply's first line are copied, at most `_SCRATCH_BYTES` for each reply.

    $65600\\r\\n <header piece> <payload piece> \\r\\n $-1\\r\\n ...
    [- line -] [-------- body: the caller's -------] [trailer]

A connection makes one exchange at a time. An exchange that fails or is cancelled ends its connection, so the replies
it left behind are never taken for those of the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, cast

from prefixd_swap.errors import RemoteStoreError
from prefixd_swap.stores.base import first_bytes

_SCRATCH_BYTES = 16 << 10
_SLICE_BYTES = 256 << 10  # of one write: the transport copies the part that the socket does not take at once
_JOIN_BYTES = 4 << 10  # shorter parts of a request are joined: two system calls would cost more than the copy
_MOST_TEXT_BYTES = 1 << 20
_MOST_VALUE_BYTES = 1 << 30  # of a value that is too long, which is skipped; no server stores longer ones by default


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A server's error reply, for example "OOM command not allowed when used memory > 'maxmemory'."."""

    text: str

    @property
    def code(self) -> str:
        """The first word: "OOM", "NOPERM", "MOVED"."""
        return self.text.partition(" ")[0]


class Expect(Enum):
    """A reply that is not read into the caller's memory."""

    LINE = 1
    """A number or a status: `int` or `bytes`."""
    TEXT = 2
    """A short value: `bytes`; None: there is none."""


Into: TypeAlias = tuple[memoryview, ...]
Expected: TypeAlias = Expect | Into
"""`Into`: a value that these pieces can hold; the reply is its length, or None when it is absent or longer."""
Reply: TypeAlias = int | bytes | ErrorReply | None
Part: TypeAlias = bytes | memoryview


class Wire(asyncio.BufferedProtocol):
    """A connection. Made with `loop.create_connection(lambda: Wire(where), ...)`."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._transport: asyncio.Transport | None = None
        self._encrypted = False
        self._writable = asyncio.Event()
        self._lost: str | None = None  # the reason why no exchange is possible any more
        self._expected: deque[Expected] = deque()
        self._replies: list[Reply] = []
        self._answered: asyncio.Future[None] | None = None
        self._bytes = bytearray(_SCRATCH_BYTES)
        self._scratch = memoryview(self._bytes)
        self._start = 0  # scratch[start:end] has arrived and is not parsed yet
        self._end = 0
        self._body: list[memoryview] | None = None  # pieces that the arriving value still has to fill, last piece first
        self._skip = 0  # remaining bytes of a value that is skipped
        self._arriving: int | None = None  # the length of the arriving value; None: its memory cannot hold it
        self._text = bytearray()  # the value of an `Expect.TEXT`
        self._trailer = False  # the value's \r\n is next
        self.copied_bytes = 0
        """Bytes copied in memory by this connection, requests and values alike."""

    @property
    def closed(self) -> bool:
        """Whether no exchange is possible any more."""
        return self._lost is not None or self._transport is None

    async def exchange(self, parts: Sequence[Part], expected: Sequence[Expected]) -> list[Reply]:
        """Sends a request and waits for its replies, one for each of `expected`.

        Args:
            parts: one command or several, encoded; the memory must not change until the call has returned.
            expected: one for each command.

        Raises:
            RemoteStoreError: the connection was lost, or the server does not speak RESP2.
        """
        if self._answered is not None:
            raise RemoteStoreError(f"{self._where}: two requests at a time on one connection; this is a bug, report it")
        if self._lost is not None:
            raise self._failure()
        self._answered = asyncio.get_running_loop().create_future()
        self._expected = deque(expected)
        self._replies = []
        try:
            await self._send(parts)
            if self._lost is not None:
                raise self._failure()
            if len(self._replies) < len(expected):
                await self._answered
            return self._replies
        except BaseException:
            self.abort("an exchange was given up")
            raise
        finally:
            self._answered = None

    def abort(self, why: str) -> None:
        """Ends the connection at once. No byte is written into a caller's memory any more."""
        self._fail(why)
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=64 << 10, low=0)
        self._encrypted = transport.get_extra_info("sslcontext") is not None
        self._writable.set()
        if self._lost is not None:  # given up while connecting
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc) if exc is not None else "the server closed the connection")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def eof_received(self) -> bool:
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        """The caller's memory while a value arrives, else the scratch buffer."""
        if self._start == self._end:
            self._start = self._end = 0
            if self._body:
                return self._body[-1]
        elif self._end == _SCRATCH_BYTES:
            left = self._end - self._start
            self._scratch[:left] = bytes(self._scratch[self._start : self._end])
            self._start, self._end = 0, left
        return self._scratch[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._lost is not None:
            return
        if self._body and self._start == self._end:
            self._advance(nbytes)
        else:
            self._end += nbytes
        try:
            self._parse()
        except ValueError as error:
            self.abort(f"the server does not speak RESP2 ({error}); see whether this is the port of a Valkey server")

    # The request.

    async def _send(self, parts: Sequence[Part]) -> None:
        small: list[Part] = []
        for part in parts:
            if len(part) < _JOIN_BYTES:
                small.append(part)
                if len(small) == 1024:
                    await self._write(b"".join(small))
                    small = []
                continue
            if small:
                await self._write(b"".join(small))
                small = []
            view = memoryview(part)
            for at in range(0, len(part), _SLICE_BYTES):
                await self._write(view[at : at + _SLICE_BYTES])
        if small:
            await self._write(b"".join(small))

    async def _write(self, data: Part) -> None:
        if not self._writable.is_set():
            await self._writable.wait()
        if self._lost is not None or self._transport is None:
            raise self._failure()
        before = self._transport.get_write_buffer_size()
        self._transport.write(data)
        # A plain transport copies the bytes that the socket did not take; an encrypted one copies everything.
        self.copied_bytes += len(data) if self._encrypted else self._transport.get_write_buffer_size() - before

    # The replies.

    def _parse(self) -> None:
        while self._lost is None:
            if self._body is not None or self._skip:
                if not self._take_body():
                    return
            elif self._trailer:
                if self._end - self._start < 2:
                    return
                if bytes(self._scratch[self._start : self._start + 2]) != b"\r\n":
                    raise ValueError("a value is longer than its length says")
                self._start += 2
                self._trailer = False
                self._reply(bytes(self._text) if self._expected[0] is Expect.TEXT else self._arriving)
            elif self._start == self._end:
                return
            elif not self._expected and self._bytes[self._start] != ord("-"):  # "-ERR max number of clients reached"
                raise ValueError("bytes without a request")
            elif (end := self._bytes.find(b"\r\n", self._start, self._end)) >= 0:
                line = bytes(self._scratch[self._start : end])
                self._start = end + 2
                self._take_line(line)
            elif self._end - self._start == _SCRATCH_BYTES:
                raise ValueError(f"a line of more than {_SCRATCH_BYTES} bytes")
            else:
                return

    def _take_line(self, line: bytes) -> None:
        """Takes a reply of one line, or the line before a value."""
        if not self._expected:
            self.abort(line[1:].decode("utf-8", "replace"))
            return
        kind, expected = line[:1], self._expected[0]
        if kind == b"-":
            self._reply(ErrorReply(line[1:].decode("utf-8", "replace")))
        elif expected is Expect.LINE:
            if kind not in (b":", b"+"):
                raise ValueError(f"{line[:32]!r} where a number or a status belongs")
            self._reply(int(line[1:]) if kind == b":" else line[1:])
        elif kind != b"$":
            raise ValueError(f"{line[:32]!r} where a value belongs")
        elif (nbytes := int(line[1:])) == -1:
            self._reply(None)
        else:
            self._expect_body(nbytes, expected)

    def _expect_body(self, nbytes: int, expected: Expected) -> None:
        if not 0 <= nbytes <= (_MOST_TEXT_BYTES if isinstance(expected, Expect) else _MOST_VALUE_BYTES):
            raise ValueError(f"a value of {nbytes} bytes")
        if isinstance(expected, Expect):
            self._text = bytearray(nbytes)
            expected = (memoryview(self._text),)
        if nbytes <= sum(len(piece) for piece in expected):
            self._arriving, self._body = nbytes, list(reversed(first_bytes(expected, nbytes)))
        else:
            self._arriving, self._skip = None, nbytes
        self._trailer = True

    def _take_body(self) -> bool:
        """Copies the bytes in `_scratch` to the arriving value; returns whether the value is complete."""
        skipped = min(self._skip, self._end - self._start)
        self._skip -= skipped
        self._start += skipped
        while self._body and self._start < self._end:
            count = min(len(self._body[-1]), self._end - self._start)
            self._body[-1][:count] = self._scratch[self._start : self._start + count]
            self._start += count
            self.copied_bytes += count
            self._advance(count)
        if self._skip or self._body:
            return False
        self._body = None
        return True

    def _advance(self, nbytes: int) -> None:
        """Count `nbytes` arrived bytes of the next piece."""
        if self._body:
            self._body[-1] = self._body[-1][nbytes:]
            if not len(self._body[-1]):
                self._body.pop()

    def _reply(self, reply: Reply) -> None:
        self._expected.popleft()
        self._replies.append(reply)
        if not self._expected and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _fail(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
        self._body = None
        self._expected.clear()
        self._writable.set()
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(self._failure())
            self._answered.exception()  # mark it as retrieved: the exchange may have ended without awaiting it

    def _failure(self) -> RemoteStoreError:
        return RemoteStoreError(
            f"{self._where}: {self._lost or 'not connected'}; see whether it runs, and whether it expects TLS (valkeys://)"
        )
