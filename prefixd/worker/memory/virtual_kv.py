"""KV in virtual tensors: every sequence lies in contiguous addresses, all sequences in one tensor of fixed stride."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch

from prefixd.worker.memory.kv_memory import KvSequence, Segment, Spans, cut_at_chunks
from prefixd.worker.to_device import to_device
from prefixd.worker_protocol.protocol import KvUsage, StateFrames
from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.vmem import FrameId
from prefixd_swap.vtensor import VirtualTensor, VirtualTensorManager


class VirtualKv:
    """Sequences as virtual tensors of one manager (vTensor, section 5)."""

    def __init__(self, manager: VirtualTensorManager) -> None:
        self.manager = manager

    def open(self, frames: Sequence[int], state: StateFrames | None = None) -> VirtualTensor:
        """A sequence with these frames as its first blocks; -1 where a block has none. The addresses are those on which
        most of the frames are still mapped."""
        del state
        return self.manager.open([FrameId(frame) for frame in frames])

    def extend(self, sequence: KvSequence, frames: Sequence[int]) -> None:
        """More frames for a sequence."""
        self.manager.extend(_tensor(sequence), [FrameId(frame) for frame in frames])

    def assign(self, sequence: KvSequence, frames: Sequence[int]) -> None:
        """Give a sequence, which no pass uses now, these frames in place of those it has. Only blocks whose frame is
        another one are mapped anew."""
        self.manager.assign(_tensor(sequence), [FrameId(frame) for frame in frames])

    def copy(self, source: KvSequence, target: KvSequence, first: int, stop: int) -> None:
        """Copy the KV of tokens [first, stop), queued on the device behind the passes so far."""
        # Only up to `stop`: later tokens may still be mapped, or may have failed, which their next passes will notice.
        self.manager.wait([_tensor(source), _tensor(target)], stop)
        block = self.manager.geometry.block_tokens
        self.manager.copy_tokens(_tensor(source), _tensor(target), first, -(-stop // block) * block - first)

    def pass_by(self, sequence: KvSequence, tokens: int) -> None:
        """Does nothing: without groups every layer needs all blocks."""
        del sequence, tokens

    def give_up(self, sequence: KvSequence, frames: int) -> None:
        """Give up the first `frames` frames of a sequence; nothing reads or writes them any more."""
        self.manager.pass_by(_tensor(sequence), frames)

    def ready(self, sequence: KvSequence, tokens: int) -> bool:
        """Whether the frames of these tokens are mapped."""
        return _tensor(sequence).usable_tokens >= tokens

    def wait(self, sequence: KvSequence, tokens: int) -> None:
        """Wait until the frames of these tokens are mapped."""
        tensor = _tensor(sequence)
        if not tensor.settled:
            self.manager.wait([tensor], tokens)

    def close(self, sequence: KvSequence, on_closed: Callable[[], None]) -> None:
        """End a sequence; `on_closed` is called, now or by `poll`, when nothing reads or writes its frames any more. No
        synchronisation: an event of the current stream says when its work has ended."""
        device = self.manager.kv.device
        streams = [torch.cuda.current_stream(device).cuda_stream] if device.type == "cuda" else []
        self.manager.release(_tensor(sequence), streams=streams, on_released=on_closed)

    def poll(self, wait: bool = False) -> int:
        """Finish what `close` began as far as the device is, or with `wait` all of it; returns how many are left."""
        return self.manager.poll(wait)

    def forget(self, frames: Sequence[int]) -> None:
        """Unmap frames that no sequence has and that are about to be no more. What ended requests left mapped goes.
        Raises MemoryMisuseError if a request has one of the frames."""
        gone = {FrameId(frame) for frame in frames}
        self.manager.unused.reclaim(gone)
        if self.manager.unused.still_mapped(gone):  # on addresses whose request has ended and waits for the device
            self.manager.poll(wait=True)
            self.manager.unused.reclaim(gone)
        if left := self.manager.unused.still_mapped(gone):
            raise MemoryMisuseError(f"frame {min(left)} is to go, but a request has it; end the request first")

    def expect(self, frames: Sequence[int]) -> None:
        """A sequence with these frames as its first blocks will probably be opened."""
        self.manager.mapping.expect([FrameId(frame) for frame in frames])

    def map_ahead(self) -> None:
        """Map and unmap ahead of need, in the background (`RowMapping.map_ahead`)."""
        self.manager.mapping.map_ahead()

    def step(self, segments: Sequence[Segment]) -> VirtualStep:
        """The memory of a forward pass over these segments."""
        rows = [_tensor(segment.sequence).row for segment in segments]
        return VirtualStep(self.manager.kv, segments, rows)

    def usage(self) -> KvUsage:
        """What is shared now, and what was done since the start."""
        counts = self.manager.mapping.counts
        return KvUsage(self.manager.physical.shared_count, counts.mapped, counts.reused, counts.copied)

    def end(self) -> None:
        """Give the addresses back."""
        self.manager.close()


class VirtualStep:
    """A pass over rows of one tensor.

    kv: ``[requests, tokens, layers, 2, kv_heads, head_dim]``; rows[i] is where segment i lies.
    offsets: how many tokens of a row lie before the sequence of a segment; None for none.

    Attributes:
        row_tokens: tokens from a row to the next.
        starts: where each segment's first key lies in what `flat` returns: row * row_tokens (vAttention, 5.2.3), and
            the offset.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        segments: Sequence[Segment],
        rows: Sequence[int],
        offsets: Sequence[int] | None = None,
    ) -> None:
        self.segments = tuple(segments)
        self._kv = kv
        self._rows = tuple(rows)
        self._offsets = tuple(offsets) if offsets is not None else (0,) * len(self._rows)
        self.row_tokens = kv.shape[1]
        self.starts = [row * self.row_tokens + offset for row, offset in zip(rows, self._offsets, strict=True)]
        self._lengths = [len(segment) for segment in segments]
        self._read: dict[Spans, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}  # by layer

    def write(self, layer: int, pairs: torch.Tensor) -> None:
        """One kernel for all segments on a GPU, a copy for each on a CPU."""
        if self._kv.is_cuda:
            self._flat[:, layer].index_copy_(0, self._slots, pairs)
        else:
            torch._foreach_copy_(self._targets[layer], list(pairs.split(self._lengths)))

    def scrub(self, segment: int, end: int) -> None:
        """Zero a segment's memory from its last token to token `end`, which lies in the same block."""
        self._tokens(segment, self.segments[segment].stop, end).zero_()

    def read(self, layer: int, spans: Spans) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views, made once for each list of spans; nothing is copied."""
        if spans not in self._read:
            readable = [self._tokens(segment, start, end) for segment, (start, end) in enumerate(spans)]
            keys = [kv[:, :, 0].permute(1, 2, 0, 3).unbind(0) for kv in readable]
            values = [kv[:, :, 1].permute(1, 2, 0, 3).unbind(0) for kv in readable]
            self._read[spans] = [
                list(zip(*layers, strict=True)) for layers in zip(_by_layer(keys), _by_layer(values), strict=True)
            ]
        return self._read[spans][layer]

    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values of all rows as one sequence, both ``[requests * tokens, kv_heads, head_dim]``."""
        return self._flat[:, layer, 0], self._flat[:, layer, 1]

    def varlen_arguments(self) -> tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], dict[str, object]]:
        """Sequence i begins at `starts[i]`, and `seqused_k` says how far it reaches."""
        stride, device = self.row_tokens, self._kv.device
        lengths = [segment.stop for segment in self.segments]
        return self.flat, {
            "cu_seq_k": to_device([*self.starts, self.starts[-1] + stride], torch.int32, device),
            "max_k": max(lengths),
            "seqused_k": to_device(lengths, torch.int32, device),
        }

    def in_chunks(self, tokens: int) -> VirtualStep:
        """The same rows, each part of a segment with the offset of its chunk."""
        parts = cut_at_chunks(self.segments, tokens)
        rows = [self._rows[place] for place, _, _ in parts]
        return VirtualStep(self._kv, [part for _, _, part in parts], rows, [chunk for _, chunk, _ in parts])

    @functools.cached_property
    def _flat(self) -> torch.Tensor:
        return self._kv.flatten(0, 1)

    @functools.cached_property
    def _slots(self) -> torch.Tensor:
        """Where the segments' tokens lie in `_flat`."""
        slots = [
            start + token
            for start, segment in zip(self.starts, self.segments, strict=True)
            for token in range(segment.start, segment.stop)
        ]
        return to_device(slots, torch.int64, self._kv.device)

    @functools.cached_property
    def _targets(self) -> list[list[torch.Tensor]]:
        """By layer, the memory of each segment's tokens."""
        parts = enumerate(self.segments)
        return _by_layer([self._tokens(index, part.start, part.stop).unbind(1) for index, part in parts])

    def _tokens(self, segment: int, start: int, end: int) -> torch.Tensor:
        """Tokens [start, end) of the sequence of a segment."""
        offset = self._offsets[segment]
        return self._kv[self._rows[segment], offset + start : offset + end]


def _tensor(sequence: KvSequence) -> VirtualTensor:
    return cast(VirtualTensor, sequence)


def _by_layer(views: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [list(layer) for layer in zip(*views, strict=True)]
