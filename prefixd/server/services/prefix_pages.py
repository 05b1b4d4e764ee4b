"""Lists the prefixes of all tries in pages, most recently used first.

A list goes through the columns of the tries one slice of rows at a time, and other tasks change the tries in between.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.cache import TieredCache, Trie
from prefixd.cache.index.trie import TIERS, Rows
from prefixd.server.services.prefix_info import describe, page_limit
from prefixd.server.services.prefix_keys import Prefix
from prefixd.v1 import admin_pb2 as pb

DEFAULT_LIMIT = 100
_PAGE_BYTES = 8 << 20  # above this a page ends early: the names of groups can be long
_SLICE_ROWS = 1 << 14
_TOKEN = struct.Struct("<dIQ")  # of the page's last prefix: when it was used, its trie's ordinal and its row


async def list_prefixes(cache: TieredCache, request: pb.ListPrefixesRequest) -> pb.ListPrefixesResponse:
    """Returns one page of the prefixes in all tries, most recently used first.

    Raises:
        InvalidArgumentError: the page is too large, or the page token is invalid.
        NotFoundError: there is no such namespace.
    """
    limit = page_limit(request.limit, DEFAULT_LIMIT)
    only = cache.namespaces.get(request.namespace_id).ordinal if request.namespace_id else None
    page = _Page(limit, _parse_token(request.page_token) if request.page_token else None)
    pinned_blocks = pinned_bytes = 0
    for trie in list(cache.tries):
        continued = await _find_continued(trie)
        for start in range(0, trie.rows, _SLICE_ROWS):
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
    """The `limit` most recently used ends of prefixes after the page before. Ends are offered by ordinal and row.

    Attributes:
        limit: most ends of the page.
        after: when the last end of the page before was used, its trie's ordinal and its row; None: the first page.
        total: number of ends that were offered.
    """

    limit: int
    after: tuple[float, int, int] | None
    total: int = 0
    _left: bool = False
    _used: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64))
    _ordinal: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _row: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    _generation: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def offer(self, trie: Trie, rows: Rows) -> None:
        """Adds ends of a trie. An end that was used at the same time as an earlier one stands behind it."""
        self.total += len(rows)
        used = trie.last_used[rows]
        if self.after is not None:
            last_used, ordinal, row = self.after
            behind = used < last_used
            if trie.ordinal >= ordinal:
                behind |= (used == last_used) & ((rows > row) | (trie.ordinal > ordinal))
            rows, used = rows[behind], used[behind]
        if len(self._used) == self.limit:
            better = used > self._used[-1]
            self._left |= not better.all()
            rows, used = rows[better], used[better]
        if not len(rows):
            return
        used = np.concatenate([self._used, used])
        best = np.argsort(-used, kind="stable")
        self._left |= len(best) > self.limit
        best = best[: self.limit]
        self._used = used[best]
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
        return _TOKEN.pack(self._used[prefixes - 1], self._ordinal[prefixes - 1], self._row[prefixes - 1])


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


def _find_pinned(trie: Trie, start: int, namespace: int | None) -> Rows:
    """Returns the pinned blocks in one slice of rows, of one namespace or of all."""
    rows = start + np.flatnonzero(trie.pinned[start : min(start + _SLICE_ROWS, trie.rows)])
    return rows if namespace is None else rows[trie.namespace[rows] == namespace]


def _parse_token(token: bytes) -> tuple[float, int, int]:
    wrong = f"page_token {token[:32].hex()} is none; send next_page_token of the page before, or nothing"
    if len(token) != _TOKEN.size:
        raise InvalidArgumentError(wrong)
    used, ordinal, row = _TOKEN.unpack(token)
    if not math.isfinite(used):
        raise InvalidArgumentError(wrong)
    return used, ordinal, row
