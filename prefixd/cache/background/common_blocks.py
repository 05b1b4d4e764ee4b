"""Makes blocks common to all tenants after several of them have computed them (`cache.share_after`).

If all tenants shared one cache, a tenant could find out the prompts of others: a prompt that is found, or computed
faster, was sent before. So each tenant has its own blocks, and beside its namespace there is a common one, with the
same name and geometry, in the same trie and with the same keys. A block is copied there when k tenants have computed it
independently. A prompt's path then consists of the tenant's own and of common blocks (`paths.compose`).

```
tenant a   commit, record --rows--> queue --> digests of the bytes --> key, tenant, digest   (Computed)
tenant b   ...                                                              |
tenant c   ...                                          k tenants have one digest: copied
                                                                            v
           found by all  <-------------------------------------  common namespace
```

- A tenant that only used a common block has not computed it.
- If clients fill blocks, k tenants must have computed the same bytes, so that others never read bytes that one tenant
  made up. Digests are BLAKE2b with a secret of this process, so that no client can find bytes for a digest; the digest
  of the copy is compared again. Bytes of the daemon's own workers are trusted.
- Counting begins anew at each start of the daemon; common blocks are restored from disk like other blocks.
- It runs in the background. Room for a copy is made as for a write ahead of need and takes no guaranteed bytes. Without
  room there is no copy; it is tried again when the next tenant computes the block.

Tenants that one party controls count separately: choose k above the number of tenants that may work together. Blocks
that they make common do not count in their quotas, but cannot exceed the limit of common blocks (`cache.common_bytes`).
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import logging
import secrets
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import Pacer
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.keys.key_index import KEY_BYTES
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.moving.allocation import Claim
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespaces import Namespace, NamespaceRegistry
from prefixd.cache.placement.movement import Movement
from prefixd.cache.placement.paths import enter_own, find_ancestry, find_own
from prefixd.cache.rules import GroupMask
from prefixd.cache.tiers import Slots
from prefixd_swap import Span, StorageError, SwapError, host_bytes, started_threads
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

_QUEUED_BLOCKS = 1 << 17
"""The most blocks that wait to be counted; beyond it, the tenant with most blocks loses its oldest ones."""
_REMEMBERED_BYTES = 50 << 20
"""Memory for noted computations, one for each block, KV group and tenant."""
_ENTRY_BYTES = 400
"""The most memory of one computation."""
_BATCH_BLOCKS, _BATCH_BYTES = 64, 8 << 20
"""Digested or copied at a time."""
_GATHER_S = 0.05
"""Time to collect blocks that a request computes one by one."""
_WORKERS = b""
"""The digest of all bytes that the daemon's own workers compute."""
_Stored = tuple[Trie, Rows, npt.NDArray[np.int32]]
"""Blocks of one namespace, and their generations."""


class Computed:
    """The tenants that have computed a KV group of a block, with digests of the bytes.

    Args:
        limit_bytes: the most memory. Beyond it the tenant with the most entries loses its oldest one, so a tenant
            within its share loses none.
    """

    def __init__(self, limit_bytes: int = _REMEMBERED_BYTES) -> None:
        self._limit = max(limit_bytes // _ENTRY_BYTES, 1)
        self._digests: dict[bytes, dict[str, bytes]] = {}  # by key and group, each tenant's
        self._keys: dict[str, OrderedDict[bytes, None]] = {}  # tenant -> its keys, the oldest first
        self._tenants: defaultdict[int, dict[str, None]] = defaultdict(dict)  # number of keys -> tenants
        self._most = 0  # the most keys of a tenant
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def note(self, key: bytes, tenant: str, digest: bytes) -> int:
        """Notes that a tenant has computed a group; returns the number of tenants with the same bytes."""
        digests = self._digests.setdefault(key, {})
        keys = self._keys.setdefault(tenant, OrderedDict())
        if tenant not in digests:
            keys[key] = None
            self._size += 1
            self._count(tenant, len(keys) - 1, len(keys))
        digests[tenant] = digest
        for each in digests:
            self._keys[each].move_to_end(key)
        if self._size > self._limit:
            self._forget_one()
        return _same(digests, digest)

    def _forget_one(self) -> None:
        tenant = next(iter(self._tenants[self._most]))
        keys = self._keys[tenant]
        key, _ = keys.popitem(last=False)
        self._count(tenant, len(keys) + 1, len(keys))
        del self._digests[key][tenant]
        if not self._digests[key]:
            del self._digests[key]
        self._size -= 1

    def _count(self, tenant: str, before: int, after: int) -> None:
        """Updates the number of a tenant's keys by one."""
        self._tenants[before].pop(tenant, None)
        if not self._tenants[before]:
            del self._tenants[before]
        if after:
            self._tenants[after][tenant] = None
        else:
            del self._keys[tenant]
        if after > self._most or (self._most == before and before not in self._tenants):
            self._most = after

    def agreed(self, key: bytes, tenant: str) -> tuple[int, bytes]:
        """The number of tenants with the same bytes as this tenant, and their digest; 0 if it has none."""
        digests = self._digests.get(key, {})
        digest = digests.get(tenant)
        return (0, b"") if digest is None else (_same(digests, digest), digest)


class _Waiting:
    """The queue of blocks that wait to be counted; tenants take turns."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[_Stored]] = OrderedDict()  # the next tenant first
        self._blocks: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def append(self, tenant: str, stored: _Stored) -> None:
        self._queues.setdefault(tenant, deque()).append(stored)
        self._blocks[tenant] += len(stored[1])
        while self._blocks.total() > _QUEUED_BLOCKS:
            self._pop_from(max(self._blocks, key=self._blocks.__getitem__))

    def pop(self) -> _Stored:
        """Takes the oldest blocks of the next tenant."""
        tenant = next(iter(self._queues))
        self._queues.move_to_end(tenant)
        return self._pop_from(tenant)

    def _pop_from(self, tenant: str) -> _Stored:
        stored = self._queues[tenant].popleft()
        self._blocks[tenant] -= len(stored[1])
        if not self._queues[tenant]:
            del self._queues[tenant], self._blocks[tenant]
        return stored


def _same(digests: dict[str, bytes], digest: bytes) -> int:
    return sum(each == digest for each in digests.values())


class CommonBlocks:
    """Counts the tenants that have computed each block, and copies blocks to the common namespace.

    Args:
        mover: moves blocks.
        namespaces: all namespaces.
        chain: makes the chain of a prompt, from its namespace and token ids.
        clock: seconds, monotonic.
        share_after: k, at least 2.
    """

    def __init__(
        self,
        mover: Mover,
        namespaces: NamespaceRegistry,
        chain: Callable[[Namespace, bytes], BlockChain],
        clock: Callable[[], float],
        share_after: int,
    ) -> None:
        self.computed = Computed()
        self._mover = mover
        self._shared = mover.tiers.shared
        self._namespaces = namespaces
        self._chain = chain
        self._clock = clock
        self._share_after = share_after
        self._secret = secrets.token_bytes(32)
        self._waiting = _Waiting()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._threads = started_threads(1, "prefixd-common")

    def start(self) -> asyncio.Task[None]:
        """Starts working in the background; the task ends with `stop`, or by a defect."""
        self._task = asyncio.create_task(self._run(), name="common-blocks")
        return self._task

    async def stop(self) -> None:
        """Ends after the batch under way."""
        self._stopping.set()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})  # how it ended is its watcher's to report
        self._threads.shutdown()

    def stored(self, trie: Trie, rows: Rows) -> None:
        """Queues blocks of one namespace, in prompt order, whose bytes their tenant has computed."""
        if not len(rows):
            return
        namespace = self._namespaces.at(int(trie.namespace[rows[-1]]))
        if namespace.common is not None:
            self._waiting.append(namespace.spec.tenant, (trie, rows, trie.generation[rows]))
            self._wake.set()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            await self._wake.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _GATHER_S)
            await self.work()

    async def work(self) -> None:
        """Counts all waiting blocks, and makes those common that k tenants have computed."""
        self._wake.clear()
        ends: list[tuple[Trie, int, int]] = []  # last blocks that k tenants have computed, with their generations
        while self._waiting and not self._stopping.is_set():
            trie, rows, generations = self._waiting.pop()
            with self._mover.working():
                if (at := await self._count(trie, rows, generations)) >= 0:
                    ends.append((trie, int(rows[at]), int(generations[at])))
        seen: set[tuple[int, int]] = set()  # blocks that were shared together with later ones
        for trie, row, generation in reversed(ends):
            if (trie.ordinal, row) in seen or trie.generation[row] != generation or self._stopping.is_set():
                continue
            with self._mover.working():
                try:
                    seen.update((trie.ordinal, each) for each in await self._share(trie, row))
                except (SwapError, StorageError) as error:
                    log.warning("blocks of several tenants do not become common yet: %s", error)

    # -- counting -----------------------------------------------------------------------------------------------

    async def _count(self, trie: Trie, rows: Rows, generations: npt.NDArray[np.int32]) -> int:
        """Notes that the blocks' tenant has computed their bytes.

        Returns the index of the last block with a group that k tenants have computed, or -1.
        """
        reached, pacer = -1, Pacer(_BATCH_BLOCKS)
        for start, end in _batches(trie, len(rows), trie.all_groups):
            places = start + np.flatnonzero(trie.generation[rows[start:end]] == generations[start:end])
            if not len(places):
                continue  # they have gone meanwhile
            some = rows[places]
            namespace = self._namespaces.at(int(trie.namespace[some[0]]))
            if namespace.spec.worker:
                groups = trie.available[some]
                digests = [[_WORKERS] * len(trie.groups)] * len(some)
            else:
                groups = trie.there[some, self._shared.level]
                with self._mover.placement.holds.hold("counting", trie, some, self._shared, groups):
                    digests = await self._digests(trie, trie.slots[some, self._shared.level], groups)
            keys = trie.keys(some).tobytes()
            for at, (place, mask) in enumerate(zip(places.tolist(), groups.tolist(), strict=True)):
                for group in trie.groups:
                    if mask & group.mask:
                        key = _key(namespace, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], group.bit)
                        tenants = self.computed.note(key, namespace.spec.tenant, digests[at][group.bit])
                        reached = place if tenants >= self._share_after else reached
                await pacer.worked(1)
        return reached

    async def _digests(self, trie: Trie, slots: Slots, groups: GroupMask) -> list[list[bytes]]:
        """For each block the digest of each group in its mask, or b"". The caller holds `slots`, [m, parts]."""
        addresses, masks = self._shared.addresses(slots).tolist(), groups.tolist()
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: [self._digest(trie, *each) for each in zip(addresses, masks, strict=True)]
        )

    def _digest(self, trie: Trie, addresses: Sequence[int], groups: int) -> list[bytes]:
        """The digest of each group in the mask, of a block whose parts are at `addresses`."""
        digests = [b""] * len(trie.groups)
        for group in trie.groups:
            if groups & group.mask:
                digest = hashlib.blake2b(key=self._secret, digest_size=16)
                for part in group.parts:
                    digest.update(host_bytes(Span(addresses[part], trie.part_bytes[part]), trie.part_bytes[part]))
                digests[group.bit] = digest.digest()
        return digests

    # -- becoming common ----------------------------------------------------------------------------------------

    async def _share(self, trie: Trie, row: int) -> list[int]:
        """Makes the blocks common that k tenants have computed, in the prefix up to `row`; returns the prefix."""
        namespace = self._namespaces.at(int(trie.namespace[row]))
        common, holds = namespace.common, self._mover.placement.holds
        if common is None:
            return []
        last = np.array([row])
        with holds.hold("becoming common", trie, last), holds.hold("becoming common", trie, last[:0]) as target:
            path = await find_ancestry(trie, last)
            path = path[np.argsort(trie.depth[path])]
            chain = self._chain(common, trie.tokens[path].tobytes())
            known = await find_own(trie, common, chain)
            have = np.zeros(len(path), np.uint8)
            have[: len(known)] = trie.available[known]
            lacks = await self._agreed(trie, namespace, path, trie.available[path] & ~have)
            blocks = len(trie.usable(path, have | lacks))
            lacks = lacks[:blocks]
            if lacks.any():
                await enter_own(target, common, chain, blocks, self._clock())
                made = len(target.rows)  # fewer if a key is another block's
                await self._copy(trie, namespace, path[:made], target.rows, lacks[:made])
                self._mover.placement.extend(trie, target.rows)
                self._mover.changed.set()
        rows: list[int] = path.tolist()
        return rows

    async def _agreed(self, trie: Trie, namespace: Namespace, path: Rows, groups: GroupMask) -> GroupMask:
        """[len(path)]: the `groups` of each block that k tenants have computed with the same bytes as this one."""
        agreed, keys, pacer = groups.copy(), trie.keys(path).tobytes(), Pacer()
        for at in np.flatnonzero(groups).tolist():
            for group in trie.groups:
                key = _key(namespace, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], group.bit)
                if self.computed.agreed(key, namespace.spec.tenant)[0] < self._share_after:
                    agreed[at] &= ~np.uint8(group.mask)
            await pacer.worked(1)
        return agreed

    async def _copy(self, trie: Trie, namespace: Namespace, rows: Rows, target: Rows, groups: GroupMask) -> None:
        """Copies `groups`, [m] masks, of held blocks to the common namespace; the first ones if room is short."""
        borders = 1 + np.flatnonzero(np.diff(groups))
        for first, last in pairwise([0, *borders.tolist(), len(rows)]):
            mask = int(groups[first])
            for start, end in _batches(trie, last - first, mask) if mask else ():
                here = slice(first + start, first + end)
                if await self._copy_alike(trie, namespace, rows[here], target[here], mask) < end - start:
                    return

    async def _copy_alike(self, trie: Trie, namespace: Namespace, rows: Rows, target: Rows, mask: int) -> int:
        """Copies the same groups of some blocks; returns how many were copied."""
        shared, movement = self._shared, Movement(Urgency.WRITE_BACK)
        parts = np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist()
        wanted = np.full(len(rows), mask, np.uint8)
        with self._mover.placement.holds.hold("becoming common", trie, rows, shared, wanted):
            there = await self._mover.bring(trie, rows, shared, wanted, urgency=Urgency.WRITE_BACK)
            sizes = [trie.part_bytes[part] for part in parts]
            tenant = self._mover.use.owner(trie, int(target[0]))
            taken = await self._mover.slots.allocate(shared, sizes, there, Claim(movement, tenant, ahead=True))
            rows, target = rows[: len(taken)], target[: len(taken)]
            slots = np.full((len(rows), len(trie.part_bytes)), NO_SLOT, np.int64)
            slots[:, parts] = taken
            try:
                copied = await self._copied(trie, namespace, rows, parts, slots, mask)
            except BaseException:
                shared.free(taken)
                raise
            shared.free(slots[~copied])
            self._mover.placement.put_lacking(trie, target[copied], shared, slots[copied])
            self._mover.checksums.begin(trie, target[copied])
        return int(copied.sum())

    async def _copied(
        self, trie: Trie, namespace: Namespace, rows: Rows, parts: Sequence[int], slots: Slots, mask: int
    ) -> npt.NDArray[np.bool_]:
        """Copies parts of held blocks to `slots`; returns which copies have the bytes that k tenants have computed."""
        sources, targets = self._shared.addresses(trie.slots[rows, self._shared.level]), self._shared.addresses(slots)
        keys, groups = trie.keys(rows).tobytes(), [group for group in trie.groups if group.mask & mask]
        agreed = []
        for at in range(len(rows)):
            names = (_key(namespace, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], group.bit) for group in groups)
            agreed.append([self.computed.agreed(name, namespace.spec.tenant)[1] for name in names])

        def copy() -> list[bool]:
            right = []
            for source, target, digests in zip(sources.tolist(), targets.tolist(), agreed, strict=True):
                for part in parts:
                    ctypes.memmove(target[part], source[part], trie.part_bytes[part])
                have = [_WORKERS] * len(trie.groups) if namespace.spec.worker else self._digest(trie, target, mask)
                right.append([have[group.bit] for group in groups] == digests)
            return right

        return np.array(await asyncio.get_running_loop().run_in_executor(self._threads, copy), np.bool_)


def _key(namespace: Namespace, key: bytes, group: int) -> bytes:
    """The key of a KV group of a block in `Computed`, the same for all namespaces with one common namespace."""
    assert namespace.common is not None, "only blocks that can become common are counted"
    return key + namespace.common.id + bytes([group])


def _batches(trie: Trie, blocks: int, mask: int) -> Iterator[tuple[int, int]]:
    """Start and end of the batches of `blocks` blocks, with the KV groups in `mask` of each."""
    step = min(max(1, _BATCH_BYTES // int(trie.group_bytes[mask])), _BATCH_BLOCKS)
    for start in range(0, blocks, step):
        yield start, min(start + step, blocks)
