"""Describes one prefix, as a whole and block by block."""

from __future__ import annotations

import math
from contextlib import aclosing

import numpy as np

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.long_work.pacer import Pacer
from prefixd.base.rules.rules import FULL_ATTENTION
from prefixd.base.tiers import Tier
from prefixd.cache import Namespace, TieredCache, Trie
from prefixd.cache.index.trie import TIERS, Rows
from prefixd.cache.rules import GroupMask
from prefixd.server.prefixes.coded_info import CodedSums, add_layers, block_storage
from prefixd.server.prefixes.prefix_keys import Prefix, find_prefix
from prefixd.v1 import admin_pb2 as pb

LIMIT = 1000
"""Most prefixes or blocks of one page."""
_NAMES = 8
_TOKENS_LIMIT = 1 << 15  # tokens of a page's blocks, unless the first block has more
_SUMMARY_WORK = 40  # pieces of work that `Pacer` counts
_BLOCK_WORK = 10
_TOKENS_A_PIECE = 20


async def describe(
    cache: TieredCache, prefix: Prefix, pacer: Pacer, upwards: list[Rows] | None = None
) -> pb.PrefixInfo:
    """Describes a prefix and the tiers of its blocks.

    Args:
        cache: the cache.
        prefix: the prefix.
        pacer: divides the work into slices.
        upwards: a list that gets the rows of its blocks, from the last to the first.

    Raises:
        NotFoundError: the prefix was evicted meanwhile.
    """
    trie, row = prefix.trie, prefix.row
    by_tier = np.zeros(TIERS + 1, np.int64)
    groups, storage = GroupCounts(trie), CodedSums(trie)
    blocks = held = 0
    async with aclosing(prefix.upwards(pacer)) as steps:
        async for rows in steps:
            if upwards is not None:
                upwards.append(rows)
            blocks += len(rows)
            by_tier += np.bincount(trie.nearest[rows], minlength=TIERS + 1)
            groups.add(rows)
            storage.add(rows)
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
        hits=int(trie.hits[row]),
        storage=storage.describe(),
    )


async def inspect_prefix(cache: TieredCache, request: pb.InspectRequest) -> pb.InspectResponse:
    """Returns one page of the blocks of a prefix.

    Raises:
        InvalidArgumentError: the page is too large, or the key is invalid.
        NotFoundError: there is no such prefix.
    """
    limit = page_limit(request.limit, LIMIT)
    prefix = await find_prefix(cache, request.key)
    trie, pacer = prefix.trie, Pacer()
    limit = min(limit, max(1, _TOKENS_LIMIT // trie.block_tokens))
    parts: list[Rows] = []
    info = await describe(cache, prefix, pacer, parts)
    path = np.concatenate(parts)[::-1]
    blocks, now_s = [], cache.clock()
    page = path[request.first_block : request.first_block + limit]
    for index, row in enumerate(page.tolist(), request.first_block):
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
                storage=block_storage(trie, row),
            )
        )
        await pacer.worked(_BLOCK_WORK + trie.block_tokens // _TOKENS_A_PIECE)
    answer = pb.InspectResponse(prefix=info, blocks=blocks)
    if request.layers:
        await add_layers(cache, trie, page, answer)
    return answer


class GroupCounts:
    """Counts the blocks of a prefix of which some tier has a KV group, for each group."""

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._masks = np.zeros(trie.all_groups + 1, np.int64)  # blocks by the mask of the groups that some tier has

    def add(self, rows: Rows) -> None:
        """Counts some of the prefix's rows."""
        self._masks += np.bincount(self._trie.available[rows], minlength=len(self._masks))

    @property
    def nbytes(self) -> int:
        """Bytes of all counted rows that some tier has."""
        return int((self._masks * self._trie.group_bytes).sum())

    def describe(self, namespace: Namespace) -> list[pb.GroupInfo]:
        """Returns the groups, in the order of their bits in a mask."""
        masks = np.arange(len(self._masks))
        described = []
        for group in self._trie.groups:
            parts = [namespace.spec.parts[part] for part in group.parts]
            described.append(
                pb.GroupInfo(
                    names=list(dict.fromkeys(part.group for part in parts))[:_NAMES],
                    parts=len(parts),
                    rule=str(parts[0].rule or FULL_ATTENTION),
                    block_bytes=int(self._trie.group_bytes[group.mask]),
                    blocks=int(self._masks[(masks & group.mask) != 0].sum()),
                )
            )
        return described


def groups_by_tier(trie: Trie, row: int) -> list[pb.TierGroups]:
    """Returns each tier that has a KV group of a block, with these groups."""
    there: GroupMask = trie.there[row]
    return [
        pb.TierGroups(
            tier=Tier(tier).wire,
            groups=[group.bit for group in trie.groups if int(there[tier]) & group.mask],
        )
        for tier in range(TIERS)
        if there[tier]
    ]


def _seconds_left(until_s: float, now_s: float) -> float | None:
    """Returns the seconds until a time in the future; None for a time that has passed or never comes."""
    return until_s - now_s if now_s < until_s < math.inf else None


def page_limit(asked: int, default: int) -> int:
    """Returns the size of a page, `default` if none is asked for. Raises InvalidArgumentError above `LIMIT`."""
    if asked > LIMIT:
        raise InvalidArgumentError(f"limit is {asked}; a page has at most {LIMIT}, ask for the next one after it")
    return asked or default
