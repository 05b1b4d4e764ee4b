"""What the cache holds, prefix by prefix: lists in pages, one prefix block by block.

All of it goes through the columns of the trie a slice at a time, and others change the trie in between. A block is
known by its row and the row's generation.
"""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.pacer import Pacer, give_way
from prefixd.base.tiers import Tier
from prefixd.cache import Namespace, TieredCache, Trie
from prefixd.cache.index.trie import TIERS, Rows
from prefixd.cache.rules import GroupMask
from prefixd.cache.rules.specs import words_of
from prefixd.v1 import admin_pb2 as pb

_NAMES = 8


class GroupCounts:
    """Counts, over the rows of a prefix, the blocks of which some tier has each KV group."""

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._masks = np.zeros(trie.all_groups + 1, np.int64)  # blocks by the mask of the groups that are there

    def add(self, rows: Rows) -> None:
        """Takes in some of the rows."""
        self._masks += np.bincount(self._trie.available[rows], minlength=len(self._masks))

    @property
    def nbytes(self) -> int:
        """Bytes that are there of all rows."""
        return int((self._masks * self._trie.group_bytes).sum())

    def describe(self, namespace: Namespace) -> list[pb.GroupInfo]:
        """The groups, in the order of their bits in a mask."""
        masks = np.arange(len(self._masks))
        described = []
        for group in self._trie.groups:
            parts = [namespace.spec.parts[part] for part in group.parts]
            described.append(
                pb.GroupInfo(
                    names=list(dict.fromkeys(part.group for part in parts))[:_NAMES],
                    parts=len(parts),
                    rule=words_of(parts[0].rule),
                    block_bytes=int(self._trie.group_bytes[group.mask]),
                    blocks=int(self._masks[(masks & group.mask) != 0].sum()),
                )
            )
        return described


def groups_by_tier(trie: Trie, row: int) -> list[pb.TierGroups]:
    """The tiers that have a KV group of a block, with the groups."""
    there: GroupMask = trie.there[row]
    return [
        pb.TierGroups(
            tier=Tier(tier).wire,
            groups=[group.bit for group in trie.groups if int(there[tier]) & group.mask],
        )
        for tier in range(TIERS)
        if there[tier]
    ]


DEFAULT_LIMIT = 100
LIMIT = 1000
_PAGE_BYTES = 8 << 20  # after so many a page ends early: the names of groups can be long
_TOKENS_LIMIT = 1 << 15  # of a page's blocks, unless the first block has more
_KEY_DIGITS = 32
_SHORTEST_KEY = 4
_SHOWN = 8
_SLICE_ROWS = 1 << 14
_PATH_ROWS = 1 << 12
_TOKEN = struct.Struct("<dIQ")  # of the page's last prefix: when it was used, its trie's ordinal and its row
_SUMMARY_WORK = 40  # pieces of work, see `Pacer`
_BLOCK_WORK = 10
_TOKENS_A_PIECE = 20


@dataclass(frozen=True, slots=True)
class Prefix:
    """A block, and by it the prefix that it ends."""

    trie: Trie
    row: int
    generation: int

    @classmethod
    def of(cls, trie: Trie, row: int) -> Prefix:
        """The block that is in `row` now."""
        return cls(trie, row, int(trie.generation[row]))

    @property
    def there(self) -> bool:
        """Whether the block still exists; as long as it does, so do those before it."""
        return int(self.trie.generation[self.row]) == self.generation

    async def upwards(self, pacer: Pacer) -> AsyncGenerator[Rows, None]:
        """The rows of its blocks, from its last block to its first, some thousand at a time.

        Raises:
            NotFoundError: it went meanwhile.
        """
        at = self.row
        while at >= 0:
            parent = self.trie.parent.data
            rows: list[int] = []
            while at >= 0 and len(rows) < _PATH_ROWS:
                rows.append(at)
                at = parent[at]
            yield np.array(rows, np.int64)
            await pacer.worked(1 + len(rows) // 8)
            if not self.there:
                raise NotFoundError("the prefix was evicted while it was looked at; `prefixd ls` shows what there is")

    async def path(self, pacer: Pacer) -> Rows:
        """The rows of its blocks, from the first on. Raises NotFoundError."""
        parts: list[Rows] = []
        async with aclosing(self.upwards(pacer)) as steps:
            async for rows in steps:
                parts.append(rows)
        return np.concatenate(parts)[::-1]


async def find_prefix(cache: TieredCache, key: str) -> Prefix:
    """The prefix whose last block's key is, or begins with, the hex digits `key`: those of any namespace, or after the
    id of one and a slash. Example: "9f86d081", "0badc0de12345678/9f86d081".

    Two namespaces may have blocks with one key: whoever chooses tokens can choose keys.

    Raises:
        InvalidArgumentError: these are no digits, or several keys begin with them.
        NotFoundError: no key does, or there is no such namespace.
    """
    home, slash, digits = key.lower().rpartition("/")
    only = cache.namespaces.get(_from_hex(home)) if slash else None
    if len(digits) < _SHORTEST_KEY or len(digits) > _KEY_DIGITS or digits.strip("0123456789abcdef"):
        raise InvalidArgumentError(
            f"key {key!r} is not {_SHORTEST_KEY} to {_KEY_DIGITS} hex digits; `prefixd ls` shows the keys"
        )
    found: list[Prefix] = []
    for trie in list(cache.tries) if only is None else [cache.trie(only)]:
        for start in range(0, trie.rows, _SLICE_ROWS):
            rows = trie.find_by_digits(digits, start, start + _SLICE_ROWS)
            if only is not None:
                rows = rows[trie.namespace[rows] == only.ordinal]
            found += [Prefix.of(trie, row) for row in rows.tolist()]
            if len(found) > _SLICE_ROWS:  # enough to refuse it
                break
            await give_way()
    found = [prefix for prefix in found if prefix.there]
    if not found:
        raise NotFoundError(f"no prefix has the key {key}; `prefixd ls` shows what there is")
    if len(found) > 1 and len(digits) < _KEY_DIGITS:
        raise InvalidArgumentError(f"{len(found)} prefixes have keys that begin with {key}; give more digits")
    if len(found) > 1:
        homes = [cache.namespaces.at(int(prefix.trie.namespace[prefix.row])).id.hex() for prefix in found[:_SHOWN]]
        raise InvalidArgumentError(
            f"{len(found)} namespaces have a block with the key {key}; write the id of one before it: "
            + ", ".join(f"{home}/{digits}" for home in homes)
        )
    return found[0]


async def list_prefixes(cache: TieredCache, request: pb.ListPrefixesRequest) -> pb.ListPrefixesResponse:
    """One page of the ends of prefixes in all tries, most recently used first.

    Raises:
        InvalidArgumentError: the page is too large, or the token is none.
        NotFoundError: no such namespace.
    """
    limit = _page_limit(request.limit, DEFAULT_LIMIT)
    only = cache.namespaces.get(request.namespace_id).ordinal if request.namespace_id else None
    page = _Page(limit, _parse_token(request.page_token) if request.page_token else None)
    pinned_blocks = pinned_bytes = 0
    for trie in list(cache.tries):
        goes_on = await _continued(trie)
        for start in range(0, trie.rows, _SLICE_ROWS):
            page.offer(trie, _ends(trie, goes_on, start, only))
            pinned = _pinned(trie, start, only)
            pinned_blocks += len(pinned)
            pinned_bytes += int(trie.group_bytes[trie.groups_there(pinned)].sum())
            await give_way()
    pacer = Pacer()
    infos: list[pb.PrefixInfo] = []
    nbytes = looked_at = 0
    for prefix in page.prefixes(cache.tries):
        if nbytes >= _PAGE_BYTES:
            break
        looked_at += 1
        try:
            infos.append(await describe(cache, prefix, pacer))
        except NotFoundError:  # it went meanwhile
            continue
        nbytes += infos[-1].ByteSize()
    return pb.ListPrefixesResponse(
        prefixes=infos,
        total=page.total,
        next_page_token=page.token_after(looked_at),
        pinned_blocks=pinned_blocks,
        pinned_bytes=pinned_bytes,
    )


async def inspect_prefix(cache: TieredCache, request: pb.InspectRequest) -> pb.InspectResponse:
    """One page of the blocks of a prefix.

    Raises:
        InvalidArgumentError: the page is too large, or the key is none.
        NotFoundError: no such prefix.
    """
    limit = _page_limit(request.limit, LIMIT)
    prefix = await find_prefix(cache, request.key)
    trie, pacer = prefix.trie, Pacer()
    limit = min(limit, max(1, _TOKENS_LIMIT // trie.block_tokens))
    parts: list[Rows] = []
    info = await describe(cache, prefix, pacer, parts)
    path = np.concatenate(parts)[::-1]
    blocks, now_s = [], cache.clock()
    for index, row in enumerate(path[request.first_block : request.first_block + limit].tolist(), request.first_block):
        if not prefix.there:
            raise NotFoundError(f"prefix {request.key} was evicted while it was looked at; `prefixd ls` shows the rest")
        blocks.append(
            pb.BlockInfo(
                index=index,
                key=trie.key(row).hex(),
                tiers=[tier.wire for tier in Tier if trie.has(row, tier)],
                children=int(trie.children[row]),
                pinned=bool(trie.pinned[row]),
                held=int(trie.holds[row].max(axis=1).sum()),
                nbytes=int(trie.group_bytes[trie.available[row] if trie.has_rules else trie.all_groups]),
                token_ids=trie.tokens[row].tolist(),
                there=groups_by_tier(trie, row),
                priority=int(trie.priorities(path[index : index + 1], now_s)[0]),
                priority_s=_seconds_left(float(trie.priority_until[row]), now_s),
            )
        )
        await pacer.worked(_BLOCK_WORK + trie.block_tokens // _TOKENS_A_PIECE)
    return pb.InspectResponse(prefix=info, blocks=blocks)


async def describe(
    cache: TieredCache, prefix: Prefix, pacer: Pacer, upwards: list[Rows] | None = None
) -> pb.PrefixInfo:
    """What a prefix is and where its blocks are. Raises NotFoundError when it goes meanwhile.

    `upwards` gets the rows of its blocks, from its last block to its first.
    """
    trie, row = prefix.trie, prefix.row
    by_tier = np.zeros(TIERS + 1, np.int64)
    groups = GroupCounts(trie)
    blocks = held = 0
    async with aclosing(prefix.upwards(pacer)) as steps:
        async for rows in steps:
            if upwards is not None:
                upwards.append(rows)
            blocks += len(rows)
            by_tier += np.bincount(trie.nearest[rows], minlength=TIERS + 1)
            groups.add(rows)
            held = max(held, int(trie.holds[rows].max(axis=2).sum(axis=1).max()))
    await pacer.worked(_SUMMARY_WORK)
    if not prefix.there:
        raise NotFoundError("the prefix was evicted while it was looked at; `prefixd ls` shows what there is")
    namespace: Namespace = cache.namespaces.at(int(trie.namespace[row]))
    gpu, cpu, disk, remote, _ = by_tier.tolist()
    return pb.PrefixInfo(
        key=trie.key(row).hex(),
        namespace_id=namespace.id,
        namespace_name=namespace.spec.name,
        blocks=blocks,
        tokens=blocks * trie.block_tokens,
        nbytes=groups.nbytes if trie.has_rules else blocks * sum(trie.part_bytes),
        gpu_blocks=gpu,
        cpu_blocks=cpu,
        disk_blocks=disk,
        remote_blocks=remote,
        idle_s=max(cache.clock() - float(trie.last_used[row]), 0.0),
        pinned=bool(trie.pinned[row]),
        held=held,
        groups=groups.describe(namespace),
        tenant=namespace.spec.tenant,
    )


@dataclass(slots=True)
class _Page:
    """The most recently used ends, `limit` of them, that come after a page before; offered by ordinal and row."""

    limit: int
    after: tuple[float, int, int] | None
    total: int = 0
    _left: bool = False
    _used: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64))
    _ordinal: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _row: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    _generation: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def offer(self, trie: Trie, rows: Rows) -> None:
        """Takes in ends of a trie: those that are used as recently as others stand behind them."""
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
        """The page's."""
        found = zip(self._ordinal.tolist(), self._row.tolist(), self._generation.tolist(), strict=True)
        return [Prefix(tries[ordinal], row, generation) for ordinal, row, generation in found]

    def token_after(self, prefixes: int) -> bytes:
        """Where the page behind the first so many of its prefixes begins; empty when there is none."""
        if not self._left and prefixes == len(self._row):
            return b""
        return _TOKEN.pack(self._used[prefixes - 1], self._ordinal[prefixes - 1], self._row[prefixes - 1])


async def _continued(trie: Trie) -> npt.NDArray[np.bool_]:
    """[rows]: which blocks another one continues whose bytes can be had."""
    continued = np.zeros(trie.rows, np.bool_)
    for start in range(0, len(continued), _SLICE_ROWS):
        rows = slice(start, min(start + _SLICE_ROWS, len(continued)))
        parents = trie.parent[rows][(trie.nearest[rows] < TIERS) & (trie.namespace[rows] >= 0)]
        continued[parents[(parents >= 0) & (parents < len(continued))]] = True
        await give_way()
    return continued


def _ends(trie: Trie, continued: npt.NDArray[np.bool_], start: int, namespace: int | None) -> Rows:
    """The ends of prefixes among some thousand rows, of one namespace or of all: the blocks whose bytes can be had and
    that no such block continues. `continued`: as it was a moment before."""
    rows = slice(start, min(start + _SLICE_ROWS, trie.rows))
    chosen = trie.children[rows] == 0
    known = continued[rows]
    chosen[: len(known)] |= ~known
    chosen &= trie.nearest[rows] < TIERS
    chosen &= trie.namespace[rows] >= 0 if namespace is None else trie.namespace[rows] == namespace
    return start + np.flatnonzero(chosen)


def _pinned(trie: Trie, start: int, namespace: int | None) -> Rows:
    """The pinned blocks among some thousand rows, of one namespace or of all."""
    rows = start + np.flatnonzero(trie.pinned[start : min(start + _SLICE_ROWS, trie.rows)])
    return rows if namespace is None else rows[trie.namespace[rows] == namespace]


def _seconds_left(until_s: float, now_s: float) -> float | None:
    """Seconds until a time that is to come; None for one that never comes or has been."""
    return until_s - now_s if now_s < until_s < math.inf else None


def _from_hex(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise InvalidArgumentError(f"{digits[:32]!r} is no namespace's id in hex; `prefixd ls` shows them") from None


def _page_limit(asked: int, default: int) -> int:
    if asked > LIMIT:
        raise InvalidArgumentError(f"limit is {asked}; a page has at most {LIMIT}, ask for the next one after it")
    return asked or default


def _parse_token(token: bytes) -> tuple[float, int, int]:
    wrong = f"page_token {token[:32].hex()} is none; send next_page_token of the page before, or nothing"
    if len(token) != _TOKEN.size:
        raise InvalidArgumentError(wrong)
    used, ordinal, row = _TOKEN.unpack(token)
    if not math.isfinite(used):
        raise InvalidArgumentError(wrong)
    return used, ordinal, row
