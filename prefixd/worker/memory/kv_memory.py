"""The interface between the engine and the memory of keys and values.

There are two designs, chosen by `worker.kv`: virtual tensors (`virtual_kv`), and block tables as in PagedAttention
(`paged_kv`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from prefixd.worker.images.prompt_images import PassImages
from prefixd.worker_protocol.protocol import KvUsage, StateFrames

Spans = tuple[tuple[int, int], ...]
"""For every segment of a pass the tokens [start, end) of its sequence that are read."""


class KvSequence(Protocol):
    """The memory of one sequence of tokens: a run of blocks."""

    @property
    def blocks(self) -> int:
        """How many blocks have memory."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, stop) of one sequence, which a pass computes; its memory reaches to the end of their blocks.

    keep: for recurrent layers, (position, buffer): the state after `position` tokens is copied into the buffer.
    images: the sequence's images in the pass; None if it has none.
    """

    sequence: KvSequence
    start: int
    stop: int
    keep: Sequence[tuple[int, torch.Tensor]] = ()
    images: PassImages | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def both_ways(self) -> Sequence[tuple[int, int]]:
        """[start, stop) of the images in the segment whose tokens attend to each other in both directions."""
        return () if self.images is None else self.images.both_ways


class StepKv(Protocol):
    """The memory of one forward pass over a flattened batch: the tokens of all segments one after the other."""

    @property
    def segments(self) -> Sequence[Segment]:
        """At least one, in the order of their rows in the batch."""
        ...

    def write(self, layer: int, pairs: torch.Tensor) -> None:
        """Write a layer's keys and values of the segments' tokens, ``[tokens, 2, kv_heads, head_dim]``."""
        ...

    def scrub(self, segment: int, end: int) -> None:
        """Zero a segment's memory from its last token to token `end`, which lies in the same block.

        Recycled memory can hold a NaN, and a mask does not stop one: 0 * NaN is NaN.
        """
        ...

    def read(self, layer: int, spans: Spans) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each segment's keys and values in its span, both ``[kv_heads, end - start, head_dim]``.

        A pass has few lists of spans: one for all layers without a window, and one for each size of window. A start is
        0 or `first_key` of a window, a multiple of the tile; nothing before it is touched, since memory before a window
        may have been given up. An end lies in the block of the last token.
        """
        ...

    def varlen_arguments(self) -> tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], dict[str, object]]:
        """Arguments for torch's `varlen_attn` over all segments: a function of a layer to its keys and values, and
        keywords.

        The keywords are ``cu_seq_k``, ``max_k`` and ``seqused_k``, and ``block_table`` for block tables.
        """
        ...


class ChunkableStep(StepKv, Protocol):
    """A pass that layers with chunks can read."""

    def in_chunks(self, tokens: int) -> StepKv:
        """The same pass, for layers whose tokens attend to their own chunk of `tokens` tokens alone.

        Each part of a segment in one chunk is a segment, of a sequence that begins where the chunk does (see
        `cut_at_chunks`). Chunks consist of whole blocks. The rows of the batch stay what they are.
        """
        ...


def cut_at_chunks(segments: Sequence[Segment], tokens: int) -> list[tuple[int, int, Segment]]:
    """The parts of segments in chunks of `tokens` tokens: the segment's place, the chunk's first token, and the part
    counted from there.

    Example, chunks of 8, a segment [5, 18): (0, 0, [5, 8)), (0, 8, [0, 8)), (0, 16, [0, 2)).
    """
    parts = []
    for place, segment in enumerate(segments):
        for chunk in range(segment.start // tokens * tokens, segment.stop, tokens):
            start, stop = max(segment.start, chunk), min(segment.stop, chunk + tokens)
            parts.append((place, chunk, Segment(segment.sequence, start - chunk, stop - chunk)))
    return parts


class KvMemory(Protocol):
    """Memory for sequences, in frames that the daemon hands out."""

    def open(self, frames: Sequence[int], state: StateFrames | None = None) -> KvSequence:
        """A sequence with these frames as its first blocks; -1 where a block has none.

        state: the frames of its state, if the model has recurrent layers.
        Raises OutOfMemoryError when there are too many sequences or no mapping is left, MemoryMisuseError for a frame
        that does not exist or more than the longest sequence.
        """
        ...

    def extend(self, sequence: KvSequence, frames: Sequence[int]) -> None:
        """More frames for a sequence. Raises as `open`."""
        ...

    def assign(self, sequence: KvSequence, frames: Sequence[int]) -> None:
        """Give a sequence, which no pass uses now, these frames in place of those it has. Raises as `open`."""
        ...

    def copy(self, source: KvSequence, target: KvSequence, first: int, stop: int) -> None:
        """Copy the KV of tokens [first, stop), queued on the device behind the passes so far. Raises as `wait`.

        Copies up to the end of the last block, with the zeros that a pass has written behind the last token.
        """
        ...

    def pass_by(self, sequence: KvSequence, tokens: int) -> None:
        """Give up the blocks that windows have passed after `tokens` tokens (`passed_blocks`)."""
        ...

    def ready(self, sequence: KvSequence, tokens: int) -> bool:
        """Whether the memory of a sequence's first `tokens` tokens can be used now without waiting."""
        ...

    def wait(self, sequence: KvSequence, tokens: int) -> None:
        """Wait until the memory of a sequence's first `tokens` tokens can be used. Raises as `open`."""
        ...

    def close(self, sequence: KvSequence, on_closed: Callable[[], None]) -> None:
        """End a sequence; `on_closed` is called, now or by `poll`, when nothing reads or writes its frames any more."""
        ...

    def poll(self, wait: bool = False) -> int:
        """Finish what `close` began as far as the device is, or with `wait` all of it; returns how many are left."""
        ...

    def forget(self, frames: Sequence[int]) -> None:
        """Unmap frames that no sequence has, before they are removed. It may wait for the device."""
        ...

    def expect(self, frames: Sequence[int]) -> None:
        """A sequence with these frames as its first blocks will probably be opened: they may be mapped before."""
        ...

    def map_ahead(self) -> None:
        """Begin to map and unmap ahead of need, beside the pass that is computed now. Raises DeviceError."""
        ...

    def step(self, segments: Sequence[Segment]) -> StepKv:
        """The memory of a forward pass over these segments."""
        ...

    def usage(self) -> KvUsage:
        """What is shared now, and counts since the start."""
        ...

    def end(self) -> None:
        """Give everything back; all sequences have been closed."""
        ...
