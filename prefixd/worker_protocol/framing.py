"""The messages between daemon and worker as bytes on their socket.

A message is a 4-byte little-endian length and that many bytes of msgpack: a map with the message's name under
"type".
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from prefixd.base.rules.rules import from_fields, to_fields
from prefixd.worker_protocol.errors import ConnectionClosedError, ProtocolError
from prefixd.worker_protocol.protocol import FromWorker, ToWorker

MAX_MESSAGE_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder(enc_hook=to_fields)


def encode(message: FromWorker | ToWorker) -> bytearray:
    """A message with its length in front."""
    framed = bytearray()
    _encoder.encode_into(message, framed, _LENGTH.size)
    _LENGTH.pack_into(framed, 0, len(framed) - _LENGTH.size)
    return framed


def from_worker() -> Decoder[FromWorker]:
    """A decoder for the daemon's side."""
    return Decoder(FromWorker)


def to_worker() -> Decoder[ToWorker]:
    """A decoder for the worker's side."""
    return Decoder(ToWorker)


class Decoder(Generic[T]):
    """Cuts a byte stream into messages."""

    def __init__(self, union: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(union, dec_hook=from_fields).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Take bytes as they came; return the messages that are now complete. Raises ProtocolError."""
        self._buffer += data
        messages: list[T] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + self.length(self._buffer[start : start + _LENGTH.size])
            if end > len(self._buffer):
                break
            messages.append(self.decode(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return messages

    def length(self, header: bytes | bytearray) -> int:
        """Bytes of the body that follows a header. Raises ProtocolError for more than MAX_MESSAGE_BYTES."""
        nbytes = int(_LENGTH.unpack(header)[0])
        if nbytes > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a worker message of {nbytes} bytes is over the limit of {MAX_MESSAGE_BYTES}: "
                "the stream is out of step, or the other end is not a prefixd worker or daemon"
            )
        return nbytes

    def decode(self, body: bytes) -> T:
        """One message's body. Raises ProtocolError."""
        try:
            message: T = self._decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"a worker message of {len(body)} bytes cannot be read ({error}); "
                "daemon and worker must come from the same installation of prefixd"
            ) from error
        return message


class Connection(Generic[T]):
    """A blocking end of the socket, for the worker's single thread.

    It never reads past the message it returns, so that descriptors sent after a message can be received with
    `prefixd_swap.vmem.recv_export` on `socket`.
    """

    def __init__(self, end: socket.socket, decoder: Decoder[T]) -> None:
        end.setblocking(True)
        self.socket = end
        self._decoder = decoder
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, message: FromWorker | ToWorker) -> None:
        """Send one message. Raises ConnectionClosedError."""
        try:
            self.socket.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ConnectionClosedError("the other end of the worker's socket is closed") from error

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """Whether `receive` would return or raise at once; waits up to `timeout_s`, without end for None."""
        return bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000))

    def receive(self) -> T:
        """Wait for one message. Raises ConnectionClosedError at the end of the stream, ProtocolError."""
        header = self._read(_LENGTH.size)
        return self._decoder.decode(self._read(self._decoder.length(header)))

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _read(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view = memoryview(data)
        got = 0
        while got < nbytes:
            try:
                count = self.socket.recv_into(view[got:])
            except ConnectionResetError:
                count = 0
            if count == 0:
                raise ConnectionClosedError("the other end of the worker's socket is closed")
            got += count
        return bytes(data)
