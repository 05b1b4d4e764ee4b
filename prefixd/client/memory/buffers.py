"""Divides a caller's buffers into blocks and parts, and lists the copies between them and the arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixd.client.errors import BufferSizeError, InvalidArgumentError, ServerError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = Any
"""Anything contiguous with the buffer protocol: bytes, bytearray, memoryview, numpy array."""

NO_OFFSET = 2**64 - 1
"""The offset of a part that a prefix of this length does not need."""

RUN_BYTES = 32 << 20
"""Neighbouring parts are copied together up to this size. The lease is checked before each copy, so an expired lease is
noticed in time."""


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Bytes that are contiguous on both sides."""

    arena_offset: int
    user: Bytes


class BlockBuffers:
    """One buffer with whole blocks one after the other, or one buffer per part.

    In the first form the parts of a block follow each other; in the second, buffer `p` has part `p` of every block.
    """

    def __init__(self, buffers: Buffer, part_bytes: Sequence[int], blocks: int, *, writable: bool) -> None:
        """Checks that `buffers` have room for `blocks` blocks (`writable`), or have exactly their bytes.

        Raises `BufferSizeError`, which names both sizes, `InvalidArgumentError` for an unusable buffer.
        """
        self._part_bytes = tuple(part_bytes)
        block_bytes = sum(part_bytes)
        separate = isinstance(buffers, list | tuple)
        if separate and len(buffers) != len(self._part_bytes):
            raise BufferSizeError(
                f"{len(buffers)} buffers for blocks of {len(self._part_bytes)} parts: "
                "give one buffer per part, or one buffer for whole blocks"
            )
        arrays = [_as_bytes(b, writable) for b in (buffers if separate else [buffers])]
        strides = self._part_bytes if separate else (block_bytes,)
        for array, stride in zip(arrays, strides, strict=True):
            need = blocks * stride
            if array.nbytes < need or (not writable and array.nbytes != need):
                raise BufferSizeError(
                    f"the buffer has {array.nbytes} bytes and {blocks} blocks of {stride} bytes need {need}"
                )
        self._arrays = arrays
        self._starts: list[tuple[int, int, int]] = []
        """(buffer, offset of the part in the first block, bytes from block to block) of each part."""
        start = 0
        for index, nbytes in enumerate(self._part_bytes):
            self._starts.append((index, 0, nbytes) if separate else (0, start, block_bytes))
            start += nbytes

    def part(self, block: int, part: int) -> Bytes:
        """The bytes of one part of one block, no copy."""
        buffer, start, stride = self._starts[part]
        begin = start + block * stride
        return self._arrays[buffer][begin : begin + self._part_bytes[part]]

    def runs(self, offsets: Sequence[int], first: int, blocks: int) -> Iterator[CopyRun]:
        """Yields the copies of the blocks `first` onwards, whose parts have `offsets` in the arena, block-major.

        Parts at `NO_OFFSET` are left out.
        """
        parts = len(self._part_bytes)
        open_run: tuple[int, int, int, int] | None = None  # buffer, begin, nbytes, arena offset
        for block in range(blocks):
            for part, nbytes in enumerate(self._part_bytes):
                buffer, start, stride = self._starts[part]
                begin = start + (first + block) * stride
                offset = offsets[block * parts + part]
                if offset == NO_OFFSET:
                    continue
                if open_run is not None:
                    b, at, n, off = open_run
                    if b == buffer and at + n == begin and off + n == offset and n + nbytes <= RUN_BYTES:
                        open_run = (b, at, n + nbytes, off)
                        continue
                    yield CopyRun(off, self._arrays[b][at : at + n])
                open_run = (buffer, begin, nbytes, offset)
        if open_run is not None:
            b, at, n, off = open_run
            yield CopyRun(off, self._arrays[b][at : at + n])

    def pieces(self, first: int, blocks: int, piece_bytes: int) -> Iterator[Bytes]:
        """Yields blocks `first` onwards, in the order of the stream, in pieces of at most `piece_bytes`."""
        for block in range(first, first + blocks):
            for part in range(len(self._part_bytes)):
                data = self.part(block, part)
                for begin in range(0, data.nbytes, piece_bytes):
                    yield data[begin : begin + piece_bytes]

    def messages(self, first: int, blocks: int, piece_bytes: int, joined_bytes: int) -> Iterator[bytes]:
        """Yields copies of the same pieces; joins small ones up to `joined_bytes`.

        Any message takes a tenth of a millisecond of the daemon's event loop, also a small one.
        """
        held: list[memoryview] = []
        room = joined_bytes
        for piece in self.pieces(first, blocks, piece_bytes):
            if held and piece.nbytes > room:
                yield b"".join(held)
                held, room = [], joined_bytes
            held.append(piece.data)
            room -= piece.nbytes
        if held:
            yield b"".join(held)


class StreamSink:
    """Fills `blocks` blocks of `buffers`, from block `first` on, with the bytes of a stream in pieces of any size.

    `sent` has a byte for each part, block-major: 0 if the stream leaves the part out. It is empty if the stream has all
    parts. Raises `ServerError` if it has another number of parts than the blocks.
    """

    def __init__(self, buffers: BlockBuffers, first: int, blocks: int, sent: bytes = b"") -> None:
        targets = list(buffers.pieces(first, blocks, 1 << 62))
        if sent and len(sent) != len(targets):
            raise ServerError(
                f"the daemon reports for {len(sent)} parts whether it sends them, and the blocks have {len(targets)}"
            )
        if sent:
            targets = [target for target, is_sent in zip(targets, sent, strict=True) if is_sent]
        self.missing_bytes = sum(target.nbytes for target in targets)
        self._targets = iter(targets)
        self._target: Bytes = np.empty(0, np.uint8)

    def write(self, data: bytes) -> None:
        """Writes the next bytes. Raises `ServerError` if there are more than the blocks hold."""
        source = np.frombuffer(data, np.uint8)
        if source.nbytes > self.missing_bytes:
            raise ServerError(f"the stream has {source.nbytes - self.missing_bytes} bytes more than its blocks hold")
        self.missing_bytes -= source.nbytes
        while source.nbytes:
            if not self._target.nbytes:
                self._target = next(self._targets)
            count = min(source.nbytes, self._target.nbytes)
            self._target[:count] = source[:count]
            source, self._target = source[count:], self._target[count:]


def _as_bytes(buffer: Buffer, writable: bool) -> Bytes:
    try:
        if isinstance(buffer, np.ndarray):
            if not buffer.flags.c_contiguous:
                raise InvalidArgumentError("the array is not contiguous: pass numpy.ascontiguousarray(array)")
            array = buffer.reshape(-1).view(np.uint8)
        else:
            array = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
    except (TypeError, BufferError) as error:
        raise InvalidArgumentError(
            f"cannot use a {type(buffer).__name__} as a buffer ({error}): give bytes, a memoryview or numpy "
            "array, and of a torch tensor, tensor.view(torch.uint8).numpy()"
        ) from error
    if writable and not array.flags.writeable:
        raise InvalidArgumentError(f"the {type(buffer).__name__} to load into is read-only")
    return array
