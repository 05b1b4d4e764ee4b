"""Caches over small real tiers, and blocks whose bytes follow from their tokens, so that every byte can be checked."""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import xxhash

from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import (
    BlockChain,
    Lease,
    Namespace,
    NamespaceSpec,
    PartSpec,
    Reservation,
    Session,
    TieredCache,
    Tiers,
    Trie,
    check_integrity,
)
from prefixd.cache.index.keys.block_keys import Digest, xxh3_digest
from prefixd.cache.index.trie import CPU, DISK, GPU, NO_SLOT
from prefixd.cache.options import CacheOptions
from prefixd.cache.remote import RemoteOptions
from prefixd.cache.sessions.leasing import Asked
from prefixd.cache.sessions.reservations import ToFill
from prefixd_swap import (
    CopyEngine,
    CpuArena,
    FrameId,
    FramePool,
    KvGeometry,
    SlabStore,
    Span,
    create_copy_engine,
    create_eviction_policy,
    create_memory,
    register_host,
    unregister_host,
)
from prefixd_swap.sealing.rest_keys import RestKeys
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.io import DiskIo
from prefixd_swap.stores import ObjectStore
from prefixd_swap.tiers import MemoryTier, RemoteTier, StoreTier, Tier
from prefixd_swap.transfers import Transfers
from tests.tries import match_rows, used_rows
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from prefixd_swap.stores.sealed import Seal

BLOCK_TOKENS = 2
PART_BYTES = 4096
MakeRig = Callable[..., "Rig"]


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Disk(FileOps):
    """The real file calls without waiting for the device; `fail` makes writes, reads and new slabs fail.

    The free space is always the same, whatever others store on the machine: a store that was refused a slab asks again
    when there is more.
    """

    def __init__(self) -> None:
        self.fail: OSError | None = None
        self.reads = 0

    def _maybe(self) -> None:
        if self.fail is not None:
            raise self.fail

    def fallocate(self, fd: int, nbytes: int) -> None:
        self._maybe()
        super().fallocate(fd, nbytes)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._maybe()
        return super().pwrite(fd, buffer, offset)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.reads += 1
        return super().pread(fd, buffer, offset)

    def copy_mapped(self, address: int, buffer: memoryview) -> int:
        self.reads += 1
        return super().copy_mapped(address, buffer)

    def fdatasync(self, fd: int) -> None:
        self._maybe()

    def free_bytes(self, path: Path) -> int:
        return 1 << 40


class OpenCache:
    """A cache over real tiers, and what they are made of: whoever opens it closes it.

    Args:
        cpu_bytes: of the CPU tier; 0: there is none. Likewise `disk_bytes`, in the folder `path`.
        slab_bytes: of the disk tier's files; None: the store's own choice.
        frames: of the GPU tier, of `frame_bytes` each, from chunks of `chunk_bytes`.
        compute: makes another GPU tier of its frames.
        engine: copies bytes; by default that of `device` with a thread.
        tiers: more for `Tiers.local`.
        cache: more for `TieredCache`.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        cpu_bytes: int = 0,
        disk_bytes: int = 0,
        slab_bytes: int | None = None,
        io: DiskIo = "direct",
        ops: FileOps | None = None,
        frames: int = 0,
        frame_bytes: int = PART_BYTES,
        chunk_bytes: int | None = None,
        compute: Callable[[FramePool], MemoryTier] | None = None,
        device: str = "cpu",
        engine: CopyEngine | None = None,
        policy: str = "lru",
        clock: Callable[[], float] = lambda: 0.0,
        options: CacheOptions | None = None,
        tiers: dict[str, Any] | None = None,
        keys: RestKeys | None = None,
        **cache: Any,
    ) -> None:
        self.device = device
        self.store = None
        if disk_bytes:
            assert path is not None
            self.store = SlabStore.open(path, disk_bytes, slab_bytes=slab_bytes, io=io, ops=ops, keys=keys)
        self.arena = CpuArena(cpu_bytes) if cpu_bytes else None
        if self.arena is not None and device != "cpu":
            register_host(self.arena.span(0, 0).address, self.arena.capacity_bytes)
        self.memory = self.pool = None
        if frames:
            self.memory = create_memory(device, chunk_bytes or frame_bytes)
            self.pool = FramePool(self.memory, frame_bytes, frames)
        self.engine = engine or create_copy_engine(device)
        made = Tiers.local(self.arena, self.store, self.pool, **(tiers or {}))
        if compute is not None and self.pool is not None:
            made.set_compute(compute(self.pool))
        self.cache = TieredCache(made, self.engine, create_eviction_policy(policy, seed=1), clock, options, **cache)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, *, check: bool = True) -> None:
        await self.cache.close()
        if check:
            self.check()
        self.engine.close()
        if self.store is not None:
            self.store.close()
        if self.pool is not None and self.memory is not None:
            self.pool.close()
            self.memory.close()
        if self.arena is not None:
            if self.device != "cpu":
                unregister_host(self.arena.span(0, 0).address)
            self.arena.close()

    def check(self) -> None:
        """The cache adds up."""
        check_integrity(self.cache)


class Rig(OpenCache):
    """A cache with as many slots a tier as a test asks for (0: no such tier).

    A slot has 4096 bytes (`part_bytes`), or 2 MiB with the GPU tier on CUDA, where a chunk cannot be smaller.
    `write_queue` counts blocks; `cache` are fields of `CacheOptions`, of which write-back is off and the limits of a
    session are wide.
    """

    def __init__(
        self,
        path: Path,
        *,
        gpu: int = 0,
        cpu: int = 8,
        disk: int = 0,
        policy: str = "lru",
        digest: Digest = xxh3_digest,
        device: str = "cpu",
        part_bytes: int = PART_BYTES,
        ops: FileOps | None = None,
        io: DiskIo = "direct",
        write_queue: int | None = None,
        remote: ObjectStore | None = None,
        seal: Seal | None = None,
        options: RemoteOptions | None = None,
        tenants: Tenants | None = None,
        keys: RestKeys | None = None,
        **cache: Any,
    ) -> None:
        self.path = path
        self.keys = keys
        self.device = device
        self.part_bytes = part_bytes if device == "cpu" else 2 << 20
        self.clock = Clock()
        self.ops: Any = ops or Disk()
        self._slots = (gpu, cpu, disk)
        self._policy = policy
        self._digest = digest
        self._io = io
        self._remote = remote
        self._tenants = tenants
        from prefixd_swap.stores.sealed import Seal  # not in the engines' environments: it needs cryptography

        self._seal = seal or Seal(b"a secret of tests")
        if write_queue is not None:
            cache["write_queue_bytes"] = write_queue * self.part_bytes
        # An answer that is late is for those who ask later: a test that waits for one must not depend on the machine.
        cache["remote"] = options or RemoteOptions(lookup_s=WAIT_S)
        self._options = CacheOptions(
            **{"write_back": False, "prefetch_bytes": 1 << 30, "reserved_bytes": 1 << 30, **cache}
        )
        self._open()

    def _open(self) -> None:
        gpu, cpu, disk = (slots * self.part_bytes for slots in self._slots)
        geometry = KvGeometry(1, 1, self.part_bytes // 8 // BLOCK_TOKENS, "float32", BLOCK_TOKENS, "token")
        super().__init__(
            self.path,
            cpu_bytes=cpu,
            disk_bytes=disk,
            keys=self.keys,
            slab_bytes=disk,
            io=self._io,
            ops=self.ops,
            frames=gpu // self.part_bytes,
            frame_bytes=geometry.block_bytes,
            chunk_bytes=self.part_bytes,
            device=self.device,
            engine=create_copy_engine(self.device, 2),
            policy=self._policy,
            clock=self.clock,
            options=self._options,
            tiers={"remote": self._make_remote if self._remote else None},
            tenants=self._tenants,
            digest=self._digest,
        )
        self.computed: Counter[int] = Counter()
        self.own: list[int] = []
        self.cache.claims.append(self._claims)
        self.restored = self.cache.restore()
        self.namespace = self.register()
        self.session = self.open_session()

    def _make_remote(self, transfers: Transfers) -> RemoteTier:
        assert self._remote is not None
        return RemoteTier(self._remote, transfers, self._seal, timeout_s=0.2)

    async def restart(self) -> None:
        """Ends the cache and opens another one on the same disk."""
        await self.close()
        self._open()

    def start_write_back(self) -> None:
        """Starts the background copies; needs a running loop."""
        self.cache.write_back.start()
        self.cache.mover.start_probing()

    # -- names --------------------------------------------------------------------------------------------------

    def register(self, name: str = "model", parts: int = 1, nbytes: int | None = None, salt: bytes = b"") -> Namespace:
        size = self.part_bytes if nbytes is None else nbytes
        spec = NamespaceSpec(name, BLOCK_TOKENS, tuple(PartSpec("kv", rank, size) for rank in range(parts)), salt)
        return self.cache.register(spec)

    def open_session(self) -> Session:
        return self.cache.leases.open("test", 1, self.clock(), self.cache.tenants.default)

    def chain(self, prompt: Sequence[int], namespace: Namespace | None = None) -> BlockChain:
        """The prompt in which block i is all `prompt[i]`."""
        tokens = np.repeat(np.array(prompt, "<u4"), BLOCK_TOKENS).tobytes()
        return self.cache.chain(namespace or self.namespace, tokens)

    @property
    def durable(self) -> StoreTier:
        """The disk tier."""
        assert self.cache.tiers.durable is not None
        return self.cache.tiers.durable

    @property
    def trie(self) -> Trie:
        return self.cache.trie(self.namespace)

    def rows(self, prompt: Sequence[int], namespace: Namespace | None = None) -> list[int]:
        """Rows of the cached prefix, without counting as use."""
        home = namespace or self.namespace
        rows: list[int] = match_rows(self.cache.trie(home), home.root, self.chain(prompt, home)).tolist()
        return rows

    def tiers(self, prompt: Sequence[int], tier: int) -> list[bool]:
        """For each cached block of the prompt whether `tier` has it."""
        return [self.trie.has(row, tier) for row in self.rows(prompt)]

    # -- bytes --------------------------------------------------------------------------------------------------

    def content(self, namespace: Namespace, chain: BlockChain, block: int, part: int = 0) -> bytes:
        """The only right bytes of a block's part."""
        seed = xxhash.xxh3_64_intdigest(namespace.id + chain.blocks(block + 1), part)
        size = namespace.spec.parts[part].nbytes
        return np.random.default_rng(seed).bytes(size)

    def write(self, span: Span, data: bytes) -> None:
        ctypes.memmove(span.address, data, len(data))

    def read(self, span: Span) -> bytes:
        return ctypes.string_at(span.address, span.nbytes)

    async def upload(self, span: Span, data: bytes) -> None:
        """Writes to wherever the span is, as the worker does before it tells of a block."""
        if not span.on_device:
            self.write(span, data)
            return
        source = np.frombuffer(data, np.uint8)
        await self.engine.copy([(span, Span(source.ctypes.data, source.nbytes))])

    async def download(self, span: Span) -> bytes:
        """Reads from wherever the span is."""
        if not span.on_device:
            return self.read(span)
        target = np.empty(span.nbytes, np.uint8)
        await self.engine.copy([(Span(target.ctypes.data, target.nbytes), span)])
        return target.tobytes()

    def frame(self, frame: int) -> Span:
        assert self.pool is not None
        return self.pool.span(FrameId(frame))

    def fill(self, reservation: Reservation, blocks: int | None = None) -> None:
        """Writes the right bytes into the first `blocks` blocks of a reservation, as an engine would."""
        for i, slots in enumerate(reservation.slots[:blocks].tolist()):
            for part, slot in zip(reservation.parts, slots, strict=True):
                block = reservation.first_block + i
                data = self.content(reservation.namespace, reservation.chain, block, part)
                self.write(self.cache.tiers.arena.span(slot, len(data)), data)

    def check_bytes(self, trie: Trie, row: int, part: int, found: bytes, exact: bytes) -> None:
        """What memory has of a block's part is right."""
        assert found == exact

    def check_lease(self, lease: Lease, namespace: Namespace, chain: BlockChain, first_block: int = 0) -> None:
        """Every byte of a lease is right."""
        for i, row in enumerate(lease.rows.tolist()):
            for part, spec in enumerate(namespace.spec.parts):
                if lease.hold.wanted is not None and not lease.hold.wanted[i] & lease.trie.part_mask[part]:
                    continue  # its KV group's rule does not need it
                span = self.cache.tiers.arena.span(int(lease.trie.slots[row, CPU, part]), spec.nbytes)
                self.check_bytes(
                    lease.trie, row, part, self.read(span), self.content(namespace, chain, first_block + i, part)
                )

    # -- what engines do ----------------------------------------------------------------------------------------

    async def put(
        self,
        prompt: Sequence[int],
        *,
        namespace: Namespace | None = None,
        parts: Sequence[int] = (),
        durable: bool = False,
    ) -> tuple[int, int]:
        """Reserves, fills and commits what is not cached of the prompt; returns (committed, duplicates)."""
        home = namespace or self.namespace
        self.clock.now += 1
        reservation = await self.cache.reserve(self.session, home, self.chain(prompt, home), ToFill(parts))
        if isinstance(reservation, int):
            return 0, 0
        self.fill(reservation)
        done = await self.cache.commit(reservation, len(reservation.slots), durable=durable)
        await self.cache.mover.checksums.wait_for_all()  # so that what a test finds held is held by whom it thinks of
        return done

    async def lease(self, prompt: Sequence[int], *, namespace: Namespace | None = None, **how: Any) -> Lease | None:
        """Acquires the prompt's prefix and checks every byte."""
        home = namespace or self.namespace
        self.clock.now += 1
        chain = self.chain(prompt, home)
        matched = how.pop("matched", None)
        lease = await self.cache.acquire(self.session, home, chain, Asked(**how), matched)
        if lease is not None:
            self.check_lease(lease, home, chain, how.get("first_block", 0))
        return lease

    async def get(self, prompt: Sequence[int], *, namespace: Namespace | None = None) -> int:
        """Blocks of the prompt that could be read, every byte of them checked."""
        lease = await self.lease(prompt, namespace=namespace)
        if lease is None:
            return 0
        self.cache.release(self.session, lease.id)
        return len(lease.rows)

    async def put_gpu(self, prompt: Sequence[int]) -> list[int]:
        """Computes the prompt's blocks as the worker does; returns their rows, held in the GPU tier."""
        chain, cache = self.chain(prompt), self.cache
        self.clock.now += 1
        frames = await cache.mover.slots.take_frames(len(prompt))
        assert frames is not None
        self.own += frames
        rows: list[int] = []
        for block, frame in enumerate(frames):
            await self.upload(self.frame(frame), self.content(self.namespace, chain, block))
            parent = rows[-1] if rows else self.namespace.root
            entered, taken = cache.record(self.namespace, parent, chain, block, [frame])
            self.trie.hold(entered, GPU)
            self.computed.update(entered.tolist())
            self.own.remove(frame)
            if not taken[0]:
                cache.tiers.compute.free([frame])
            rows += entered.tolist()
        return rows

    def _claims(self) -> Iterator[tuple[Trie, Any, list[int]]]:
        """What a test holds as a worker would: rows that it computed, frames that it took (`own`)."""
        yield self.trie, np.empty(0, np.int64), self.own
        for row in self.computed.elements():
            yield self.trie, np.array([row], np.int64), []

    def unhold(self, rows: Sequence[int], tier: Tier) -> None:
        if tier is self.cache.tiers.compute:
            self.computed -= Counter(rows)
        held = np.array(rows, np.int64)
        self.trie.unhold(held, tier.level)
        self.cache.placement.sweep(self.trie, held)

    # -- what must hold -----------------------------------------------------------------------------------------

    async def check_disk(self) -> None:
        """Once nothing is under way, the store's index names exactly what the tries say is on disk."""
        await self.cache.mover.quiesce()
        self.check()
        if self.store is None:
            return
        store = self.store

        def stored() -> dict[tuple[bytes, bytes], tuple[int, ...]]:
            return {(r.namespace, r.key): tuple(p.slot for p in r.parts if p) for r in store.records()}

        async with self.cache.mover.disk.still():
            known = self._on_disk()
            there = await asyncio.to_thread(stored)
        assert there == known

    def _on_disk(self) -> dict[tuple[bytes, bytes], tuple[int, ...]]:
        """What the tries say is on disk: slots by namespace and key."""
        return {
            (self.cache.namespaces.at(int(trie.namespace[row])).id, trie.key(row)): tuple(
                slot for slot in trie.slots[row, DISK].tolist() if slot != NO_SLOT
            )
            for trie in self.cache.tries
            for row in used_rows(trie).tolist()
            if trie.any_part[row] & (1 << DISK)
        }

    def damage(self, row: int, part: int = 0) -> None:
        """Flips a byte of a block on disk."""
        assert self.store is not None
        slab, index = self.store._slabs.find(int(self.trie.slots[row, DISK, part]))
        with slab.path.open("r+b") as file:
            file.seek(index * 4096 + 17)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))

    @contextmanager
    def nothing_lost(self) -> Iterator[None]:
        """What is free and held afterwards is what was before."""
        tiers = self.cache.tiers

        def standing() -> list[object]:
            holds = [(int(t.keep[: t.rows].sum()), int(t.holds[: t.rows].sum())) for t in self.cache.tries]
            grants = [g for s in self.cache.leases.sessions.values() for g in s.grants]
            return [*(len(tier.in_flight) for tier in tiers.memories), holds, grants]

        before = standing()
        yield
        assert standing() == before
        self.check()
