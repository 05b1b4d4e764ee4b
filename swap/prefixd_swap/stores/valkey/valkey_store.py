"""Objects in a Valkey or Redis server, or in a cluster of them.

An object is one value; its key is the prefix and the object's name. A batch is split into parts of a few MiB, which go
over several connections side by side, each as one pipeline. No client library is needed: see `resp`.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from prefixd_swap.errors import RemoteFullError, RemoteStoreError
from prefixd_swap.stores.base import ObjectStore, Read, Write
from prefixd_swap.stores.deadline import within
from prefixd_swap.stores.side_by_side import side_by_side
from prefixd_swap.stores.valkey.resp import ErrorReply, Expect, Expected, Part, Reply, Wire
from prefixd_swap.stores.valkey.valkey_slots import SLOTS, Endpoint, parse_nodes, slot_of

_PART_BYTES = 4 << 20  # of one pipeline
_PART_OBJECTS = 512
_PART_NAMES = 8192
_MOST_TTL_S = 100 * 365 * 86400.0  # a longer one would exceed a server's last date
_MOVED_TRIES = 3  # a cluster's slots move one after the other, so a slot may have moved again

# One round trip and one reply for all names: n times EXISTS needs n replies, each parsed on the event loop.
_EXISTS = b"""local out = {}
for i, key in ipairs(KEYS) do out[i] = redis.call('EXISTS', key) end
return table.concat(out)"""
_EXISTS_SHA = hashlib.sha1(_EXISTS).hexdigest().encode()

_REMEDIES = {
    "NOAUTH": "set the username and password",
    "WRONGPASS": "correct the username or password",
    "NOPERM": "give the user +get +set +exists +unlink +ping, +eval +evalsha (faster), and its keys (~prefixd:*)",
    "LOADING": "wait until the server has loaded its data",
    "CLUSTERDOWN": "see `valkey-cli cluster info`: some slots have no node",
    "READONLY": "point to the primary, not to a replica",
    "MASTERDOWN": "see whether the primary runs",
    "MOVED": "this is a node of a cluster: set cluster",
}


@dataclass(frozen=True, slots=True)
class ValkeyOptions:
    """The address of a Valkey server or cluster, and how to connect to it.

    Args:
        host: name or address; in a cluster, any node's.
        port: TCP port.
        unix_socket: path of a socket to use instead of host and port.
        username: ACL user; None for the default user.
        password: its password; None: no AUTH is sent.
        db: number of the database; 0 in a cluster.
        tls: whether connections are encrypted. The server's certificate is verified.
        ca_file: certificates (PEM) to trust; None for the system's.
        cert_file: the client's certificate (PEM), if the server requires one.
        key_file: its private key (PEM).
        cluster: whether the server is a node of a cluster.
        connections: the most connections to each node.
        prefix: the beginning of every key.

    Raises:
        ValueError: the options contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = 6379
    unix_socket: str | None = None
    username: str | None = None
    password: str | None = None
    db: int = 0
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    cluster: bool = False
    connections: int = 4
    prefix: bytes = b"prefixd:"

    def __post_init__(self) -> None:
        if self.connections < 1:
            raise ValueError(f"connections is {self.connections}; set 1 or more")
        if self.cluster and (self.db or self.unix_socket is not None):
            raise ValueError(
                "a cluster has neither databases nor a socket file; set db = 0 and no socket, or cluster = false"
            )
        if self.username is not None and self.password is None:
            raise ValueError(f"username is {self.username!r} but there is no password; set it")

    def __repr__(self) -> str:
        """Without the password."""
        return f"ValkeyOptions(address={self.address!r}, username={self.username!r}, cluster={self.cluster})"

    @property
    def address(self) -> str:
        """For messages: "host:port", or "unix:/path"."""
        return f"{self.host}:{self.port}" if self.unix_socket is None else f"unix:{self.unix_socket}"


class _Node:
    """A server and the connections to it."""

    def __init__(self, options: ValkeyOptions, endpoint: Endpoint) -> None:
        self._options = options
        self._endpoint = endpoint
        self.where = f"valkey at {options.address if options.unix_socket is not None else endpoint}"
        self._free = asyncio.Semaphore(options.connections)
        self._idle: list[Wire] = []
        self._used: set[Wire] = set()
        self._copied_bytes = 0
        self._context: ssl.SSLContext | None = None  # made once: reading the system's certificates takes 20 ms
        self.closed = False

    @property
    def copied_bytes(self) -> int:
        return self._copied_bytes + sum(wire.copied_bytes for wire in (*self._idle, *self._used))

    async def exchange(self, parts: Sequence[Part], expected: Sequence[Expected]) -> list[Reply]:
        """As `Wire.exchange`, over an idle connection or a new one."""
        async with self._free:
            wire = await self._wire()
            try:
                return await wire.exchange(parts, expected)
            finally:
                self._used.discard(wire)
                if wire.closed or self.closed:
                    wire.abort("closed")
                    self._copied_bytes += wire.copied_bytes
                else:
                    self._idle.append(wire)

    def close(self) -> None:
        self.closed = True
        for wire in (*self._idle, *self._used):
            wire.abort("the store was closed")
        self._copied_bytes += sum(wire.copied_bytes for wire in self._idle)
        self._idle.clear()

    async def _wire(self) -> Wire:
        while self._idle:
            wire = self._idle.pop()
            if not wire.closed:
                self._used.add(wire)
                return wire
            self._copied_bytes += wire.copied_bytes
        if self.closed:
            raise RemoteStoreError(f"{self.where}: the store was closed")
        wire = Wire(self.where)
        self._used.add(wire)
        try:
            await self._connect(wire)
        except BaseException:
            self._used.discard(wire)
            wire.abort("connecting was given up")
            raise
        return wire

    async def _connect(self, wire: Wire) -> None:
        options, loop = self._options, asyncio.get_running_loop()
        try:
            if options.tls and self._context is None:
                self._context = _tls_context(options)
            context = self._context
            if options.unix_socket is not None:
                await loop.create_unix_connection(
                    lambda: wire, options.unix_socket, ssl=context, server_hostname=options.host if context else None
                )
            else:
                await loop.create_connection(lambda: wire, self._endpoint.host, self._endpoint.port, ssl=context)
        except (OSError, ValueError) as error:  # ValueError: a host name that cannot be encoded, a broken PEM file
            self._context = None  # the files may be replaced
            raise RemoteStoreError(
                f"{self.where}: cannot connect ({error}); see whether it runs and whether "
                f"host, port and TLS settings are right"
            ) from error
        greeting: list[Sequence[bytes]] = []
        if options.password is not None:
            user = () if options.username is None else (options.username.encode(),)
            greeting.append((b"AUTH", *user, options.password.encode()))
        if options.db:
            greeting.append((b"SELECT", b"%d" % options.db))
        if greeting:
            for reply in await wire.exchange([command(*words) for words in greeting], [Expect.LINE] * len(greeting)):
                raise_error(reply, self.where)


class ValkeyStore(ObjectStore):
    """Objects in a Valkey or Redis server or cluster. Needs Valkey, or Redis from 4.0 on."""

    kind = "valkey"

    def __init__(self, options: ValkeyOptions) -> None:
        self.address = options.address
        self._options = options
        self._where = f"valkey at {self.address}"
        self._seed = Endpoint(options.host, options.port)
        self._nodes: dict[Endpoint, _Node] = {}
        self._slots: list[Endpoint | None] | None = None  # a cluster's nodes by slot; None: to be asked
        self._scripts = not options.cluster
        self._silent: set[Endpoint] = set()  # nodes that did not answer the last CLUSTER NODES: asked after the others
        self._closed = False

    @property
    def copied_bytes(self) -> int:  # type: ignore[override]
        """As `ObjectStore`: bytes that sockets did not take at once, and bytes that arrived with the line before."""
        return sum(node.copied_bytes for node in self._nodes.values())

    async def exists(self, names: Sequence[bytes], deadline_s: float) -> list[bool]:
        """As `ObjectStore.exists`, in one round trip; in a cluster one for each node."""
        there = [False] * len(names)

        async def ask(node: _Node, part: list[int]) -> list[int]:
            replies = await self._exists(node, [self._key(names[index]) for index in part])
            for index, reply in zip(part, replies, strict=True):
                there[index] = reply is True
            return _moved(part, replies)

        async with within(deadline_s, f"exists of {len(names)} objects", self._where):
            await self._spread([self._key(name) for name in names], _parts_of_names, ask)
        return there

    async def get(self, reads: Sequence[Read], deadline_s: float) -> list[int | None]:
        came: list[int | None] = [None] * len(reads)

        async def fetch(node: _Node, part: list[int]) -> list[int]:
            request = b"".join(command(b"GET", self._key(reads[index].name)) for index in part)
            replies = await node.exchange([request], [reads[index].into for index in part])
            for index, reply in zip(part, replies, strict=True):
                if not _is(reply, "MOVED", "ASK", "TRYAGAIN", "WRONGTYPE"):
                    raise_error(reply, node.where)
                came[index] = reply if isinstance(reply, int) else None
            return _moved(part, replies)

        def parts(indices: Iterable[int]) -> list[list[int]]:
            return _parts_of_bytes(indices, lambda index: reads[index].nbytes)

        async with within(deadline_s, f"get of {len(reads)} objects", self._where):
            await self._spread([self._key(read.name) for read in reads], parts, fetch)
        return came

    async def put(self, writes: Sequence[Write], ttl_s: float, deadline_s: float) -> None:
        expiry = (b"PX", b"%d" % max(1, round(min(ttl_s, _MOST_TTL_S) * 1000))) if ttl_s > 0 else ()
        words = 3 + len(expiry)
        tail = b"\r\n" + b"".join(_bulk(word) for word in expiry)

        async def store(node: _Node, part: list[int]) -> list[int]:
            request: list[Part] = []
            for index in part:
                write = writes[index]
                head = b"*%d\r\n$3\r\nSET\r\n" % words + _bulk(self._key(write.name))
                request += (head + b"$%d\r\n" % write.nbytes, *write.pieces, tail)
            replies = await node.exchange(request, [Expect.LINE] * len(part))
            for reply in replies:
                if not _is(reply, "MOVED"):
                    raise_error(reply, node.where)
                    if reply != b"OK":
                        raise RemoteStoreError(
                            f"{node.where}: replied {reply!r} to SET; see whether it is a Valkey server"
                        )
            return _moved(part, replies)

        def parts(indices: Iterable[int]) -> list[list[int]]:
            return _parts_of_bytes(indices, lambda index: writes[index].nbytes)

        async with within(deadline_s, f"put of {len(writes)} objects", self._where):
            await self._spread([self._key(write.name) for write in writes], parts, store)

    async def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        async def unlink(node: _Node, part: list[int]) -> list[int]:
            request = b"".join(command(b"UNLINK", self._key(names[index])) for index in part)
            replies = await node.exchange([request], [Expect.LINE] * len(part))
            for reply in replies:
                if not _is(reply, "MOVED"):
                    raise_error(reply, node.where)
            return _moved(part, replies)

        async with within(deadline_s, f"delete of {len(names)} objects", self._where):
            await self._spread([self._key(name) for name in names], _parts_of_names, unlink)

    async def ping(self, deadline_s: float) -> None:
        async with within(deadline_s, "ping", self._where):
            node = self._node(self._seed)
            for reply in await node.exchange([command(b"PING")], [Expect.LINE]):
                raise_error(reply, node.where)

    async def close(self) -> None:
        self._closed = True
        for node in self._nodes.values():
            node.close()

    def _key(self, name: bytes) -> bytes:
        return self._options.prefix + name

    def _node(self, endpoint: Endpoint) -> _Node:
        if self._closed:
            raise RemoteStoreError(f"{self._where}: the store was closed")
        node = self._nodes.get(endpoint)
        if node is None:
            node = self._nodes[endpoint] = _Node(self._options, endpoint)
        return node

    async def _exists(self, node: _Node, keys: list[bytes]) -> list[bool | ErrorReply]:
        """True, False, or the error reply of a cluster's node, for each key."""
        if self._scripts:
            there = bytearray(len(keys))
            count = b"%d" % len(keys)
            (reply,) = await node.exchange([command(b"EVALSHA", _EXISTS_SHA, count, *keys)], [(memoryview(there),)])
            if _is(reply, "NOSCRIPT"):
                (reply,) = await node.exchange([command(b"EVAL", _EXISTS, count, *keys)], [(memoryview(there),)])
            if reply == len(keys):
                return [digit == ord("1") for digit in there]
            # Not allowed, or a proxy that knows no scripts: never tried again.
            if not (_is(reply, "NOPERM") or (isinstance(reply, ErrorReply) and "unknown command" in reply.text)):
                raise_error(reply, node.where)
                raise RemoteStoreError(f"{node.where}: nonsense in reply to EVAL; see whether it is a Valkey server")
            self._scripts = False
        request = b"".join(command(b"EXISTS", key) for key in keys)
        replies = await node.exchange([request], [Expect.LINE] * len(keys))
        for reply in replies:
            if not _is(reply, "MOVED", "ASK", "TRYAGAIN"):
                raise_error(reply, node.where)
        return [reply if isinstance(reply, ErrorReply) else reply == 1 for reply in replies]

    async def _spread(
        self,
        keys: Sequence[bytes],
        parts_of: Callable[[Iterable[int]], list[list[int]]],
        work: Callable[[_Node, list[int]], Awaitable[list[int]]],
    ) -> None:
        """Calls `work` for each node's parts of `keys`; `work` returns the indices of moved slots."""
        left: list[int] = list(range(len(keys)))
        for _ in range(_MOVED_TRIES):
            if not left:
                return
            shares = await self._shares(keys, left)
            parts = [(self._node(endpoint), part) for endpoint, share in shares.items() for part in parts_of(share)]
            jobs = [lambda node=node, part=part: work(node, part) for node, part in parts]
            most = self._options.connections * len(shares)
            try:
                left = [index for moved in await side_by_side(jobs, most) for index in moved]
            except BaseException:  # a deadline, too: a node that does not answer may have been replaced
                self._slots = None
                raise
            if left and not self._options.cluster:
                raise RemoteStoreError(f"{self._where}: refused (MOVED); {_REMEDIES['MOVED']}")
            if left:
                self._slots = None
        if left:
            raise RemoteStoreError(f"{self._where}: slots moved {_MOVED_TRIES} times while they were used; try again")

    async def _shares(self, keys: Sequence[bytes], indices: list[int]) -> dict[Endpoint, list[int]]:
        """The indices of the keys of each node."""
        if not self._options.cluster:
            return {self._seed: indices}
        slots = self._slots or await self._ask_slots()
        shares: dict[Endpoint, list[int]] = {}
        for index in indices:
            endpoint = slots[slot_of(keys[index])]
            if endpoint is None:
                self._slots = None
                raise RemoteStoreError(
                    f"{self._where}: slot {slot_of(keys[index])} of {SLOTS} has no node; {_REMEDIES['CLUSTERDOWN']}"
                )
            shares.setdefault(endpoint, []).append(index)
        return shares

    async def _ask_slots(self) -> list[Endpoint | None]:
        """Asks the configured node, or another known one, for the map of slots."""
        failure: RemoteStoreError | None = None
        known = dict.fromkeys((self._seed, *self._nodes))
        for endpoint in sorted(known, key=lambda endpoint: endpoint in self._silent):
            node = self._node(endpoint)
            self._silent.add(endpoint)  # until it has replied: the deadline may cancel this call while it waits
            try:
                (reply,) = await node.exchange([command(b"CLUSTER", b"NODES")], [Expect.TEXT])
            except RemoteStoreError as error:
                failure = failure or error
                continue
            self._silent.discard(endpoint)
            raise_error(reply, node.where)
            slots = parse_nodes(reply if isinstance(reply, bytes) else b"", endpoint)
            self._slots = slots
            self._silent &= set(known)
            for gone in self._nodes.keys() - {endpoint for endpoint in slots if endpoint is not None} - {self._seed}:
                self._nodes.pop(gone).close()
            return slots
        raise failure or RemoteStoreError(f"{self._where}: no node to ask for the map of slots")


def command(*words: bytes) -> bytes:
    """A command as RESP2: `command(b"GET", b"a")` is b"*2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\na\\r\\n"."""
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))


def raise_error(reply: Reply, where: str) -> None:
    """Raises the error of an error reply.

    Raises:
        RemoteFullError: no room in memory, or on the server's disk.
        RemoteStoreError: anything else.
    """
    if not isinstance(reply, ErrorReply):
        return
    if reply.code in ("OOM", "MISCONF"):
        raise RemoteFullError(
            f"{where}: no room ({reply.text}); raise maxmemory, set maxmemory-policy allkeys-lru, or free its disk"
        )
    remedy = _REMEDIES.get(reply.code, "see the server's log")
    if "cluster support disabled" in reply.text:
        remedy = "set cluster = false: it is a server on its own"
    raise RemoteStoreError(f"{where}: refused ({reply.text}); {remedy}")


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _is(reply: object, *codes: str) -> bool:
    return isinstance(reply, ErrorReply) and reply.code in codes


def _moved(part: list[int], replies: Sequence[object]) -> list[int]:
    return [index for index, reply in zip(part, replies, strict=True) if _is(reply, "MOVED")]


def _parts_of_names(indices: Iterable[int]) -> list[list[int]]:
    indices = list(indices)
    return [indices[at : at + _PART_NAMES] for at in range(0, len(indices), _PART_NAMES)]


def _parts_of_bytes(indices: Iterable[int], nbytes: Callable[[int], int]) -> list[list[int]]:
    """Parts of at most `_PART_BYTES`; a longer object is a part by itself."""
    parts: list[list[int]] = []
    room = 0
    for index in indices:
        size = nbytes(index)
        if not parts or size > room or len(parts[-1]) == _PART_OBJECTS:
            parts.append([])
            room = _PART_BYTES
        parts[-1].append(index)
        room -= size
    return parts


def _tls_context(options: ValkeyOptions) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.ca_file)
    if options.cert_file is not None:
        context.load_cert_chain(options.cert_file, options.key_file, password="")  # else OpenSSL would prompt for it
    return context
