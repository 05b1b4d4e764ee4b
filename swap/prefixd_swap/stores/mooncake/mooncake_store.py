"""Objects in a Mooncake Store: in memory of many hosts, found through a master, moved by TCP or RDMA.

The client blocks, so calls run in threads: see `mooncake_lane`. Objects in registered memory are put from it and read
into it without a copy; their call ends with the native call, at most `native_timeout_s` and a second after the
deadline. All other objects are copied once through a lane's memory, and their call ends at its deadline.

The client's `setup` and `close` hold the interpreter's lock: `close` for a second, `setup` as long if the master
accepts connections and does not answer. All other calls release it.

The store has no times to live: without room it evicts the objects that were not used for longest. It refuses empty
objects, so an empty object is stored as a single zero byte; so such a byte that is read into no memory has length 0.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from prefixd_swap.errors import OutOfMemoryError, RemoteFullError, RemoteStoreError
from prefixd_swap.stores.base import ObjectStore, Read, Write, first_bytes
from prefixd_swap.stores.deadline import within
from prefixd_swap.stores.mooncake.mooncake_lane import Lane, Visit, address_of, or_leave, until_done
from prefixd_swap.stores.mooncake.mooncake_options import MooncakeOptions
from prefixd_swap.stores.side_by_side import side_by_side
from prefixd_swap.threads import started_threads

_PART_BYTES = 16 << 20
_PART_OBJECTS = 512
_PART_NAMES = 8192
_SMALL_BYTES = 4096  # of an object, beside what is registered: its head
_GET, _PUT = "batch_get_into_multi_buffers", "batch_put_from_multi_buffers"
_CLOSE_S = 30.0
_RETRY_S = 1.0  # after a start that failed; see the module

# Mooncake's ErrorCode, mooncake-store/include/types.h.
_NO_AVAILABLE_HANDLE = -200
_INVALID_PARAMS = -600  # among others: the object is longer than the memory for it
_ABSENT = (-702, -703, -704, -707)  # its replica is bad, or not written yet; it is not there; it was evicted meanwhile
_REPLICA_IS_NOT_READY = -703  # a put that goes on, or was given up
_OBJECT_NOT_FOUND = -704
_OBJECT_ALREADY_EXISTS = -705
_TRANSFER_FAIL = -800  # among others: the object is shorter than the memory for it
_RPC_CODES = (-900, -901)

_T = TypeVar("_T")


class MooncakeStore(ObjectStore):
    """Objects in a Mooncake Store.

    Raises:
        RemoteStoreError: the package, or a system library that it needs, is missing.
    """

    kind = "mooncake"

    def __init__(self, options: MooncakeOptions) -> None:
        self.address = options.address
        self.copied_bytes = 0
        self._options = options
        self._where = f"mooncake at {self.address}"
        self._new_client = _load(options)
        self._client: Any = None
        self._setup: asyncio.Task[None] | None = None
        self._regions: list[tuple[int, int]] = []  # registered memory: begin and end
        self._waiting: list[tuple[int, int]] = []  # to be registered
        self._threads: ThreadPoolExecutor | None = None
        self._lanes: asyncio.Queue[Lane] = asyncio.Queue()
        self._running: set[Future[Any]] = set()
        self._lanes_made = False
        self._refused: str | None = None  # why the last start failed
        self._retry_at_s = 0.0
        self._closed = False

    def register(self, address: int, nbytes: int) -> None:
        """As `ObjectStore.register`: the next call registers it with the transfer engine, which pins it for RDMA."""
        self._waiting.append((address, address + nbytes))

    async def exists(self, names: Sequence[bytes], deadline_s: float) -> list[bool]:
        there: list[bool] = []
        keys = [self._key(name) for name in names]
        async with within(deadline_s, f"exists of {len(names)} objects", self._where):
            for at in range(0, len(keys), _PART_NAMES):
                part = keys[at : at + _PART_NAMES]
                codes = await self._without_memory(partial(_is_exist, part))
                self._check(codes, len(part), (0, 1, _OBJECT_NOT_FOUND))
                there += [code == 1 for code in codes]
        return there

    async def get(self, reads: Sequence[Read], deadline_s: float) -> list[int | None]:
        came: list[int | None] = [None] * len(reads)

        async def fetch(part: list[int], direct: bool) -> None:
            wanted = [reads[index] for index in part]
            codes = await self._get(wanted, self._get_direct if direct else self._get_bounced)
            for index, code in zip(part, codes, strict=True):
                came[index] = min(code, reads[index].nbytes) if 0 < code <= max(1, reads[index].nbytes) else None
            self._check_reads(codes)

        async with within(deadline_s, f"get of {len(reads)} objects", self._where):
            await self._ready()
            await side_by_side(self._jobs(reads, fetch), self._options.threads)
        return came

    async def put(self, writes: Sequence[Write], ttl_s: float, deadline_s: float) -> None:
        """As `ObjectStore.put`, without `ttl_s`: the store has no times to live."""

        async def store(part: list[int], direct: bool) -> None:
            if direct:
                codes = await self._direct([writes[index] for index in part], _PUT)
            else:
                codes = await self._put_bounced([writes[index] for index in part])
            self._check(codes, len(part), (0, _OBJECT_ALREADY_EXISTS))

        async with within(deadline_s, f"put of {len(writes)} objects", self._where):
            await self._ready()
            await side_by_side(self._jobs(writes, store), self._options.threads)

    async def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        """As `ObjectStore.delete`; also deletes objects that are being read."""
        keys = [self._key(name) for name in names]
        async with within(deadline_s, f"delete of {len(names)} objects", self._where):
            for at in range(0, len(keys), _PART_NAMES):
                part = keys[at : at + _PART_NAMES]
                codes = await self._without_memory(partial(_remove, part))
                self._check(codes, len(part), (0, _OBJECT_NOT_FOUND, _REPLICA_IS_NOT_READY))

    async def ping(self, deadline_s: float) -> None:
        async with within(deadline_s, "ping", self._where):
            # A client's health_check returns 0 even while its master cannot be reached.
            codes = await self._without_memory(lambda client: client.batch_is_exist([self._key(b"ping")]))
            self._check(codes, 1, (0, 1, _OBJECT_NOT_FOUND))

    async def close(self) -> None:
        """As `ObjectStore.close`; a thread closes the client when its last call has ended."""
        if self._closed:
            return
        self._closed = True
        if self._threads is not None:
            with suppress(RuntimeError):  # the interpreter ends
                self._threads.submit(self._close_when_idle, list(self._running))
            self._threads.shutdown(wait=False)

    def _key(self, name: bytes) -> str:
        return self._options.prefix + name.hex()

    # Starting.

    async def _ready(self) -> None:
        """Waits until the client is connected and all memory is registered. Callers share one attempt, which goes on
        after they are cancelled."""
        if self._closed:
            raise RemoteStoreError(f"{self._where}: the store was closed")
        if self._lanes_made and not self._waiting:
            return
        if self._setup is None or self._setup.done():
            self._setup = asyncio.ensure_future(self._set_up())
            self._setup.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark it as retrieved
        await asyncio.shield(self._setup)

    async def _set_up(self) -> None:
        if self._threads is None:
            try:
                # One thread besides the lanes, for starting and closing.
                self._threads = started_threads(self._options.threads + 1, "mooncake")
            except OutOfMemoryError as error:
                raise RemoteStoreError(f"{self._where}: {error}") from error
        if not self._lanes_made:
            if self._refused is not None and time.monotonic() < self._retry_at_s:
                raise RemoteStoreError(self._refused)
            try:
                await self._find_master()
                await or_leave(self._submit(self._connect), _nothing)
            except RemoteStoreError as error:
                self._refused, self._retry_at_s = str(error), time.monotonic() + _RETRY_S
                raise
            for _ in range(self._options.threads):
                lane = Lane(self._threads, self._options.bounce_bytes)
                self._waiting.append((lane.address, lane.address + lane.nbytes))
                self._lanes.put_nowait(lane)
            self._lanes_made = True
        while self._waiting:
            begin, end = self._waiting[0]
            code = await or_leave(self._submit(partial(self._client.register_buffer, begin, end - begin)), _nothing)
            if code != 0:
                raise RemoteStoreError(
                    f"{self._where}: {end - begin} bytes of memory cannot be registered (error {code}); raise the "
                    "limit of locked memory (`ulimit -l`, LimitMEMLOCK= of systemd)"
                )
            self._regions.append(self._waiting.pop(0))

    async def _find_master(self) -> None:
        """Checks that the master's port accepts connections: `setup` would hold the interpreter's lock for seconds."""
        host, _, port = self._options.master.rpartition(":")
        try:
            async with asyncio.timeout(self._options.native_timeout_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.transport.abort()
        except (OSError, ValueError) as error:
            raise RemoteStoreError(
                f"{self._where}: cannot connect ({str(error) or 'no reply'}); see whether mooncake_master runs there"
            ) from error

    def _connect(self) -> None:
        options = self._options
        client = self._new_client()
        code = client.setup(
            options.hostname,
            options.metadata,
            options.segment_bytes,
            options.buffer_bytes,
            options.protocol,
            options.device,
            options.master,
            tenant_id=options.tenant,
        )
        if code != 0:
            raise RemoteStoreError(
                f"{self._where}: cannot connect (error {code}); see whether mooncake_master runs there and whether "
                "hostname, metadata, protocol and device are right"
            )
        self._client = client

    def _close_when_idle(self, running: Sequence[Future[Any]]) -> None:
        """Closes the client when no call uses it any more; leaves it open if a call does not return."""
        give_up = time.monotonic() + _CLOSE_S
        while any(not future.done() for future in running):
            if time.monotonic() > give_up:
                return
            time.sleep(0.01)
        if self._client is not None:
            self._client.close()

    # Calls.

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        if self._threads is None or self._closed:
            raise RemoteStoreError(f"{self._where}: the store was closed")
        future = self._threads.submit(call)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    async def _lane(self) -> Lane:
        await self._ready()
        return await self._lanes.get()

    def _in(self, lane: Lane, call: Callable[[], _T]) -> Future[_T]:
        """Runs a call that occupies a lane until it has ended."""
        loop = asyncio.get_running_loop()

        def free(_: Future[_T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._lanes.put_nowait, lane)

        try:
            future = self._submit(call)
        except BaseException:
            self._lanes.put_nowait(lane)
            raise
        future.add_done_callback(free)
        return future

    async def _without_memory(self, call: Callable[[Any], list[int]]) -> list[int]:
        lane = await self._lane()
        return await or_leave(self._in(lane, lambda: call(self._client)), _nothing)

    async def _direct(self, items: Sequence[Read | Write], method: str) -> list[int]:
        """Gets or puts objects in registered memory; small pieces in other memory are copied through the lane."""
        keys = [self._key(item.name) for item in items]
        pieces = [[piece for piece in _pieces(item) if len(piece)] for item in items]
        sizes = [[len(piece) for piece in of_item] for of_item in pieces]
        lane = await self._lane()
        addresses: list[list[int]] = []
        copies: list[tuple[int, int, int]] = []  # in the lane, the caller's, bytes
        room = lane.address
        for of_item in pieces:
            addresses.append([])
            for piece in of_item:
                address = address_of(piece)
                if not self._has(address, len(piece)):
                    copies.append((room, address, len(piece)))
                    address, room = room, room + len(piece)
                addresses[-1].append(address)

        def call() -> list[int]:
            puts = method == _PUT
            for there, here, nbytes in copies if puts else ():
                ctypes.memmove(there, here, nbytes)
            codes: list[int] = getattr(self._client, method)(keys, addresses, sizes)
            for there, here, nbytes in () if puts else copies:
                ctypes.memmove(here, there, nbytes)
            return codes

        codes = await until_done(self._in(lane, call))
        self.copied_bytes += sum(nbytes for _, _, nbytes in copies)
        return codes

    async def _get(self, reads: Sequence[Read], get: Callable[[Sequence[Read]], Awaitable[list[int]]]) -> list[int]:
        """The bytes of each object, or an error. The client fills memory in several pieces or fails, so objects that
        are shorter are read again."""
        codes = await get(reads)
        failed = [at for at, code in enumerate(codes) if code == _TRANSFER_FAIL]
        if not failed:
            return codes
        keys = [self._key(reads[at].name) for at in failed]
        sizes = await self._without_memory(lambda client: [client.get_size(key) for key in keys])
        shorter: dict[int, Read] = {}
        for at, size in zip(failed, sizes, strict=True):
            if size <= 0:
                codes[at] = _OBJECT_NOT_FOUND
            elif size > reads[at].nbytes:
                codes[at] = _INVALID_PARAMS
            elif size < reads[at].nbytes:
                shorter[at] = Read(reads[at].name, first_bytes(reads[at].into, size))
        if shorter:
            again = await get(list(shorter.values()))
            for at, code in zip(shorter, again, strict=True):
                codes[at] = code
        return codes

    async def _get_direct(self, reads: Sequence[Read]) -> list[int]:
        return await self._direct(reads, _GET)

    async def _get_bounced(self, reads: Sequence[Read]) -> list[int]:
        keys = [self._key(read.name) for read in reads]
        sizes = [max(1, read.nbytes) for read in reads]
        offsets = _offsets(sizes)
        lane, visit = await self._lane(), Visit()

        def call() -> list[int]:
            codes: list[int] = self._client.batch_get_into(keys, [lane.address + offset for offset in offsets], sizes)
            visit.copy(
                [
                    (address, lane.address + at, size)
                    for offset, read, code in zip(offsets, reads, codes, strict=False)
                    for at, address, size in _copies(offset, first_bytes(read.into, code))
                ]
            )
            return codes

        codes = await or_leave(self._in(lane, call), visit.leave)
        self.copied_bytes += sum(code for code in codes if code > 0)
        return codes

    async def _put_bounced(self, writes: Sequence[Write]) -> list[int]:
        keys = [self._key(write.name) for write in writes]
        sizes = [max(1, write.nbytes) for write in writes]
        offsets = _offsets(sizes)
        sources = [_copies(offset, write.pieces) for offset, write in zip(offsets, writes, strict=True)]
        lane, visit = await self._lane(), Visit()

        def call() -> list[int]:
            copies = [(lane.address + offset, address, size) for each in sources for offset, address, size in each]
            if not visit.copy(copies):
                return []
            codes: list[int] = self._client.batch_put_from(keys, [lane.address + offset for offset in offsets], sizes)
            return codes

        codes = await or_leave(self._in(lane, call), visit.leave)
        self.copied_bytes += sum(write.nbytes for write in writes)
        return codes

    # Batches and errors.

    def _jobs(
        self, items: Sequence[Read | Write], work: Callable[[list[int], bool], Awaitable[None]]
    ) -> list[Callable[[], Awaitable[None]]]:
        """The jobs of a batch's parts: objects in registered memory, and others up to the size of a lane's memory.

        No part has a name twice: the client would read the object only once and report success for both.
        """
        bounce_bytes = self._options.bounce_bytes
        parts: dict[bool, list[list[int]]] = {True: [], False: []}
        rooms = {True: 0, False: 0}
        names: dict[bool, set[bytes]] = {True: set(), False: set()}
        for index, item in enumerate(items):
            nbytes = max(1, item.nbytes)
            direct = self._is_direct(_pieces(item))
            if not direct and nbytes > bounce_bytes:
                raise RemoteStoreError(
                    f"{self._where}: an object has {nbytes} bytes in memory that is not registered; raise bounce_bytes "
                    f"({bounce_bytes}) or register the memory"
                )
            of_kind = parts[direct]
            is_full = not of_kind or nbytes > rooms[direct] or len(of_kind[-1]) == _PART_OBJECTS
            if is_full or item.name in names[direct]:
                of_kind.append([])
                names[direct] = set()
                rooms[direct] = _PART_BYTES if direct else min(_PART_BYTES, bounce_bytes)
                rooms[direct] = max(rooms[direct], nbytes)
            of_kind[-1].append(index)
            names[direct].add(item.name)
            rooms[direct] -= nbytes
        return [partial(work, part, direct) for direct, of_kind in parts.items() for part in of_kind]

    def _is_direct(self, pieces: tuple[memoryview, ...]) -> bool:
        """Whether all but small pieces, such as heads, are in registered memory. A lane has room for a part's heads."""
        small = min(_SMALL_BYTES, self._options.bounce_bytes // _PART_OBJECTS)
        registered = [self._has(address_of(piece), len(piece)) for piece in pieces if len(piece)]
        others = sum(len(piece) for piece in pieces if len(piece) and not self._has(address_of(piece), len(piece)))
        return any(registered) and others <= small

    def _has(self, address: int, nbytes: int) -> bool:
        return any(begin <= address and address + nbytes <= end for begin, end in self._regions)

    def _check_reads(self, codes: Sequence[int]) -> None:
        """Raises for failures of the store; objects that are absent or too long are no failure."""
        failed = [code for code in codes if code < 0 and code not in (*_ABSENT, _INVALID_PARAMS)]
        self._check(failed, len(failed), ())

    def _check(self, codes: Sequence[int], count: int, fine: tuple[int, ...]) -> None:
        """Raises the error of the first code that is not `fine`."""
        if len(codes) != count:
            raise RemoteStoreError(f"{self._where}: {len(codes)} replies to {count} questions; is its version 0.3.13?")
        bad = next((code for code in codes if code not in fine), None)
        if bad is None:
            return
        if bad == _NO_AVAILABLE_HANDLE:
            raise RemoteFullError(
                f"{self._where}: no room (error {bad}); give it more memory (segment_bytes on more hosts), or lower "
                "-eviction_high_watermark_ratio of mooncake_master"
            )
        if bad in _RPC_CODES:
            raise RemoteStoreError(f"{self._where}: no reply (error {bad}); see whether mooncake_master runs there")
        if bad == _TRANSFER_FAIL:
            raise RemoteStoreError(
                f"{self._where}: a transfer failed (error {bad}); see whether the host that has the object runs"
            )
        raise RemoteStoreError(f"{self._where}: error {bad}; see the log of mooncake_master")


def _load(options: MooncakeOptions) -> Callable[[], Any]:
    milliseconds, seconds = round(options.native_timeout_s * 1000), max(1, round(options.native_timeout_s))
    for name, value in (
        ("MC_RPC_TIMEOUT_MS", milliseconds),
        ("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds),
        ("MC_TCP_STATUS_TIMEOUT_SEC", seconds),
        ("MC_STORE_CLIENT_SETUP_RETRIES", 1),  # the next call tries again; 20 tries would keep the thread for a minute
    ):
        os.environ.setdefault(name, str(value))
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise RemoteStoreError(
            f"mooncake at {options.address}: its client cannot be loaded ({error}); run `pip install "
            "'prefixd[mooncake]'` and `apt-get install libibverbs1 libnl-3-200 libnl-route-3-200 librdmacm1 libnuma1 "
            "libcurl4`"
        ) from error
    client: Callable[[], Any] = MooncakeDistributedStore
    return client


def _is_exist(keys: list[str], client: Any) -> list[int]:
    codes: list[int] = client.batch_is_exist(keys)
    return codes


def _remove(keys: list[str], client: Any) -> list[int]:
    codes: list[int] = client.batch_remove(keys, True)
    return codes


def _nothing() -> None:
    """For calls that touch no memory of their caller."""


def _pieces(item: Read | Write) -> tuple[memoryview, ...]:
    return item.into if isinstance(item, Read) else item.pieces


def _offsets(sizes: Sequence[int]) -> list[int]:
    """The offsets of objects that follow each other in a lane's memory."""
    offsets = [0, *accumulate(sizes)]
    return offsets[:-1]


def _copies(offset: int, pieces: tuple[memoryview, ...]) -> list[tuple[int, int, int]]:
    """(offset, piece's address, bytes) for each piece of an object at `offset`."""
    copies: list[tuple[int, int, int]] = []
    for piece in pieces:
        if len(piece):
            copies.append((offset, address_of(piece), len(piece)))
            offset += len(piece)
    return copies
