"""A pass in several calls of flash attention, with long prefixes split among thread blocks.

The keys before a segment become pieces, each a sequence of its own with all of the segment's queries. In these, every
query sees every key, so the heads that share a KV head are further queries of it (rows), and a piece is read once for
all of them. The segment's own tokens are computed causally, in the call of the other segments, and everything is merged
by log-sum-exp (`merge_kernel`).

    keys        0          8192        16384       24576       32768   32896
    segment     | piece 0   | piece 1   | piece 2   | piece 3   | own   |
    call        |---------------- pieces: all keys -------------|causal |
    rows        128 queries x 4 heads for each piece and KV head  128 queries

Single queries see all keys, their own too: if there are only such, the pieces reach to their ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from prefixd.worker.attention.choice.pass_plan import PassPlan
from prefixd.worker.attention.kernels.flash_kernels import AloneKernel, VarlenKernel
from prefixd.worker.attention.kernels.merge_kernel import OwnPart, Parts, merge
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.to_device import to_device, uploaded

PIECE_MULTIPLE = 128
"""Pieces begin at multiples of so many keys; a thread block reads at most as many at a time."""


class SplitPass:
    """The calls of one pass by a plan; every layer uses the same tensors.

    Args:
        plan: the calls.
        segments: of the pass.
        starts: where the first key of each lies in a layer's keys.
        group: query heads that share a KV head.
        device: of the keys.
    """

    def __init__(
        self, plan: PassPlan, segments: Sequence[Segment], starts: Sequence[int], group: int, device: torch.device
    ) -> None:
        ends = list(itertools.accumulate(len(segment) for segment in segments))
        rows = [range(end - len(segment), end) for segment, end in zip(segments, ends, strict=True)]
        self._alone = [
            (
                slice(rows[number].start, rows[number].stop),
                slice(starts[number], starts[number] + segments[number].stop),
            )
            for number in plan.alone
        ]
        self._decodes: _Call | None = None
        if plan.decodes:
            whole = [(starts[number], segments[number].stop) for number in plan.decodes]
            self._decodes = _Call([rows[number] for number in plan.decodes], whole, device)
        causal = set(plan.split) if any(len(segments[number]) > 1 for number in plan.split) else set()
        self._causal = bool(causal)  # the pieces do not have all keys
        own_rows: dict[int, range] = {}
        self._main: _Call | None = None
        if plan.together or causal:
            numbers = sorted({*plan.together, *causal})
            spans = [
                (starts[number] + segments[number].start, len(segments[number]))
                if number in causal
                else (starts[number], segments[number].stop)
                for number in numbers
            ]
            self._main = _Call([rows[number] for number in numbers], spans, device)
            ends = list(itertools.accumulate(len(segments[number]) for number in numbers))
            own_rows = {
                number: range(end - len(segments[number]), end) for number, end in zip(numbers, ends, strict=True)
            }
        self._pieces: Pieces | None = None
        if plan.split:
            parts = [segments[number] for number in plan.split]
            before = [part.start if causal else part.stop for part in parts]
            lengths = [len(part) for part in parts]
            target, own, first_keys, keys_before, query_starts = uploaded(
                [
                    [row for number in plan.split for row in rows[number]],
                    [row for number in plan.split for row in own_rows.get(number, ())],
                    [starts[number] for number in plan.split],
                    before,
                    [0, *itertools.accumulate(lengths)],
                ],
                torch.int32,
                device,
            )
            self._pieces = Pieces(
                target,
                own if causal else None,
                first_keys,
                keys_before,
                query_starts,
                longest=max(lengths),
                most_keys=max(before),
                pieces=plan.pieces,
                group=group,
            )

    @classmethod
    def of_decodes(
        cls, pieces: int, starts: torch.Tensor, lengths: torch.Tensor, most_keys: int, group: int
    ) -> SplitPass:
        """Of a captured pass of single queries, all of them split, by tensors that other passes will fill.

        starts, lengths: where each sequence's keys begin, with one entry more, and how many there are, in int32.
        """
        rows = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        made = cls(PassPlan(), (), (), group, lengths.device)
        made._pieces = Pieces(
            rows[:-1], None, starts[:-1], lengths, rows, longest=1, most_keys=most_keys, pieces=pieces, group=group
        )
        return made

    @property
    def calls(self) -> int:
        """Attention kernels in a layer, without merging."""
        made = (self._decodes, self._main, self._pieces)
        return len(self._alone) + sum(call is not None for call in made)

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
        if self._decodes is not None:
            self._decodes.put(output, self._decodes.attend(kernel, query, keys, values, scale))
        own: Parts | None = None
        if self._main is not None and self._causal:
            found, lse = self._main.attend(kernel, query, keys, values, scale, return_lse=True)
            self._main.put(output, found)
            own = causal_part(found, lse, keys.shape[1])
        elif self._main is not None:
            self._main.put(output, self._main.attend(kernel, query, keys, values, scale))
        if self._pieces is not None:
            self._pieces.attend(kernel, query, keys, values, scale, own, output)


class Pieces:
    """Split keys of some segments, as sequences of one call, and how to merge them.

    Everything about them is in tensors, so that a captured pass splits what its sequences have when it is replayed: a
    short one has pieces without keys. All tensors are int32.

    Args:
        target: the segments' rows in the pass.
        own_rows: their rows in the causal call; None if the pieces have all keys.
        first_keys: where each segment's first key lies.
        keys_before: the keys of each that are split.
        query_starts: where each segment begins in `target`, and the end of the last.
        longest: most queries of a segment.
        most_keys: most keys that are split.
        pieces: most pieces of a segment.
        group: query heads that share a KV head.
    """

    def __init__(
        self,
        target: torch.Tensor,
        own_rows: torch.Tensor | None,
        first_keys: torch.Tensor,
        keys_before: torch.Tensor,
        query_starts: torch.Tensor,
        *,
        longest: int,
        most_keys: int,
        pieces: int,
        group: int,
    ) -> None:
        rows, device = len(target), target.device
        self._size = piece_size(most_keys, pieces)
        pieces = -(-most_keys // self._size)
        self._target, self._own_rows, self._group = target, own_rows, group
        self._repeated = target.repeat(pieces)
        self._max_q, self._max_k = longest * group, min(self._size, most_keys)
        numbers = torch.arange(pieces, dtype=torch.int32, device=device)[:, None]
        starts = ((numbers * rows + query_starts[:-1]) * group).flatten()
        self._starts = torch.cat((starts, starts.new_full((1,), pieces * rows * group)))
        keys = (numbers * self._size + first_keys).flatten()
        self._keys = torch.cat((keys, keys[-1:] + self._size))
        self._used = (keys_before - numbers * self._size).clamp(0, self._size).flatten()

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
        """Write the segments' rows of `output`. own: the causal call's, unless the pieces have all keys."""
        by_row = query.unflatten(1, (keys.shape[1], self._group)).transpose(1, 2)
        found, lse = kernel(
            by_row.index_select(0, self._repeated).flatten(0, 1),
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
        assert (own is None) == (self._own_rows is None)
        merge(
            output, self._target, parts, None if own is None or self._own_rows is None else OwnPart(own, self._own_rows)
        )


def piece_size(keys: int, pieces: int) -> int:
    """Keys of each of at most `pieces` pieces: `piece_size(300, 2)` is 256, the second piece has the other 44."""
    return -(-keys // (pieces * PIECE_MULTIPLE)) * PIECE_MULTIPLE


def causal_part(output: torch.Tensor, lse: torch.Tensor, kv_heads: int) -> Parts:
    """A kernel's ``[rows, heads, head_dim]`` and ``[heads, rows]`` as a part."""
    return Parts(output.unflatten(1, (kv_heads, -1)), lse.unflatten(0, (kv_heads, -1)).permute(2, 0, 1))


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


def _rows(parts: Sequence[range], device: torch.device) -> slice | torch.Tensor:
    """The rows as a slice where they follow each other."""
    if all(before.stop == after.start for before, after in itertools.pairwise(parts)):
        return slice(parts[0].start, parts[-1].stop)
    return to_device([row for part in parts for row in part], torch.int64, device)
