"""Lists the prefixes of all tries in pages: the most recently used, the largest, or those with most hits first.

A list goes through the columns of the tries one slice of rows at a time, and other tasks change the tries in between.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.cache import TieredCache, Trie
from prefixd.cache.index.trie import TIERS, Rows
from prefixd.server.prefixes.prefix_info import describe, page_limit
from prefixd.server.prefixes.prefix_keys import Prefix
from prefixd.v1 import admin_pb2 as pb

DEFAULT_LIMIT = 100
_PAGE_BYTES = 8 << 20  # above this a page ends early: the names of groups can be long
_SLICE_ROWS = 1 << 14
_TOKEN = struct.Struct("<dIQ")  # of the page's last prefix: its place in the order, its trie's ordinal and its row
Values = npt.NDArray[np.float64]
"""By which prefixes are ordered, the highest first."""


def _last_used(trie: Trie, rows: Rows) -> Values:
    return trie.last_used[rows]


def _size(trie: Trie, rows: Rows) -> Values:
    """The bytes of all blocks of each prefix, also where a group's rule needs fewer."""
    return (trie.depth[rows] + 1).astype(np.float64) * sum(trie.part_bytes)


def _hits(trie: Trie, rows: Rows) -> Values:
    return trie.hits[rows].astype(np.float64)


_ORDERS: dict[int, Callable[[Trie, Rows], Values]] = {
    pb.ListPrefixesRequest.ORDER_LAST_USE: _last_used,
    pb.ListPrefixesRequest.ORDER_SIZE: _size,
    pb.ListPrefixesRequest.ORDER_HITS: _hits,
}


async def list_prefixes(cache: TieredCache, request: pb.ListPrefixesRequest) -> pb.ListPrefixesResponse:
    """Returns one page of the prefixes in all tries, in the order that is asked for.

    Raises:
        InvalidArgumentError: the page is too large, or the page token or the order is invalid.
        NotFoundError: there is no such namespace.
    """
    limit = page_limit(request.limit, DEFAULT_LIMIT)
    only = cache.namespaces.get(request.namespace_id).ordinal if request.namespace_id else None
    values = _ORDERS.get(request.order)
    if values is None:
        raise InvalidArgumentError(f"order {request.order} is none; choose one of ListPrefixesRequest.Order")
    by_hits = request.order == pb.ListPrefixesRequest.ORDER_HITS
    page = _Page(limit, values, _parse_token(request.page_token) if request.page_token else None)
    pinned_blocks = pinned_bytes = 0
    for trie in list(cache.tries):
        continued = None if by_hits else await _find_continued(trie)
        for start in range(0, trie.rows, _SLICE_ROWS):
            if continued is None:
                page.offer(trie, _find_hit(trie, start, only))
            else:
                page.offer(trie, _find_ends(trie, continued, start, only))
            pinned = _find_pinned(trie, start, only)
            pinned_blocks += len(pinned)
            pinned_bytes += int(trie.group_bytes[trie.groups_there(pinned)].sum())
            await give_way()
    pacer = Pacer()
    infos: list[pb.PrefixInfo] = []
    nbytes = described = 0
    for prefix in page.prefixes(cache.tries):
        if nbytes >= _PAGE_BYTES:
            break
        described += 1
        try:
            infos.append(await describe(cache, prefix, pacer))
        except NotFoundError:  # it was evicted meanwhile
            continue
        nbytes += infos[-1].ByteSize()
    return pb.ListPrefixesResponse(
        prefixes=infos,
        total=page.total,
        next_page_token=page.token_after(described),
        pinned_blocks=pinned_blocks,
        pinned_bytes=pinned_bytes,
    )


@dataclass(slots=True)
class _Page:
    """The `limit` ends of prefixes with the highest values after the page before. They are offered by ordinal and row.

    Attributes:
        limit: most ends of the page.
        values: the value of each of some rows.
        after: the value of the last end of the page before, its trie's ordinal and its row; None: the first page.
        total: number of ends that were offered.
    """

    limit: int
    values: Callable[[Trie, Rows], Values]
    after: tuple[float, int, int] | None
    total: int = 0
    _left: bool = False
    _best: Values = field(default_factory=lambda: np.empty(0, np.float64))
    _ordinal: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _row: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    _generation: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def offer(self, trie: Trie, rows: Rows) -> None:
        """Adds ends of a trie. An end with the same value as an earlier one stands behind it."""
        self.total += len(rows)
        values = self.values(trie, rows)
        if self.after is not None:
            last, ordinal, row = self.after
            behind = values < last
            if trie.ordinal >= ordinal:
                behind |= (values == last) & ((rows > row) | (trie.ordinal > ordinal))
            rows, values = rows[behind], values[behind]
        if len(self._best) == self.limit:
            better = values > self._best[-1]
            self._left |= not better.all()
            rows, values = rows[better], values[better]
        if not len(rows):
            return
        values = np.concatenate([self._best, values])
        best = np.argsort(-values, kind="stable")
        self._left |= len(best) > self.limit
        best = best[: self.limit]
        self._best = values[best]
        self._ordinal = np.concatenate([self._ordinal, np.full(len(rows), trie.ordinal)])[best]
        self._row = np.concatenate([self._row, rows])[best]
        self._generation = np.concatenate([self._generation, trie.generation[rows]])[best]

    def prefixes(self, tries: list[Trie]) -> list[Prefix]:
        """Returns the prefixes of the page."""
        found = zip(self._ordinal.tolist(), self._row.tolist(), self._generation.tolist(), strict=True)
        return [Prefix(tries[ordinal], row, generation) for ordinal, row, generation in found]

    def token_after(self, prefixes: int) -> bytes:
        """Returns the token of the page that follows the first `prefixes` of this page's; empty if there is none."""
        if not self._left and prefixes == len(self._row):
            return b""
        return _TOKEN.pack(self._best[prefixes - 1], self._ordinal[prefixes - 1], self._row[prefixes - 1])


async def _find_continued(trie: Trie) -> npt.NDArray[np.bool_]:
    """Returns [rows] flags: some tier has a block that continues this one."""
    continued = np.zeros(trie.rows, np.bool_)
    for start in range(0, len(continued), _SLICE_ROWS):
        rows = slice(start, min(start + _SLICE_ROWS, len(continued)))
        parents = trie.parent[rows][(trie.nearest[rows] < TIERS) & (trie.namespace[rows] >= 0)]
        continued[parents[(parents >= 0) & (parents < len(continued))]] = True
        await give_way()
    return continued


def _find_ends(trie: Trie, continued: npt.NDArray[np.bool_], start: int, namespace: int | None) -> Rows:
    """Returns the ends of prefixes in one slice of rows: blocks that some tier has and that no such block continues.

    Args:
        trie: the trie.
        continued: flags of `_find_continued`, a moment old.
        start: first row of the slice.
        namespace: ordinal of the only namespace, or None for all.
    """
    rows = slice(start, min(start + _SLICE_ROWS, trie.rows))
    chosen = trie.children[rows] == 0
    known = continued[rows]
    chosen[: len(known)] |= ~known
    chosen &= trie.nearest[rows] < TIERS
    chosen &= trie.namespace[rows] >= 0 if namespace is None else trie.namespace[rows] == namespace
    return start + np.flatnonzero(chosen)


def _find_hit(trie: Trie, start: int, namespace: int | None) -> Rows:
    """Returns the blocks in one slice of rows that some tier has and with which a prompt's cached prefix has ended."""
    rows = slice(start, min(start + _SLICE_ROWS, trie.rows))
    chosen = (trie.hits[rows] > 0) & (trie.nearest[rows] < TIERS)
    chosen &= trie.namespace[rows] >= 0 if namespace is None else trie.namespace[rows] == namespace
    return start + np.flatnonzero(chosen)


def _find_pinned(trie: Trie, start: int, namespace: int | None) -> Rows:
    """Returns the pinned blocks in one slice of rows, of one namespace or of all."""
    rows = start + np.flatnonzero(trie.pinned[start : min(start + _SLICE_ROWS, trie.rows)])
    return rows if namespace is None else rows[trie.namespace[rows] == namespace]


def _parse_token(token: bytes) -> tuple[float, int, int]:
    wrong = f"page_token {token[:32].hex()} is none; send next_page_token of the page before, or nothing"
    if len(token) != _TOKEN.size:
        raise InvalidArgumentError(wrong)
    value, ordinal, row = _TOKEN.unpack(token)
    if not math.isfinite(value):
        raise InvalidArgumentError(wrong)
    return value, ordinal, row
