"""A batch of hostile calls: what one client with a small world of its own does to the daemon, by one seed."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from benchmarks.checks.fuzzing.callers import UNUSED, Caller, Metadata
from benchmarks.checks.fuzzing.calls import LOST, Answer, send
from benchmarks.checks.fuzzing.messages import World, build, corrupt
from benchmarks.checks.fuzzing.statuses import Method
from benchmarks.load.world import NAMESPACES
from prefixd.base.codec_names import CODEC_NAMES
from prefixd.base.tenancy.tenants import Role
from prefixd.server.rpc.sockets.listeners import MESSAGE_BYTES
from prefixd.v1 import admin_pb2, cache_pb2, inference_pb2

BLOCK_TOKENS, PART_BYTES = 4, (96, 32)
DEADLINE_S = 60.0
"""Longer than any call takes: one that gets no answer for so long hangs."""
QUIET_S = 2.0
"""The deadline of a stream that may have nothing to tell."""

# Has the arena handed out for the sessions that it reads, without which they reserve nothing. The slots of what they
# reserve are given to others when it has ended.
_MAP = """
import socket, sys
for line in sys.stdin.buffer:
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.connect(sys.argv[1])
            door.sendall(line)
            door.recv(4096)
        except OSError:
            pass
    print(flush=True)
"""

_NAMES = 50
_CACHED_BLOCKS = 8
_SHOWN_BYTES = 300
_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 1 << 22),
    ("grpc.absolute_max_metadata_size", 1 << 22),
]
# Namespaces of the well-behaved client: their ids are no secret, their salts are.
_FOREIGN_NAMES = {spec.name for spec in NAMESPACES}
_READING = {"Match", "MatchMany", "Acquire", "Claim", "Reserve", "Persist", "Prefetch", "Retain", "Get", "Put"}

# They go through all there is: called as often as the others, they would take most of the time.
_THOROUGH = {"Verify", "CheckIntegrity", "Flush"}

_PUT_HEADER: Any = cache_pb2.PutHeader.DESCRIPTOR
_PUT_REQUEST: Any = cache_pb2.PutRequest.DESCRIPTOR

_KINDS = {
    "spoilt": 50,  # a valid message but for a field or two
    "wild": 14,
    "corrupt": 10,
    "noise": 6,
    "valid": 8,
    "cancelled": 5,
    "hurried": 2,
    "miscounted": 1,
    "headers": 2,
    "no such method": 2,
    "credentials": 3,  # nobody is let in with them
    "other tenant": 3,  # in a session that is not that tenant's
}
# What gRPC itself answers, whatever the method, to what no handler gets to see.
TRANSPORT = {
    "cancelled": frozenset({"CANCELLED"}),
    "hurried": frozenset({"DEADLINE_EXCEEDED", "CANCELLED"}),
    # A method of one request that gets none: gRPC's asyncio server says nothing, and the caller's time runs out.
    "miscounted": frozenset({"UNIMPLEMENTED", "CANCELLED", "DEADLINE_EXCEEDED"}),
    "headers": frozenset({"RESOURCE_EXHAUSTED"}),
    "no such method": frozenset({"UNIMPLEMENTED"}),
    "credentials": frozenset({"UNAUTHENTICATED", "RESOURCE_EXHAUSTED"}),
}
_TOO_MANY_CALLS = "calls are under way"


@dataclass(slots=True)
class Findings:
    """What became of the calls."""

    seed: int
    by_status: Counter[str] = field(default_factory=Counter)
    by_method: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    """Calls that got at what another session has."""
    foreign: set[bytes] = field(default_factory=set)
    """Ids of namespaces of the well-behaved client."""

    @property
    def calls(self) -> int:
        return self.by_status.total()


class Batch:
    """The calls of batch `number`; `async with` it, which makes its world and takes it down again.

    `also`: statuses that every method may answer with now.
    """

    def __init__(
        self,
        caller: Caller,
        number: int,
        methods: Sequence[Method],
        findings: Findings,
        also: frozenset[str] = frozenset(),
    ) -> None:
        self._rng = random.Random(f"{findings.seed} {number}")
        self._number = number
        self._methods = methods
        self._also = also
        self._findings = findings
        self._caller = caller
        self._channel = grpc.aio.insecure_channel(caller.address, options=_CHANNEL)
        self._mapper = None
        if caller.address.startswith("unix:"):
            door = f"{caller.address.removeprefix('unix:')}-memory"
            self._mapper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MAP, door],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._world = World()
        self._streams: list[Any] = []
        self._owners: dict[str, str] = {}
        self._sessions: set[str] = set()
        self._pinned: list[str] = []

    async def __aenter__(self) -> Batch:
        try:
            await self._make_world()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for key in self._pinned:  # else a tier would be full of what nobody may evict
                await self._ask("Admin/Unpin", admin_pb2.UnpinRequest(key=key))
            for stream in self._streams:
                stream.cancel()
        finally:
            await self._close()

    async def _close(self) -> None:
        if self._mapper is not None:
            self._mapper.communicate()
        await self._channel.close()

    async def call(self, index: int, only: Sequence[Method] | None = None) -> None:
        rng = random.Random(f"{self._findings.seed} {self._number} {index}")
        methods = only or self._methods
        (method,) = rng.choices(methods, [0.2 if method.name in _THOROUGH else 1.0 for method in methods])
        (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
        self._world.learn("token_ids", self._tokens(rng), right=True)
        self._world.learn("ids", rng.randbytes(4 * rng.choice((1, 5, 40))), right=True)
        raws = self._messages(method, kind, rng)
        if method.name == "Drain":  # a daemon that ends has no more answers
            raws = [raw for raw in raws if not _shuts_down(raw)] or [b""]
        path, patience_s = method.path, None
        timeout_s = QUIET_S if method.may_be_quiet else DEADLINE_S
        metadata: Metadata = self._caller.shows
        stop_after = 1 if method.endless else 4 if method.name == "Generate" else None
        match kind:
            case "cancelled":
                patience_s = rng.choice((0.0, 0.0, 0.001, 0.003, 0.02))
            case "hurried":
                timeout_s = rng.choice((0.0005, 0.002, 0.01))
            case "miscounted":
                raws = rng.choice((raws[:0], raws * 2)) if not method.streams_requests else raws * 3
                timeout_s = 0.3
            case "headers":
                metadata += _headers(rng)
            case "credentials":
                metadata = self._caller.wrong_credentials(rng)
            case "other tenant":
                metadata = self._caller.other or metadata
            case "no such method":
                path = rng.choice((f"{path}x", f"/{method.service}/", "/nobody.Knows/This", f"{path}/{method.name}"))
        stream, answer = await send(
            self._channel, path, raws, stop_after, patience_s, timeout=timeout_s, metadata=metadata
        )
        if answer.status == "OK" and method.name == "OpenSession":
            self._keep(stream, answer)
        else:
            stream.cancel()
        self._count(method, kind, index, raws, answer)
        if answer.status == "OK" and raws and kind not in TRANSPORT:
            self._learn(method, kind, raws, answer, index)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _messages(self, method: Method, kind: str, rng: random.Random) -> list[bytes]:
        if kind == "noise":
            return [rng.randbytes(rng.choice((0, 1, 2, 7, 40, 400, 5000))) for _ in range(rng.choice((1, 1, 3)))][
                : None if method.streams_requests else 1
            ]
        wildness = {"wild": 0.6, "valid": 0.0, "corrupt": 0.05}.get(kind, 0.15)
        if method.name == "Put":
            made = self._put(rng, wildness)
        elif method.streams_requests:
            made = [build(method.request, rng, self._world, wildness) for _ in range(rng.choice((0, 1, 2, 5)))]
        else:
            made = [build(method.request, rng, self._world, wildness)]
        if method.name == "Generate" and not wildness:
            made[0].sampling.max_tokens = 2
        raws = [message.SerializeToString() for message in made]
        return [corrupt(raw, rng) for raw in raws] if kind == "corrupt" else raws

    def _put(self, rng: random.Random, wildness: float) -> list[Any]:
        header = cache_pb2.PutRequest(header=build(_PUT_HEADER, rng, self._world, wildness))
        blocks = len(header.header.token_ids) // 4 // BLOCK_TOKENS
        data = rng.randbytes(sum(PART_BYTES) * min(blocks, 4096))
        if rng.random() < wildness:
            data = rng.choice((b"", data[:-1], data + b"x", data * 3))
        step = rng.choice((len(data) or 1, 100, 1000)) if len(data) < 10_000 else 100_000
        pieces = [cache_pb2.PutRequest(data=data[at : at + step]) for at in range(0, len(data), step)]
        stream = [header, *pieces]
        if rng.random() < wildness:
            stream.insert(rng.randrange(len(stream) + 1), build(_PUT_REQUEST, rng, self._world, wildness))
        return stream[rng.random() < wildness / 2 :]

    def _tokens(self, rng: random.Random) -> bytes:
        """The cached prefix, and a few blocks that nobody has seen."""
        return self._cached + rng.randbytes(4 * BLOCK_TOKENS * rng.choice((0, 0, 1, 2, 5)))

    # -- the world --------------------------------------------------------------------------------------------------

    async def _make_world(self) -> None:
        """Two sessions with a lease, a reservation and a prefix each, and what is over."""
        rng, world = self._rng, self._world
        self._cached = rng.randbytes(4 * BLOCK_TOKENS * _CACHED_BLOCKS)
        spec = cache_pb2.Namespace(
            name=f"hostile-{self._number % _NAMES}",
            salt=b"own",
            block_tokens=BLOCK_TOKENS,
            parts=[cache_pb2.Part(group=f"g{rank}", nbytes=nbytes) for rank, nbytes in enumerate(PART_BYTES)],
        )
        for codec in CODEC_NAMES:
            world.learn("codec", codec)
        world.learn("dtype", "bfloat16")
        ended = await self._open_session()
        for who in ("other", "own"):
            session = await self._open_session()
            world.learn("session_id", session, right=True)
            spec.salt = who.encode()
            registered = await self._ask(
                "PrefixCache/RegisterNamespace",
                cache_pb2.RegisterNamespaceRequest(namespace=spec, session_id=session),
                cache_pb2.RegisterNamespaceResponse,
            )
            if registered is None:
                continue
            world.learn("namespace_id", registered.namespace_id, right=True)
            named = {"session_id": session, "namespace_id": registered.namespace_id}
            for tokens in (self._cached, self._cached + rng.randbytes(4 * BLOCK_TOKENS * 3)):
                await self._reserve_and_commit(named, tokens, commit=tokens is self._cached)
            for _ in range(2):
                lease = await self._ask(
                    "PrefixCache/Acquire",
                    cache_pb2.AcquireRequest(**named, token_ids=self._cached),
                    cache_pb2.AcquireResponse,
                )
                if lease is not None and lease.lease_id:
                    self._grant(lease.lease_id, session)
            listed = await self._ask(
                "Admin/ListPrefixes",
                admin_pb2.ListPrefixesRequest(namespace_id=registered.namespace_id, limit=2),
                admin_pb2.ListPrefixesResponse,
            )
            for prefix in listed.prefixes if listed is not None else ():
                world.learn("key", prefix.key, right=True)
                world.learn("key", prefix.key[:5])
        released = world.known.get("lease_id", [""])[0]
        await self._ask("PrefixCache/Release", cache_pb2.ReleaseRequest(session_id=session, lease_id=released))
        if ended:
            self._streams.pop(0).cancel()
            world.learn("session_id", ended)
        stats = await self._ask("Admin/Stats", admin_pb2.StatsRequest(), admin_pb2.StatsResponse)
        for each in stats.namespaces if stats is not None else ():
            if each.namespace.name in _FOREIGN_NAMES:
                self._findings.foreign.add(each.namespace_id)
        for identity in (*sorted(self._findings.foreign), b"", rng.randbytes(8)):
            world.learn("namespace_id", identity)
        spec.salt = b"own"
        world.known |= {
            "namespace": [spec],
            "blocks": [1],
            "lease_ids": [world.known.get("lease_id", [])[1:2]],
            "request_id": ["", f"hostile-{self._number}", "x" * 300],
            "sampling": [
                inference_pb2.SamplingParams(max_tokens=2),
                inference_pb2.SamplingParams(max_tokens=2, temperature=1, top_k=9, stop=["e"], logprobs=2),
            ],
            "n": [0, 2],
            "text": ["Once upon a time"],
            "service": ["", "prefixd.v1.Admin"],
            "list_services": [""],
            "name": [UNUSED],
            "unlimited": [["sessions", "cpu_most", "requests_per_s"]],
            "retention": [cache_pb2.Retention(end_token=8, priority=3, ttl_s=1)],
            "file_by_filename": ["prefixd/v1/cache.proto"],
            "file_containing_symbol": ["prefixd.v1.PrefixCache", "prefixd.v1.Tier"],
        }

    async def _reserve_and_commit(self, named: dict[str, Any], tokens: bytes, *, commit: bool) -> None:
        reserved = await self._ask(
            "PrefixCache/Reserve", cache_pb2.ReserveRequest(**named, token_ids=tokens), cache_pb2.ReserveResponse
        )
        if reserved is None or not reserved.reservation_id:
            return
        session = named["session_id"]
        if commit:
            await self._ask(
                "PrefixCache/Commit",
                cache_pb2.CommitRequest(
                    session_id=session, reservation_id=reserved.reservation_id, blocks=reserved.blocks
                ),
            )
        else:
            self._grant(reserved.reservation_id, session)

    def _grant(self, identity: str, session: str) -> None:
        self._owners[identity] = session
        for name in ("lease_id", "reservation_id"):
            self._world.learn(name, identity, right=True)

    async def _open_session(self) -> str:
        request = cache_pb2.OpenSessionRequest(client_name="hostile")
        stream, answer = await send(
            self._channel,
            "/prefixd.v1.PrefixCache/OpenSession",
            [request.SerializeToString()],
            1,
            DEADLINE_S,
            metadata=self._caller.shows,
        )
        if answer.status != "OK":
            return ""
        session = self._keep(stream, answer)
        if self._mapper is not None and self._mapper.stdin is not None and self._mapper.stdout is not None:
            print(session, file=self._mapper.stdin, flush=True)
            self._mapper.stdout.readline()
        return session

    def _keep(self, stream: Any, answer: Answer) -> str:
        """A session that was opened lives until the batch ends, or until there are too many."""
        self._streams.append(stream)
        if len(self._streams) > 8:
            self._streams.pop(3).cancel()
        session = cache_pb2.SessionEvent.FromString(answer.messages[0]).opened.session_id
        self._world.learn("session_id", session)
        self._sessions.add(session)
        return session

    async def _ask(self, path: str, request: Any, kind: Any = None) -> Any:
        """A well-formed call, to make the world; None when it is refused. Admin's are an operator's."""
        metadata = self._caller.operator if path.startswith("Admin/") else self._caller.shows
        _, answer = await send(
            self._channel,
            f"/prefixd.v1.{path}",
            [request.SerializeToString()],
            timeout=DEADLINE_S,
            metadata=metadata,
        )
        return kind.FromString(answer.messages[0]) if kind is not None and answer.status == "OK" else None

    # -- what came of it --------------------------------------------------------------------------------------------

    def _count(self, method: Method, kind: str, index: int, raws: list[bytes], answer: Answer) -> None:
        findings = self._findings
        findings.by_status[answer.status] += 1
        findings.by_method[f"{method.service.rpartition('.')[2]}.{method.name}"] += 1
        findings.by_kind[kind] += 1
        allowed = self._statuses(method, kind) | {LOST}
        if max(map(len, raws), default=0) > MESSAGE_BYTES:
            allowed |= {"RESOURCE_EXHAUSTED"}
        if answer.status == "RESOURCE_EXHAUSTED" and _TOO_MANY_CALLS in answer.details:  # a tenant's quota
            return
        if answer.status not in allowed:
            findings.unexpected.append(
                f"{answer.status} ({answer.details}) from {self._what(method, kind, index, raws)}"
            )

    def _statuses(self, method: Method, kind: str) -> frozenset[str]:
        ours, transport = self._caller, TRANSPORT.get(kind, frozenset())
        role = Role.CLIENT if kind == "other tenant" and ours.other is not None else ours.role
        if kind == "no such method":
            return transport if role is Role.ADMIN else transport | {"PERMISSION_DENIED"}
        if kind == "credentials":
            return transport | method.statuses if method.open_to(Role.METRICS) else transport
        return transport | (method.statuses | self._also if method.open_to(role) else {"PERMISSION_DENIED"})

    def _learn(self, method: Method, kind: str, raws: list[bytes], answer: Answer, index: int) -> None:
        """New leases and reservations; what must be undone; what should have been refused."""
        try:
            request = _parse(method, raws[0])
        except DecodeError:
            self._findings.unexpected.append(
                f"OK to what cannot be read, from {self._what(method, 'any', index, raws)}"
            )
            return
        request = request.header if method.name == "Put" else request
        session = getattr(request, "session_id", "")
        if kind == "other tenant" and self._caller.other is not None:
            if session in self._sessions:
                self._findings.breaches.append(self._what(method, "foreign session", index, raws))
            return
        if method.name in _READING and request.namespace_id in self._findings.foreign:
            self._findings.breaches.append(self._what(method, "foreign namespace", index, raws))
        if method.name in ("Commit", "Release", "Renew"):
            names = {"Commit": "reservation_id", "Release": "lease_id", "Renew": "lease_ids"}
            named = getattr(request, names[method.name])
            named = [named] if isinstance(named, str) else named
            if any(self._owners.get(identity, session) != session for identity in named):
                self._findings.breaches.append(self._what(method, "foreign grant", index, raws))
        if method.name == "RegisterNamespace":
            identity = cache_pb2.RegisterNamespaceResponse.FromString(answer.messages[0]).namespace_id
            self._world.learn("namespace_id", identity)
        elif method.name == "Acquire":
            granted = cache_pb2.AcquireResponse.FromString(answer.messages[0]).lease_id
            if granted:
                self._grant(granted, session)
        elif method.name == "Reserve":
            granted = cache_pb2.ReserveResponse.FromString(answer.messages[0]).reservation_id
            if granted:
                self._grant(granted, session)
        elif method.name == "Claim":
            granted = cache_pb2.ClaimResponse.FromString(answer.messages[0]).claim_id
            if granted:
                self._grant(granted, session)
        elif method.name == "Pin":
            self._pinned.append(request.key)

    def _what(self, method: Method, kind: str, index: int, raws: list[bytes]) -> str:
        shown = ", ".join(raw[:_SHOWN_BYTES].hex() + ("..." if len(raw) > _SHOWN_BYTES else "") for raw in raws[:3])
        repeat = f"--seed {self._findings.seed} --batch {self._number}"
        return f"{method.path}, {kind}, call {index} of `{repeat}`, sent [{shown}]"


def _parse(method: Method, raw: bytes) -> Any:
    return GetMessageClass(method.request).FromString(raw)


def _shuts_down(raw: bytes) -> bool:
    try:
        return admin_pb2.DrainRequest.FromString(raw).shutdown
    except DecodeError:
        return False


def _headers(rng: random.Random) -> tuple[tuple[str, str | bytes], ...]:
    """Names, numbers and sizes of headers that nobody sends."""
    match rng.randrange(5):
        case 0:
            return (("x-long", "a" * rng.choice((9_000, 20_000, 200_000))),)
        case 1:
            return tuple((f"x-{number}", "value") for number in range(rng.choice((50, 500, 2000))))
        case 2:
            return (("x-raw-bin", rng.randbytes(rng.choice((0, 100, 6000)))),)
        case 3:
            return tuple((f"x-{number}-bin", rng.randbytes(9)) for number in range(20))
        case _:
            return (("grpc-previous-rpc-attempts", "99999999999"), ("te", "trailers"), ("x-empty", ""))
