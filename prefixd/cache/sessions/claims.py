"""Claims: a session computes blocks now, and others of its tenant may wait for them instead of computing them too.

```
prompt      0    1    2    3    4    5    6         cached: blocks 0 and 1
session A             [2--------------6]            claims what is missing
session B   the same blocks up to 4, then others    waits until 4 is cached, then claims its own block 5
```

A claim is a hint. It holds no bytes, and commits do not look at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, SessionEndedError
from prefixd.base.long_work.pacer import give_way
from prefixd.base.tenancy.fairness import SharedLimit
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.index.keys.block_keys import HASHED_AT_ONCE, BlockChain
from prefixd.cache.index.keys.key_index import KEY_BYTES
from prefixd.cache.namespaces import Namespace
from prefixd.cache.sessions.lease_table import LeaseTable
from prefixd.cache.sessions.sessions import End, Session

CLAIMS_OF_SESSION = 64
CLAIMS = 1024
"""Of all sessions. A lookup reads one entry for each length at which the namespace has claims, so 1,024 at the most."""
CLAIMED_BLOCKS = 1 << 21
"""Of all claims: 32 MiB of keys."""
BLOCKS = 1 << 16
"""Of one claim; of a longer prompt the first ones that are missing are claimed. 1 MiB of keys: copied in 0.2 ms."""
WAITS = 1024
"""Calls that wait for another session's claim."""
LONGEST_WAIT_S = 600.0


class _Woken(Enum):
    CACHED = auto()
    """The blocks that both prompts share are cached."""
    ENDED = auto()
    """The claim ended otherwise."""
    CLOSED = auto()
    """The session that waits has ended."""


@dataclass(eq=False, slots=True)
class _Wait:
    """A session that waits for the blocks before `end_block`, which its prompt shares with the claim's."""

    session: Session
    end_block: int
    woken: asyncio.Future[_Woken]


@dataclass(eq=False, slots=True)
class ComputeClaim:
    """A session computes the blocks from `first_block` on; `keys` are theirs. Others wait in the order of `waits`."""

    id: str
    session: Session
    namespace: Namespace
    first_block: int
    keys: bytes = field(repr=False)
    granted_s: float
    expires_s: float
    ended: Callable[[ComputeClaim], None] = field(repr=False)
    waits: list[_Wait] = field(default_factory=list, repr=False)

    @property
    def held(self) -> int:
        """Blocks that it holds: none."""
        return 0

    @property
    def blocks(self) -> int:
        """How many blocks are claimed."""
        return len(self.keys) // KEY_BYTES

    @property
    def end_block(self) -> int:
        """The first block of its prompt that is not claimed: the prompt's length, unless it is very long."""
        return self.first_block + self.blocks

    def end(self, at_its_word: bool) -> None:
        """Lets those that wait go on; the first of them gets the next claim."""
        self.ended(self)

    def key(self, block: int) -> bytes:
        """The key of a claimed block."""
        start = (block - self.first_block) * KEY_BYTES
        return self.keys[start : start + KEY_BYTES]

    def shared(self, chain: BlockChain, block: int, limit: int) -> int:
        """The end of the blocks that are the same in both prompts, up to `limit`; `block` is one of them.

        Equal keys mean equal beginnings, so it is a binary search. The chain's keys must be hashed.
        """
        low, high = block + 1, max(block + 1, min(self.end_block, len(chain), limit))
        while low < high:
            middle = (low + high + 1) // 2
            if self.key(middle - 1) == chain.key(middle - 1):
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True, slots=True)
class ClaimedByOther:
    """Another session's claim, as seen from a prompt: `first_block` to `end_block` are claimed and shared."""

    first_block: int
    end_block: int
    prompt_blocks: int
    age_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """What a session that wants to compute a prompt is told.

    Attributes:
        cached_blocks: blocks of the prompt that are cached.
        claim: its claim on the others; None if all are cached, or claimed.
        other: the claim of another session; None if there is a claim, all are cached, or this session has claimed the
            next block itself.
    """

    cached_blocks: int
    claim: ComputeClaim | None = None
    other: ClaimedByOther | None = None


@dataclass(slots=True)
class ClaimCounters:
    """Since the start."""

    granted: int = 0
    waits: int = 0
    """Calls that waited for another session's claim."""
    taken_over: int = 0
    """Claims granted to one that waited, as the claim before ended without the blocks."""
    spared_tokens: int = 0
    """Prompt tokens that were cached while calls waited: their sessions did not compute them."""


class ComputeClaims:
    """All claims.

    Args:
        leases: the sessions and their grants, of which claims are some: they expire and end like the others.
        clock: seconds, monotonic.
        cached: (namespace, prompt) -> blocks of the prompt that are cached.
        tenants: returns the number of tenants: each has its share of claims and waits.
    """

    def __init__(
        self,
        leases: LeaseTable,
        clock: Callable[[], float],
        cached: Callable[[Namespace, BlockChain], Awaitable[int]],
        tenants: Callable[[], int] = lambda: 1,
    ) -> None:
        self.counters = ClaimCounters()
        self._leases = leases
        self._clock = clock
        self._cached = cached
        self._of: dict[int, dict[int, dict[tuple[Tenant, bytes], ComputeClaim]]] = {}
        """Namespace's ordinal -> first block -> (tenant, key of the first block) -> claim."""
        self._claims = SharedLimit(CLAIMS, tenants)
        self._blocks = SharedLimit(CLAIMED_BLOCKS, tenants)
        self._waits = SharedLimit(WAITS, tenants)

    def __len__(self) -> int:
        return self._claims.total

    def __iter__(self) -> Iterator[ComputeClaim]:
        return (claim for firsts in self._of.values() for claims in firsts.values() for claim in claims.values())

    # -- for those that compute ----------------------------------------------------------------------------------

    async def claim(
        self, session: Session, namespace: Namespace, chain: BlockChain, ttl_s: float = 0.0, wait_s: float = 0.0
    ) -> ClaimAnswer:
        """Claims the blocks of a prompt that are not cached, or waits for the session that has claimed them.

        Raises:
            InvalidArgumentError: a time is invalid.
            ExhaustedError: there are too many claims, or too many calls wait.
            SessionEndedError: the session ended meanwhile.
        """
        if not 0 <= wait_s <= LONGEST_WAIT_S:
            raise InvalidArgumentError(f"wait_s is {wait_s}; it must be from 0 to {LONGEST_WAIT_S:g}")
        ttl_s = self._leases.ttl(ttl_s)
        until_s = asyncio.get_running_loop().time() + wait_s
        block, before = await self._cached(namespace, chain), -1
        while block < len(chain):
            if chain.hashed < (most := min(block + BLOCKS, len(chain))):
                await _hash(chain, most)
            other = self.covering(session.tenant, namespace, chain, block)  # no await until claim or wait
            if other is None:
                return ClaimAnswer(block, self._grant(session, namespace, chain, block, ttl_s))
            if other.session is session:
                break
            end = other.shared(chain, block, len(chain))
            left_s = until_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return ClaimAnswer(block, other=self._seen(other, block, end))
            before = block if before < 0 else before
            woken = await self._wait(other, session, end, left_s)
            if woken is _Woken.CLOSED:
                raise SessionEndedError(f"session {session.id[:8]} ended while it waited; open another one")
            if woken is _Woken.ENDED and self.covering(session.tenant, namespace, chain, block) is None:
                # At once, without another look at the cache: who has waited longest comes first.
                self.counters.taken_over += 1
                return ClaimAnswer(block, self._grant(session, namespace, chain, block, ttl_s))
            block = await self._cached(namespace, chain)
            self.counters.spared_tokens += max(block - before, 0) * chain.block_tokens
            before = max(block, before)
        return ClaimAnswer(block)

    async def seen(
        self, session: Session, namespace: Namespace, chain: BlockChain, cached_blocks: int
    ) -> ClaimedByOther | None:
        """The claim of another session on the block behind a prompt's cached ones; None if there is none."""
        if namespace.ordinal not in self._of or cached_blocks >= len(chain):
            return None
        claim = self.covering(session.tenant, namespace, chain, cached_blocks)
        if claim is None or claim.session is session:
            return None
        await _hash(chain, min(len(chain), claim.end_block))
        return self._seen(claim, cached_blocks, claim.shared(chain, cached_blocks, len(chain)))

    def covering(self, tenant: Tenant, namespace: Namespace, chain: BlockChain, block: int) -> ComputeClaim | None:
        """A claim of the tenant's sessions on this block of the prompt."""
        for first, claims in self._of.get(namespace.ordinal, {}).items():
            if first > block:
                continue
            claim = claims.get((tenant, chain.key(first)))
            if claim is not None and block < claim.end_block and claim.key(block) == chain.key(block):
                return claim
        return None

    # -- what ends claims and waits ------------------------------------------------------------------------------

    def concern(self, namespace: Namespace) -> bool:
        """Whether there are claims in the namespace."""
        return namespace.ordinal in self._of

    def note_cached(self, tenant: Tenant, namespace: Namespace, chain: BlockChain, blocks: int) -> None:
        """Notes that the first `blocks` of a prompt are cached since a commit. The chain's keys are hashed so far."""
        for first, claims in list(self._of.get(namespace.ordinal, {}).items()):
            if first >= blocks or (claim := claims.get((tenant, chain.key(first)))) is None:
                continue
            end = claim.shared(chain, first, blocks)
            if end == claim.end_block:
                self._leases.forget(claim, End.CACHED)
                self._remove(claim)
            for wait in claim.waits:
                if wait.end_block <= end and not wait.woken.done():
                    wait.woken.set_result(_Woken.CACHED)

    def end_waits(self, session: Session) -> None:
        """Ends the waiting calls of a session that has ended."""
        for claim in self if self._waits.total else ():
            for wait in claim.waits:
                if wait.session is session and not wait.woken.done():
                    wait.woken.set_result(_Woken.CLOSED)

    def _end(self, claim: ComputeClaim) -> None:
        """Ends a claim that was released, has expired, or whose session ended."""
        self._remove(claim)
        for wait in claim.waits:  # they go on in this order
            if not wait.woken.done():
                wait.woken.set_result(_Woken.ENDED)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _grant(
        self, session: Session, namespace: Namespace, chain: BlockChain, block: int, ttl_s: float
    ) -> ComputeClaim:
        blocks = min(len(chain) - block, BLOCKS)
        if session.granted[ComputeClaim] >= CLAIMS_OF_SESSION:
            raise ExhaustedError(
                f"session {session.id[:8]} has {CLAIMS_OF_SESSION} claims, the most allowed; compute without a claim"
            )
        tenant = session.tenant
        if not self._claims.left(tenant) or blocks > self._blocks.left(tenant):
            raise ExhaustedError(
                f"all sessions have {len(self)} claims of {self._blocks.total} blocks, of {self._claims.limit} and "
                f"{self._blocks.limit} at most, and tenant {tenant.name} {self._claims[tenant]} of "
                f"{self._blocks[tenant]}; this one is for {blocks} blocks; compute without a claim"
            )
        now_s = self._clock()
        keys = chain.key_rows(block, block + blocks).tobytes()
        claim = ComputeClaim(self._leases.next_id(), session, namespace, block, keys, now_s, now_s + ttl_s, self._end)
        self._leases.grant(claim)
        key = (tenant, chain.key(block))
        self._of.setdefault(namespace.ordinal, {}).setdefault(block, {})[key] = claim
        self._claims.add(tenant, 1)
        self._blocks.add(tenant, blocks)
        self.counters.granted += 1
        return claim

    def _remove(self, claim: ComputeClaim) -> None:
        """Removes a claim; does nothing for one that is not among them."""
        ordinal, key = claim.namespace.ordinal, (claim.session.tenant, claim.key(claim.first_block))
        firsts = self._of.get(ordinal, {})
        claims = firsts.get(claim.first_block, {})
        if claims.get(key) is not claim:
            return
        del claims[key]
        if not claims:
            del firsts[claim.first_block]
        if not firsts:
            del self._of[ordinal]
        self._claims.add(claim.session.tenant, -1)
        self._blocks.add(claim.session.tenant, -claim.blocks)

    async def _wait(self, claim: ComputeClaim, session: Session, end_block: int, left_s: float) -> _Woken | None:
        """Waits for the end of a claim, or of its first blocks; None when the time is over."""
        if not self._waits.left(session.tenant):
            raise ExhaustedError(
                f"{self._waits.total} calls wait for claims, {self._waits[session.tenant]} of them of tenant "
                f"{session.tenant.name}, and {self._waits.limit} may; compute without waiting"
            )
        wait = _Wait(session, end_block, asyncio.get_running_loop().create_future())
        claim.waits.append(wait)
        self._waits.add(session.tenant, 1)
        self.counters.waits += 1
        try:
            async with asyncio.timeout(left_s):
                return await wait.woken
        except TimeoutError:
            return None
        finally:
            self._waits.add(session.tenant, -1)
            claim.waits.remove(wait)

    def _seen(self, claim: ComputeClaim, block: int, end_block: int) -> ClaimedByOther:
        now_s = self._clock()
        left_s = max(claim.expires_s - now_s, 0.0)
        return ClaimedByOther(block, end_block, claim.end_block, now_s - claim.granted_s, left_s)

    def check_integrity(self) -> list[str]:
        """What contradicts itself, a line each."""
        claims = list(self)
        if (len(self), self._blocks.total) == (len(claims), sum(claim.blocks for claim in claims)):
            return []
        return [f"{len(self)} claims of {self._blocks.total} blocks are counted, and there are {len(claims)}"]


async def _hash(chain: BlockChain, blocks: int) -> None:
    """Hashes the keys of a prompt's first blocks, in slices."""
    for start in range(chain.hashed // HASHED_AT_ONCE * HASHED_AT_ONCE, blocks, HASHED_AT_ONCE):
        if chain.hashed < (end := min(start + HASHED_AT_ONCE, blocks)):
            chain.key(end - 1)
            if end < blocks:
                await give_way()
