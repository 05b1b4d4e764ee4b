"""A pass in several calls of flash attention, with long prefixes split among thread blocks.

The keys before a segment become pieces, each a sequence of its own with all of the segment's queries. In these, every
query sees every key, so the heads that share a KV head are further queries of it (rows), and a piece is read once for
all of them. The segment's own tokens are computed causally, in the call of the other segments, and everything is merged
by log-sum-exp (`merge_kernel`).

    keys        0          8192        16384       24576       32768   32896
    segment     | piece 0   | piece 1   | piece 2   | piece 3   | own   |
    call        |---------------- pieces: all keys -------------|causal |
    rows        128 queries x 4 heads for each piece and KV head  128 queries

A segment of one query sees all keys, its own too; its pieces reach to its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from prefixd.worker.attention.choice.pass_plan import PassPlan
from prefixd.worker.attention.kernels.flash_kernels import AloneKernel, VarlenKernel
from prefixd.worker.attention.kernels.merge_kernel import MergeRows, Parts, merge
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.to_device import to_device, uploaded

PIECE_MULTIPLE = 128
"""Pieces begin at multiples of so many keys; a thread block reads at most as many at a time."""

_Rows = slice | torch.Tensor


def cut(keys: int, pieces: int) -> list[tuple[int, int]]:
    """[first, stop) of `keys` keys in at most `pieces` pieces, of one size but for the last: `cut(300, 2)` is
    [(0, 256), (256, 300)]."""
    size = -(-keys // (pieces * PIECE_MULTIPLE)) * PIECE_MULTIPLE
    return [(first, min(first + size, keys)) for first in range(0, keys, size)]


class SplitPass:
    """The calls of one pass by a plan; every layer uses the same tensors.

    segments, starts: those of the pass, and where the first key of each lies in a layer's keys.
    group: query heads that share a KV head.
    """

    def __init__(
        self, plan: PassPlan, segments: Sequence[Segment], starts: Sequence[int], group: int, device: torch.device
    ) -> None:
        ends = list(itertools.accumulate(len(segment) for segment in segments))
        rows = [range(end - len(segment), end) for segment, end in zip(segments, ends, strict=True)]
        causal = [number for number in plan.split if len(segments[number]) > 1]
        self._alone = [
            (
                slice(rows[number].start, rows[number].stop),
                slice(starts[number], starts[number] + segments[number].stop),
            )
            for number in plan.alone
        ]
        self._calls = []
        if plan.decodes:
            whole = [(starts[number], segments[number].stop) for number in plan.decodes]
            self._calls.append(_Call([rows[number] for number in plan.decodes], whole, device))
        own_rows: dict[int, int] = {}
        self._main: _Call | None = None
        if plan.together or causal:
            numbers = sorted([*plan.together, *causal])
            spans = [
                (starts[number] + segments[number].start, len(segments[number]))
                if number in plan.split
                else (starts[number], segments[number].stop)
                for number in numbers
            ]
            self._main = _Call([rows[number] for number in numbers], spans, device)
            first = 0
            for number in numbers:
                own_rows[number] = first
                first += len(rows[number])
        self._pieces: _Pieces | None = None
        if plan.split:
            self._pieces = _Pieces(plan.split, segments, starts, rows, own_rows, group, device)

    @property
    def calls(self) -> int:
        """Attention kernels in a layer, without merging."""
        return len(self._alone) + len(self._calls) + (self._main is not None) + (self._pieces is not None)

    def attend(
        self,
        kernel: VarlenKernel,
        alone: AloneKernel | None,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """From query ``[rows, heads, head_dim]`` and a layer's keys and values into `output`, of the query's shape."""
        for rows, reach in self._alone:
            assert alone is not None, "a plan names this way only where there is a kernel for it"
            output[rows] = alone(query[rows], keys[reach], values[reach], scale=scale)
        for call in self._calls:
            call.put(output, call.attend(kernel, query, keys, values, scale))
        if self._pieces is None:
            if self._main is not None:
                self._main.put(output, self._main.attend(kernel, query, keys, values, scale))
            return
        own: Parts | None = None
        if self._main is not None:
            found, lse = self._main.attend(kernel, query, keys, values, scale, return_lse=True)
            self._main.put(output, found)
            own = Parts(found.unflatten(1, (keys.shape[1], -1)), lse.unflatten(0, (keys.shape[1], -1)).permute(2, 0, 1))
        self._pieces.attend(kernel, query, keys, values, scale, own, output)


class _Call:
    """A causal call: for each sequence its rows, and the first and the number of its keys."""

    def __init__(self, rows: Sequence[range], spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        lengths = [len(part) for part in rows]
        self._max_q, self._max_k = max(lengths), max(count for _, count in spans)
        self._rows = _rows(rows, device)
        self._starts, self._keys, self._used = uploaded(
            [
                [0, *itertools.accumulate(lengths)],
                [*(first for first, _ in spans), sum(spans[-1])],
                [count for _, count in spans],
            ],
            torch.int32,
            device,
        )

    def attend(
        self,
        kernel: VarlenKernel,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        **keywords: bool,
    ) -> torch.Tensor:
        return kernel(  # type: ignore[no-any-return]
            query[self._rows],
            keys,
            values,
            self._starts,
            self._keys,
            self._max_q,
            self._max_k,
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=self._used,
            **keywords,
        )

    def put(self, output: torch.Tensor, found: torch.Tensor) -> None:
        output[self._rows] = found


class _Pieces:
    """The pieces of all split segments as sequences of one call, and how to merge them."""

    def __init__(
        self,
        pieces: dict[int, int],
        segments: Sequence[Segment],
        starts: Sequence[int],
        rows: Sequence[range],
        own_rows: dict[int, int],
        group: int,
        device: torch.device,
    ) -> None:
        queries: list[int] = []
        sequences: list[tuple[int, int]] = []  # first and number of keys
        lengths: list[int] = []
        merged: list[tuple[int, int, int, int, int]] = []
        for number, count in pieces.items():
            segment, first = segments[number], len(queries)
            parts = cut(segment.stop if len(segment) == 1 else segment.start, count)
            sequences += [(starts[number] + start, stop - start) for start, stop in parts]
            lengths += [len(segment) * group] * len(parts)
            queries += [*rows[number]] * len(parts)
            own = own_rows.get(number)
            merged += [
                (first + row, len(segment), len(parts), -1 if own is None else own + row, rows[number][row])
                for row in range(len(segment))
            ]
        self._group = group
        self._max_q, self._max_k = max(lengths), max(count for _, count in sequences)
        self._queries, self._starts, self._keys, self._used = uploaded(
            [
                queries,
                [0, *itertools.accumulate(lengths)],
                [*(first for first, _ in sequences), sum(sequences[-1])],
                [count for _, count in sequences],
            ],
            torch.int32,
            device,
        )
        self._merged = MergeRows.of(merged, device)

    def attend(
        self,
        kernel: VarlenKernel,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        own: Parts | None,
        output: torch.Tensor,
    ) -> None:
        kv_heads = keys.shape[1]
        by_row = query.unflatten(1, (kv_heads, self._group)).transpose(1, 2)
        repeated = by_row.index_select(0, self._queries).flatten(0, 1)
        found, lse = kernel(
            repeated,
            keys,
            values,
            self._starts,
            self._keys,
            self._max_q,
            self._max_k,
            scale=scale,
            window_size=(-1, -1),
            enable_gqa=False,
            seqused_k=self._used,
            return_lse=True,
        )
        parts = Parts(
            found.unflatten(0, (-1, self._group)).transpose(1, 2), lse.unflatten(1, (-1, self._group)).permute(1, 0, 2)
        )
        merge(output, self._merged, parts, own)


def _rows(parts: Sequence[range], device: torch.device) -> _Rows:
    """The rows as a slice where they follow each other."""
    if all(before.stop == after.start for before, after in itertools.pairwise(parts)):
        return slice(parts[0].start, parts[-1].stop)
    return to_device([row for part in parts for row in part], torch.int64, device)
