"""Retention: callers give blocks of a prompt a priority, and a quota limits the bytes that each tenant may raise.

A `Retention` gives the blocks of a range of tokens a priority, for a time or for ever; a full tier evicts blocks of
lower priority first. Blocks with a priority above 0 count against their tenant's quota, each once, however many tiers
have it. The bytes that a call is going to raise are claimed before anything is stored, so its retention is granted
whole or refused. A commit or a request whose retention is refused stores its blocks all the same; its answer tells why
they have no priority.

Tenants without a quota share half of the tiers. Half of that is divided evenly between them; the other half goes to
the tenants that ask first, as with everything that tenants share (`SharedLimit`):

```
share 80, 4 tenants     [ 10 | 10 | 10 | 10 ][         40         ]
                          A    B    C    D      first come, first served
```
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from prefixd.base.errors import InvalidArgumentError
from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.base.tenancy.fairness import SharedLimit
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.index.scan import SCANNED_AT_ONCE, slices
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.cache.tiers import Tiers

MOST_RANGES = 64
MOST_PRIORITY = 100
DEFAULT_SHARE = 0.5
"""The share of this host's tiers that all tenants without a quota may raise together."""

_AT_ONCE = 1 << 13  # blocks read or changed in one turn for one range, some tenths of a millisecond
_LEAST_AT_ONCE = 1 << 9


@dataclass(frozen=True, slots=True)
class Retention:
    """The priority of the blocks of a prompt whose last token lies in a range of its tokens.

    Attributes:
        start_token: the range's first token.
        end_token: the first token behind the range; 0: the prompt's end.
        priority: from -100 (evicted first) to 100 (evicted last); 0: as blocks without retention.
        ttl_s: seconds until the priority is 0 again; 0: it stays.
    """

    start_token: int = 0
    end_token: int = 0
    priority: int = 0
    ttl_s: float = 0.0


def check_ranges(count: int) -> None:
    """Raises InvalidArgumentError if there are too many ranges."""
    if count > MOST_RANGES:
        raise InvalidArgumentError(f"retention has {count} ranges; send at most {MOST_RANGES}")


def check_retention(retention: Sequence[Retention]) -> None:
    """Raises InvalidArgumentError if a range, a priority or a time is invalid."""
    check_ranges(len(retention))
    for number, each in enumerate(retention):
        end = each.end_token or "the end"
        which = f"retention[{number}], for tokens {each.start_token} to {end}"
        if each.start_token < 0 or (each.end_token and each.end_token <= each.start_token):
            raise InvalidArgumentError(f"{which}, is no range; end_token must be above start_token, or 0 for the end")
        if not -MOST_PRIORITY <= each.priority <= MOST_PRIORITY:
            raise InvalidArgumentError(
                f"{which}, has priority {each.priority}; it must be between -{MOST_PRIORITY} and {MOST_PRIORITY}"
            )
        if not 0 <= each.ttl_s < math.inf:
            raise InvalidArgumentError(
                f"{which}, has ttl_s {each.ttl_s}; it must be a number of seconds, or 0 for no end"
            )


class RetentionGrant:
    """The granted retention of one prompt. Use it with `with`, or call `end` after the last `apply`.

    Args:
        retained: counts the bytes.
        tenant: the owner of the blocks.
        trie: the blocks' trie.
        retention: checked ranges.
        claimed: bytes that it may raise.
        refused: why nothing was granted, then it applies to nothing; empty if it was granted.
    """

    def __init__(
        self,
        retained: Retained,
        tenant: Tenant,
        trie: Trie,
        retention: Sequence[Retention],
        claimed: int,
        refused: str = "",
    ) -> None:
        self.refused = refused
        self._retained = retained
        self._tenant = tenant
        self._trie = trie
        self._retention = retention
        self._claimed = claimed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def apply(self, rows: Rows, first_block: int) -> None:
        """Gives blocks their priorities, for their time from now on: `rows` from a prompt's `first_block` on.

        Takes some 0.1 us a block; use `apply_all` for prompts of any length.
        """
        trie = self._trie
        before = self._retained.nbytes
        for each in self._retention:
            some = rows[_blocks(each, trie.block_tokens, first_block, len(rows))]
            until_s = self._retained.clock() + each.ttl_s if each.ttl_s else math.inf
            trie.prioritize(some, each.priority, until_s)
            if each.priority:
                self._retained.note_end(trie, until_s)
        self._unclaim(max(self._retained.nbytes - before, 0))

    async def apply_all(self, path: Rows) -> None:
        """Applies to a prompt's blocks from its first on, some thousand in each turn; the caller holds them."""
        step = _step(self._retention)
        for start in range(0, len(path), step):
            if start:
                await give_way()
            self.apply(path[start : start + step], start)

    def end(self) -> None:
        """Gives back the claimed bytes that were not raised; later calls of `apply` do nothing."""
        self._retention = ()
        self._unclaim(self._claimed)

    def _unclaim(self, nbytes: int) -> None:
        nbytes = min(nbytes, self._claimed)
        self._claimed -= nbytes
        self._retained.claimed[self._tenant] -= nbytes


class Retained:
    """Counts and limits the bytes that each tenant keeps above others.

    Args:
        tiers: their capacity limits the tenants without a quota.
        tries: all tries.
        tenant_of: the tenant of a namespace, by ordinal.
        clock: seconds, monotonic.
        tenants: how many tenants may send calls.
    """

    def __init__(
        self,
        tiers: Tiers,
        tries: Sequence[Trie],
        tenant_of: Callable[[int], Tenant],
        clock: Callable[[], float],
        tenants: Callable[[], int] = lambda: 1,
    ) -> None:
        self.clock = clock
        self.claimed: Counter[Tenant] = Counter()
        """Bytes that grants under way may still raise."""
        self.of_tenant: Counter[Tenant] = Counter()
        """Bytes of the tenant's blocks with a priority above 0, each block once; see `sweep`."""
        self.nbytes = 0
        """The bytes of all tenants."""
        self._tiers = tiers
        self._tries = tries
        self._tenant_of = tenant_of
        self._tenants = tenants
        self._over_s: dict[int, float] = {}
        """Trie ordinal -> the earliest time at which a priority in it ends."""

    def count(self, namespace: int, change: int) -> None:
        """Called by each trie with the change of a namespace's `retained_bytes`."""
        self.of_tenant[self._tenant_of(namespace)] += change
        self.nbytes += change

    def note_end(self, trie: Trie, until_s: float) -> None:
        """Notes that a priority of one of the trie's blocks ends at this time."""
        self._over_s[trie.ordinal] = min(self._over_s.get(trie.ordinal, math.inf), until_s)

    async def sweep(self) -> None:
        """Removes priorities that have ended, so that they are not counted; scans only tries that have one."""
        for trie in list(self._tries):
            now_s = self.clock()
            if self._over_s.get(trie.ordinal, math.inf) > now_s:
                continue
            self._over_s[trie.ordinal] = math.inf  # priorities given meanwhile note their own end
            pacer = Pacer(SCANNED_AT_ONCE)
            for part in slices(trie.rows):
                rows = part.start + np.flatnonzero(trie.priority[part])
                until_s = trie.priority_until[rows]
                trie.prioritize(rows[until_s <= now_s], 0, 0.0)
                self.note_end(trie, float(until_s[until_s > now_s].min(initial=math.inf)))
                await pacer.worked(part.stop - part.start)

    async def grant(
        self,
        namespace: Namespace,
        trie: Trie,
        retention: Sequence[Retention],
        path: Rows,
        more: int = 0,
        groups: int = 0,
        *,
        optional: bool = False,
    ) -> RetentionGrant:
        """Grants the retention of a prompt.

        Args:
            namespace: the prompt's namespace.
            trie: the blocks' trie.
            retention: ranges of the prompt.
            path: the prompt's cached blocks, from the first on; the caller holds them.
            more: number of blocks behind `path` that are about to be stored.
            groups: the KV groups of which these blocks will have bytes.
            optional: do not raise beyond the tenant's quota; `RetentionGrant.refused` says why nothing was granted.

        Raises:
            InvalidArgumentError: a range, a priority or a time is invalid.
            ExhaustedError: the tenant may not raise so many bytes, and the retention is not optional.
        """
        check_retention(retention)
        tenant = self._tenant_of(namespace.ordinal)
        wanted = await self._count_raised(trie, retention, path, more, groups)
        if wanted and self._why_refused(tenant, wanted):
            await self.sweep()
            if refused := self._why_refused(tenant, wanted):
                error = tenant.refusal("retained_bytes", refused, "retain fewer tokens")
                if not optional:
                    raise error
                return RetentionGrant(self, tenant, trie, (), 0, str(error))
        self.claimed[tenant] += wanted
        return RetentionGrant(self, tenant, trie, retention, wanted)

    async def _count_raised(
        self, trie: Trie, retention: Sequence[Retention], path: Rows, more: int, groups: int
    ) -> int:
        """The most bytes that the retention of a prompt raises and that are not raised now."""
        blocks, nbytes = len(path) + more, 0
        if not any(each.priority > 0 for each in retention):
            return 0
        step = _step(retention)
        for start in range(0, blocks, step):
            if start:
                await give_way()
            count = min(step, blocks - start)
            priority = np.zeros(count, np.int8)
            for each in retention:
                priority[_blocks(each, trie.block_tokens, start, count)] = each.priority
            rows = path[start : start + count]
            raised = rows[(priority[: len(rows)] > 0) & (trie.priority[rows] <= 0)]
            nbytes += int(trie.group_bytes[trie.groups_there(raised)].sum())
            nbytes += int(np.count_nonzero(priority[len(rows) :] > 0)) * int(trie.group_bytes[groups])
        return nbytes

    def _why_refused(self, tenant: Tenant, wanted: int) -> str:
        """Why the tenant may not raise `wanted` more bytes; empty if it may."""
        if (quota := tenant.quota.retained_bytes) is not None:
            have, most, whose = self.of_tenant[tenant] + self.claimed[tenant], quota, ""
        else:
            share = int(DEFAULT_SHARE * sum(tier.capacity_bytes for tier in self._tiers.own))
            had = self._bytes_without_quota()
            have = had[tenant]
            most = have + SharedLimit(share, self._tenants, had).left(tenant)
            whose = (
                f" (of {share}, half of this host's tiers, which tenants without a limit of their own share: others "
                f"have {had.total() - have})"
            )
        if have + wanted <= most:
            return ""
        return f"{have} of {most} bytes{whose} have a priority above 0, and {wanted} more were asked for"

    def _bytes_without_quota(self) -> Counter[Tenant]:
        """Bytes that tenants without a quota have raised, and that their grants may still raise."""
        had = self.of_tenant.copy()
        had.update(self.claimed)
        return Counter({tenant: count for tenant, count in had.items() if tenant.quota.retained_bytes is None})


def _blocks(retention: Retention, block_tokens: int, first_block: int, count: int) -> slice:
    """Which of `count` blocks from `first_block` on have their last token in the range."""
    start = max(retention.start_token // block_tokens - first_block, 0)
    end = count if not retention.end_token else retention.end_token // block_tokens - first_block
    return slice(min(start, count), max(min(end, count), 0))


def _step(retention: Sequence[Retention]) -> int:
    """Blocks that are read or changed in one turn for all ranges."""
    return max(_LEAST_AT_ONCE, _AT_ONCE // max(1, len(retention)))
