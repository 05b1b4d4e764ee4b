"""Objects in an S3 bucket. A request takes milliseconds and costs money, so objects are stored in packs: see `packs`.

    put:    writes -> one pack of a few MiB -> one PUT; then this host's index has the entries
    others: a task lists packs that are new since its last listing, reads their heads, enters them into the index
    exists: the index alone, no request
    get:    index -> one range request for neighbours in a pack

A host knows another host's objects when its task has read the head of their pack, after `refresh_s` at the latest.
Clocks of hosts have to agree within `_SLACK_S`.

Packs are never rewritten. A pack is deleted when this host has deleted all of its objects; all other packs stay until a
lifecycle rule, which has to be configured in the bucket, expires them. An object whose ttl has passed is not found any
more, but its bytes stay until then, too.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store as Bucket

from prefixd_swap.errors import RemoteFullError, RemoteStoreError
from prefixd_swap.stores.base import ObjectStore, Read, Write, first_bytes
from prefixd_swap.stores.deadline import within
from prefixd_swap.stores.s3.pack_index import PackIndex, Place
from prefixd_swap.stores.s3.packs import PackName, build_head, earliest_name, pack_name, parse_head, parse_name
from prefixd_swap.stores.s3.s3_options import S3Options
from prefixd_swap.stores.side_by_side import side_by_side

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

_SLACK_S = 120.0  # clocks differ, and a pack has its name before it is there
_MOST_S = 1e11  # the longest ttl or history: a longer one would not fit into a pack's table
_REQUESTS = 16  # side by side
_PUTS = 4  # side by side: each copies a pack on the event loop first
_PACK_OBJECTS = 1024  # entering a pack's table into the index holds the event loop of every host
_GAP_BYTES = 64 << 10  # reading the bytes between two objects is cheaper than another request
_RANGE_BYTES = 4 << 20  # of one request, unless one object is longer: bounds the copy that holds the event loop
_REQUEST_TIMEOUT = timedelta(seconds=60)
_FULL = ("507 ", "StorageFull", "QuotaExceeded", "InsufficientStorage")  # error codes of servers other than AWS

_T = TypeVar("_T")


@dataclass(slots=True)
class _Range:
    """One request: `nbytes` from `offset`, and the objects in it."""

    offset: int
    nbytes: int
    wanted: list[tuple[int, Place]]


class S3Store(ObjectStore):
    """Objects in packs of an S3 bucket.

    Args:
        options: the bucket.
        now: seconds since 1970, by a clock that may be set.
        elapsed: seconds, by a clock that is never set.

    Raises:
        RemoteStoreError: the client refuses the options.
    """

    kind = "s3"

    def __init__(
        self,
        options: S3Options,
        now: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = options.address
        self.copied_bytes = 0
        self.skipped_packs = 0
        """Packs whose table was torn, altered or not prefixd's."""
        self._options = options
        self._where = f"s3 at {self.address}"
        self._now = now
        self._elapsed = elapsed
        self._index = PackIndex(options.most_entries)
        self._seen: dict[str, int] = {}  # packs whose heads were read or skipped: path and time of creation
        self._listed: tuple[int, float] | None = None  # when the last complete listing began, by both clocks
        self._pages = 0  # of listings, since the start
        self._refreshing: asyncio.Task[None] | None = None
        self._failure: RemoteStoreError | None = None  # of the last listing
        self._building = asyncio.Lock()
        self._closed = False
        self._bucket = self._open()

    async def exists(self, names: Sequence[bytes], deadline_s: float) -> list[bool]:
        """As `ObjectStore.exists`: makes no request, but the first call waits for the first listing."""
        async with within(deadline_s, f"exists of {len(names)} objects", self._where):
            await self._ready(deadline_s)
            now_s = self._now()
            return [self._index.find(name, now_s) is not None for name in names]

    async def get(self, reads: Sequence[Read], deadline_s: float) -> list[int | None]:
        came: list[int | None] = [None] * len(reads)

        async def fetch(path: str, wanted: _Range) -> None:
            try:
                data = await self._ask(
                    lambda: obstore.get_range_async(self._bucket, path, start=wanted.offset, length=wanted.nbytes)
                )
            except FileNotFoundError:  # a lifecycle rule, or another host
                for _, place in wanted.wanted:
                    place.pack.gone = True
                return
            with memoryview(data) as view:
                for index, place in wanted.wanted:
                    begin = place.offset - wanted.offset
                    if begin + place.nbytes <= len(view):
                        came[index] = place.nbytes
                        self._copy(view[begin : begin + place.nbytes], reads[index].into)

        async with within(deadline_s, f"get of {len(reads)} objects", self._where):
            await self._ready(deadline_s)
            now_s = self._now()
            places: dict[str, list[tuple[int, Place]]] = {}
            for index, read in enumerate(reads):
                place = self._index.find(read.name, now_s)
                if place is not None and place.nbytes <= read.nbytes:
                    if place.nbytes == 0:
                        came[index] = 0
                    else:
                        places.setdefault(place.pack.path, []).append((index, place))
            jobs = [
                lambda path=path, wanted=wanted: fetch(path, wanted)
                for path, of_pack in places.items()
                for wanted in _ranges(of_pack)
            ]
            await side_by_side(jobs, _REQUESTS)
        return came

    async def put(self, writes: Sequence[Write], ttl_s: float, deadline_s: float) -> None:
        ttl_ms = max(1, round(min(ttl_s, _MOST_S) * 1000)) if ttl_s > 0 else 0
        async with within(deadline_s, f"put of {len(writes)} objects", self._where):
            self._start()
            jobs = [lambda part=part: self._put_pack(part, ttl_ms) for part in self._parts(writes)]
            await side_by_side(jobs, _PUTS)

    async def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        """As `ObjectStore.delete`; other hosts may still find the objects."""
        async with within(deadline_s, f"delete of {len(names)} objects", self._where):
            await self._ready(deadline_s)
            empty = [pack.path for name in names if (pack := self._index.delete(name)) is not None]
            if empty:
                with suppress(FileNotFoundError):  # another host was faster
                    await self._ask(lambda: obstore.delete_async(self._bucket, empty))

    async def ping(self, deadline_s: float) -> None:
        async with within(deadline_s, "ping", self._where):
            self._start()
            # Nothing sorts behind it, so the reply is empty.
            listing = obstore.list(self._bucket, self._options.prefix, offset=f"{self._options.prefix}~")
            try:
                await self._ask(listing.collect_async)
            except FileNotFoundError as error:
                raise RemoteStoreError(f"{self._where}: no such bucket; create it") from error

    async def close(self) -> None:
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    # Putting.

    def _parts(self, writes: Sequence[Write]) -> list[list[Write]]:
        """The objects of each pack."""
        parts: list[list[Write]] = []
        room = 0
        for write in writes:
            if not parts or write.nbytes > room or len(parts[-1]) == _PACK_OBJECTS:
                parts.append([])
                room = self._options.pack_bytes
            parts[-1].append(write)
            room -= write.nbytes
        return parts

    async def _put_pack(self, writes: list[Write], ttl_ms: int) -> None:
        created_ms = round(self._now() * 1000)
        path = self._options.prefix + pack_name(created_ms, os.urandom(8), len(writes))
        async with self._building:
            await asyncio.sleep(0)  # one pack at a time, and others between two
            head = build_head(writes, created_ms, ttl_ms)
            # After a cancelled call the client may still read its buffer, so it gets a copy.
            body = b"".join([head, *(piece for write in writes for piece in write.pieces)])
        self.copied_bytes += len(body) - len(head)
        try:
            await self._ask(lambda: obstore.put_async(self._bucket, path, body, use_multipart=False))
        except FileNotFoundError as error:
            raise RemoteStoreError(f"{self._where}: no such bucket; create it") from error
        table = parse_head(head, len(body))
        if table is not None:
            self._seen[path] = created_ms
            self._index.add(path, table)

    # Finding packs of other hosts.

    def _start(self) -> None:
        """Starts the listing task with the first call."""
        if self._closed:
            raise RemoteStoreError(f"{self._where}: the store was closed")
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(self._refresh_for_ever())

    async def _ready(self, deadline_s: float) -> None:
        """Waits for the first listing; if it makes progress, only for half of the deadline."""
        give_up = asyncio.get_running_loop().time() + deadline_s / 2
        while True:
            self._start()
            if self._listed is not None:
                return
            if self._failure is not None:
                failure, self._failure = self._failure, None
                if self._refreshing is not None:
                    self._refreshing.cancel()  # the next call lists at once
                    self._refreshing = None
                raise failure
            if self._pages and asyncio.get_running_loop().time() > give_up:
                return
            await asyncio.sleep(0.005)

    async def _refresh_for_ever(self) -> None:
        while True:
            try:
                await self._refresh()
                self._failure = None
            except RemoteStoreError as error:
                self._failure = error
            await asyncio.sleep(self._options.refresh_s)

    async def _refresh(self) -> None:
        began_ms, began_s = round(self._now() * 1000), self._elapsed()
        since_ms = self._since_ms(began_ms, began_s) - round(_SLACK_S * 1000)
        prefix = self._options.prefix
        listing = obstore.list(self._bucket, prefix or None, offset=prefix + earliest_name(since_ms), chunk_size=500)
        pages = listing.__aiter__()
        ahead = False
        while not ahead:
            try:
                page = await self._ask(pages.__anext__)
            except StopAsyncIteration:
                break
            except FileNotFoundError as error:
                raise RemoteStoreError(f"{self._where}: no such bucket; create it") from error
            self._pages += 1
            heads = []
            for item in page:
                path, nbytes = str(item["path"]), int(item["size"])
                parsed = parse_name(path.removeprefix(prefix))
                if parsed is None or path in self._seen:
                    continue
                if parsed.created_ms > began_ms + _SLACK_S * 1000:  # of a wrong clock, and so are all later names
                    ahead = True
                    break
                heads.append((path, parsed, nbytes))
            jobs = [
                lambda path=path, parsed=parsed, nbytes=nbytes: self._read_head(path, parsed, nbytes)
                for path, parsed, nbytes in heads
            ]
            await side_by_side(jobs, _REQUESTS)
        self._pages += 1
        self._listed = began_ms, began_s
        forget_ms = began_ms - round(_SLACK_S * 1000)
        self._seen = {path: created_ms for path, created_ms in self._seen.items() if created_ms >= forget_ms}

    def _since_ms(self, began_ms: int, began_s: float) -> int:
        """The time from which on packs may not have been listed yet.

        If the wall clock was set since the last listing, earlier listings may have missed packs, so the listing goes
        back as far as the first one.
        """
        if self._listed is not None:
            listed_ms, listed_s = self._listed
            if abs((began_ms - listed_ms) / 1000 - (began_s - listed_s)) <= _SLACK_S:
                return listed_ms
        return began_ms - round(min(self._options.history_s, _MOST_S) * 1000)

    async def _read_head(self, path: str, name: PackName, pack_bytes: int) -> None:
        created_ms, head_bytes = name.created_ms, name.head_bytes
        if head_bytes > pack_bytes:
            self._skip(path, created_ms)
            return
        try:
            data = await self._ask(lambda: obstore.get_range_async(self._bucket, path, start=0, length=head_bytes))
        except FileNotFoundError:
            return
        with memoryview(data) as view:
            head = parse_head(view, pack_bytes)
        if head is None or head.created_ms != created_ms:
            self._skip(path, created_ms)
        elif path not in self._seen:  # else it was put here meanwhile
            self._seen[path] = created_ms
            self._index.add(path, head)

    def _skip(self, path: str, created_ms: int) -> None:
        self._seen[path] = created_ms
        self.skipped_packs += 1

    # The client.

    def _open(self) -> Bucket:
        options = self._options
        config: S3Config = {"bucket": options.bucket}
        if options.endpoint is not None:
            config["endpoint"] = options.endpoint
        if options.region is not None:
            config["region"] = options.region
        if options.access_key_id is not None and options.secret_access_key is not None:
            config["access_key_id"] = options.access_key_id
            config["secret_access_key"] = options.secret_access_key
        if options.session_token is not None:
            config["session_token"] = options.session_token
        client: ClientConfig = {"allow_http": options.allow_http, "timeout": _REQUEST_TIMEOUT}
        try:
            return Bucket(
                config=config,
                client_options=client,
                retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=10)},
            )
        except (BaseError, ValueError) as error:
            raise RemoteStoreError(
                f"{self._where}: no client can be made ({error}); correct endpoint, region or credentials"
            ) from error

    async def _ask(self, request: Callable[[], Awaitable[_T]]) -> _T:
        """Makes a request.

        Raises:
            FileNotFoundError: there is no such object or bucket.
            RemoteFullError: no room.
            RemoteStoreError: any other failure.
        """
        try:
            return await request()
        except StopAsyncIteration:
            raise
        except (NotFoundError, FileNotFoundError) as error:  # obstore raises the one or the other
            raise FileNotFoundError(str(error)) from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise RemoteStoreError(
                f"{self._where}: refused ({_short(error)}); allow the credentials s3:ListBucket on the bucket, and "
                "s3:GetObject, s3:PutObject and s3:DeleteObject on its objects"
            ) from error
        except BaseError as error:
            text = _short(error)
            if "NoSuchBucket" in str(error):
                raise FileNotFoundError(text) from error
            if any(word in text for word in _FULL):
                raise RemoteFullError(
                    f"{self._where}: no room ({text}); raise its quota, or let a lifecycle rule expire objects earlier"
                ) from error
            if "169.254." in str(error):
                raise RemoteStoreError(
                    f"{self._where}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this "
                    "host a role"
                ) from error
            raise RemoteStoreError(
                f"{self._where}: the request failed ({text}); see whether endpoint and region are right and it runs"
            ) from error
        except Exception as error:  # a panic in the client, whose class cannot be imported
            raise RemoteStoreError(
                f"{self._where}: the client failed ({type(error).__name__}: {str(error)[:300]}); correct endpoint and "
                "region, or report it to obstore"
            ) from error

    def _copy(self, source: memoryview, into: tuple[memoryview, ...]) -> None:
        at = 0
        for piece in first_bytes(into, len(source)):
            piece[:] = source[at : at + len(piece)]
            at += len(piece)
        self.copied_bytes += at


def _ranges(places: list[tuple[int, Place]]) -> list[_Range]:
    """Requests for objects of one pack: neighbours together."""
    ranges: list[_Range] = []
    for index, place in sorted(places, key=lambda item: item[1].offset):
        end = place.offset + place.nbytes
        if ranges:
            last = ranges[-1]
            last_end = last.offset + last.nbytes
            if place.offset <= last_end + _GAP_BYTES and max(end, last_end) - last.offset <= _RANGE_BYTES:
                last.nbytes = max(end, last_end) - last.offset
                last.wanted.append((index, place))
                continue
        ranges.append(_Range(place.offset, place.nbytes, [(index, place)]))
    return ranges


def _short(error: BaseError) -> str:
    """The first line; the rest is the client's internal state."""
    return str(error).partition("\n")[0][:300]
