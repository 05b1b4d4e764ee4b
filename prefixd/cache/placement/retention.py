"""Retention: what callers wish for the blocks of a prompt, and how much each tenant may have kept that way.

A wish gives the blocks of a range of tokens a priority, for a time or for ever; a full tier evicts blocks of lower
priority first. Blocks with a priority above 0 count against their tenant's quota, each once, whatever tiers have it.
What a wish is going to raise is claimed before anything is stored, so a wish is granted whole or refused. A refused
wish of a store or a request is left out, and its answer says so: the blocks are stored all the same.

Tenants without a quota share half of the tiers. Half of that is divided evenly between them, half is for whoever comes
first, as with all that tenants share (`SharedLimit`):

```
share 80, 4 tenants     [ 10 | 10 | 10 | 10 ][         40         ]
                          A    B    C    D      whoever comes first
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
"""Of this host's tiers: so much may all tenants together keep above others, where a tenant has no quota of its own."""

_AT_ONCE = 1 << 13  # blocks that are looked at or changed in one turn for one wish, some tenths of a millisecond
_LEAST_AT_ONCE = 1 << 9


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish for the blocks of a prompt whose last token lies in a range of its tokens.

    Attributes:
        start_token: the range's first token.
        end_token: the first one behind it; 0: the prompt's end.
        priority: from -100 (goes first) to 100 (goes last); 0: as blocks without a wish.
        ttl_s: seconds until the priority is 0 again; 0: it stays.
    """

    start_token: int = 0
    end_token: int = 0
    priority: int = 0
    ttl_s: float = 0.0


def check_ranges(count: int) -> None:
    """Raises InvalidArgumentError for a list of too many wishes."""
    if count > MOST_RANGES:
        raise InvalidArgumentError(f"retention has {count} ranges; send at most {MOST_RANGES}")


def check_retention(wishes: Sequence[Retention]) -> None:
    """Raises InvalidArgumentError for a list of wishes that cannot be."""
    check_ranges(len(wishes))
    for number, wish in enumerate(wishes):
        end = wish.end_token or "the end"
        which = f"retention[{number}], for tokens {wish.start_token} to {end}"
        if wish.start_token < 0 or (wish.end_token and wish.end_token <= wish.start_token):
            raise InvalidArgumentError(f"{which}, is no range; end_token must be above start_token, or 0 for the end")
        if not -MOST_PRIORITY <= wish.priority <= MOST_PRIORITY:
            raise InvalidArgumentError(
                f"{which}, has priority {wish.priority}; it must be between -{MOST_PRIORITY} and {MOST_PRIORITY}"
            )
        if not 0 <= wish.ttl_s < math.inf:
            raise InvalidArgumentError(
                f"{which}, has ttl_s {wish.ttl_s}; it must be a number of seconds, or 0 for no end"
            )


class Wish:
    """The wishes for one prompt, granted. `with` it, or `end` it, when there is nothing left to apply it to.

    Args:
        retained: granted it.
        tenant: the blocks'.
        trie: theirs, too.
        wishes: checked.
        claimed: bytes that it may raise.
        refused: why the wishes were not granted: it applies to nothing then. Empty if they were.
    """

    def __init__(
        self,
        retained: Retained,
        tenant: Tenant,
        trie: Trie,
        wishes: Sequence[Retention],
        claimed: int,
        refused: str = "",
    ) -> None:
        self.refused = refused
        self._retained = retained
        self._tenant = tenant
        self._trie = trie
        self._wishes: Sequence[Retention] = wishes
        self._claimed = claimed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def apply(self, rows: Rows, first_block: int) -> None:
        """Gives blocks their priorities, for their time from now on: `rows` from a prompt's `first_block` on.

        It takes some 0.1 us a block: `apply_all` for prompts of any length.
        """
        trie = self._trie
        before = self._retained.nbytes
        for wish in self._wishes:
            some = rows[_blocks(wish, trie.block_tokens, first_block, len(rows))]
            until_s = self._retained.clock() + wish.ttl_s if wish.ttl_s else math.inf
            trie.prioritize(some, wish.priority, until_s)
            if wish.priority:
                self._retained.expires(trie, until_s)
        self._give_back(max(self._retained.nbytes - before, 0))

    async def apply_all(self, path: Rows) -> None:
        """`apply` to a prompt's blocks from its first on, which somebody holds, some thousand in one turn."""
        step = _step(self._wishes)
        for start in range(0, len(path), step):
            if start:
                await give_way()
            self.apply(path[start : start + step], start)

    def end(self) -> None:
        """Gives back what is claimed and was not raised; applies to nothing any more. Ending twice does nothing."""
        self._wishes = ()
        self._give_back(self._claimed)

    def _give_back(self, nbytes: int) -> None:
        nbytes = min(nbytes, self._claimed)
        self._claimed -= nbytes
        self._retained.claimed[self._tenant] -= nbytes


class Retained:
    """Who keeps how much above others.

    Args:
        tiers: this host's bound what tenants without a quota keep.
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
        """Bytes that wishes under way may yet raise."""
        self.of_tenant: Counter[Tenant] = Counter()
        """Bytes of the tenant's blocks with a priority above 0, each block once; see `sweep`."""
        self.nbytes = 0
        """Those of all tenants."""
        self._tiers = tiers
        self._tries = tries
        self._tenant_of = tenant_of
        self._tenants = tenants
        self._over_s: dict[int, float] = {}
        """By a trie's ordinal, when the first priority in it is over, at the earliest."""

    def count(self, namespace: int, change: int) -> None:
        """Told by each trie how its `retained_bytes` of a namespace change."""
        self.of_tenant[self._tenant_of(namespace)] += change
        self.nbytes += change

    def expires(self, trie: Trie, until_s: float) -> None:
        """A priority of one of the trie's blocks is over at this time."""
        self._over_s[trie.ordinal] = min(self._over_s.get(trie.ordinal, math.inf), until_s)

    async def sweep(self) -> None:
        """Takes away the priorities that are over, so that nobody counts them; nothing is looked at while none is."""
        for trie in list(self._tries):
            now_s = self.clock()
            if self._over_s.get(trie.ordinal, math.inf) > now_s:
                continue
            self._over_s[trie.ordinal] = math.inf  # those that come meanwhile tell their own time
            pacer = Pacer(SCANNED_AT_ONCE)
            for part in slices(trie.rows):
                rows = part.start + np.flatnonzero(trie.priority[part])
                until_s = trie.priority_until[rows]
                trie.prioritize(rows[until_s <= now_s], 0, 0.0)
                self.expires(trie, float(until_s[until_s > now_s].min(initial=math.inf)))
                await pacer.worked(part.stop - part.start)

    async def wish(
        self,
        namespace: Namespace,
        trie: Trie,
        wishes: Sequence[Retention],
        path: Rows,
        more: int = 0,
        groups: int = 0,
        *,
        optional: bool = False,
    ) -> Wish:
        """Grants wishes for a prompt.

        Args:
            namespace: the prompt's.
            trie: its blocks'.
            wishes: for ranges of it.
            path: its cached blocks, which somebody holds, from the first on.
            more: so many blocks behind them are about to be stored,
            groups: with the bytes of these KV groups.
            optional: one that is beyond what the tenant may retain is left out (`Wish.refused`).

        Raises:
            InvalidArgumentError: there cannot be such a wish.
            ExhaustedError: the tenant's blocks would be kept above others with more bytes than they may, and the wish
                is not optional.
        """
        check_retention(wishes)
        tenant = self._tenant_of(namespace.ordinal)
        wanted = await self._raised(trie, wishes, path, more, groups)
        if wanted and self._refused(tenant, wanted):
            await self.sweep()
            if refused := self._refused(tenant, wanted):
                error = tenant.refusal("retained_bytes", refused, "retain fewer tokens")
                if not optional:
                    raise error
                return Wish(self, tenant, trie, (), 0, str(error))
        self.claimed[tenant] += wanted
        return Wish(self, tenant, trie, wishes, wanted)

    async def _raised(self, trie: Trie, wishes: Sequence[Retention], path: Rows, more: int, groups: int) -> int:
        """The most bytes that wishes for a prompt raise, which are not above others now."""
        blocks, nbytes = len(path) + more, 0
        if not any(wish.priority > 0 for wish in wishes):
            return 0
        step = _step(wishes)
        for start in range(0, blocks, step):
            if start:
                await give_way()
            count = min(step, blocks - start)
            priority = np.zeros(count, np.int8)
            for wish in wishes:
                priority[_blocks(wish, trie.block_tokens, start, count)] = wish.priority
            rows = path[start : start + count]
            raised = rows[(priority[: len(rows)] > 0) & (trie.priority[rows] <= 0)]
            nbytes += int(trie.group_bytes[trie.groups_there(raised)].sum())
            nbytes += int(np.count_nonzero(priority[len(rows) :] > 0)) * int(trie.group_bytes[groups])
        return nbytes

    def _refused(self, tenant: Tenant, wanted: int) -> str:
        """Why so many more bytes may not be raised; empty if they may."""
        if (quota := tenant.quota.retained_bytes) is not None:
            have, most, whose = self.of_tenant[tenant] + self.claimed[tenant], quota, ""
        else:
            share = int(DEFAULT_SHARE * sum(tier.capacity_bytes for tier in self._tiers.own))
            had = self._sharing()
            have = had[tenant]
            most = have + SharedLimit(share, self._tenants, had).left(tenant)
            whose = (
                f" (of {share}, half of this host's tiers, which tenants without a limit of their own share: others "
                f"have {had.total() - have})"
            )
        if have + wanted <= most:
            return ""
        return f"{have} of {most} bytes{whose} have a priority above 0, and {wanted} more were asked for"

    def _sharing(self) -> Counter[Tenant]:
        """What tenants without a quota have, and may yet raise."""
        had = self.of_tenant.copy()
        had.update(self.claimed)
        return Counter({tenant: count for tenant, count in had.items() if tenant.quota.retained_bytes is None})


def _blocks(wish: Retention, block_tokens: int, first_block: int, count: int) -> slice:
    """Which of `count` blocks from `first_block` on have their last token in the wish's range."""
    start = max(wish.start_token // block_tokens - first_block, 0)
    end = count if not wish.end_token else wish.end_token // block_tokens - first_block
    return slice(min(start, count), max(min(end, count), 0))


def _step(wishes: Sequence[Retention]) -> int:
    """Blocks that are looked at or changed in one turn for all wishes."""
    return max(_LEAST_AT_ONCE, _AT_ONCE // max(1, len(wishes)))
