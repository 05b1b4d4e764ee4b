"""Every wrong call gets its status and a message that names value and remedy, and costs the daemon nothing."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import grpc
import numpy as np
import pytest

from prefixd.server.rpc.status import _shorten_message
from prefixd.v1 import admin_pb2, inference_pb2
from prefixd.v1 import cache_pb2 as pb
from tests.daemons import Remote

PART_BYTES = (100, 28)
BLOCK_BYTES = sum(PART_BYTES)
NOWHERE = b"\1\2\3\4\5\6\7\x08"


def ids(*tokens: int) -> bytes:
    return np.asarray(tokens, "<u4").tobytes()


@pytest.fixture(scope="module")
def sidecar(launch: Callable[..., Remote]) -> Remote:
    """No model, no disk."""
    return launch({"cpu.bytes": "4MiB", "disk.bytes": 0, "server.max_lease_ttl_s": 90})


@contextmanager
def session_of(remote: Remote) -> Iterator[pb.SessionOpened]:
    """A session that is gone from the figures when it is left."""
    before = len(remote.stats().sessions)
    with remote.session() as opened:
        yield opened
    remote.until(lambda stats: len(stats.sessions) == before)


@pytest.fixture
def session(sidecar: Remote) -> Iterator[str]:
    with session_of(sidecar) as opened:
        yield opened.session_id
    sidecar.settled()


@pytest.fixture
def namespace(sidecar: Remote, session: str) -> bytes:
    return sidecar.register(session, "bad-input", *PART_BYTES)


def figures(remote: Remote) -> admin_pb2.StatsResponse:
    """All but what changes with time, and the count of refused requests."""
    stats = remote.stats()
    stats.uptime_s = 0
    for changing in ("disk_wear", "ghosts"):
        stats.ClearField(changing)
    stats.traffic.ClearField("requests")
    for session in stats.sessions:
        session.age_s = 0
    return stats


@pytest.fixture
def rejected(sidecar: Remote, refused: Callable[..., Any]) -> Callable[..., None]:
    """`rejected(call, status, *words)`: refused so, and every figure of the sidecar is as before."""

    def check(call: Callable[[], object], status: str, *words: str) -> None:
        before = figures(sidecar)
        with refused(status, *words):
            call()
        assert figures(sidecar) == before

    return check


# -- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({}, "INVALID_ARGUMENT", ["prompt is empty", "send text or"]),
        ({"text": ""}, "INVALID_ARGUMENT", ["prompt is empty", "send"]),
        ({"token_ids": b""}, "INVALID_ARGUMENT", ["prompt is empty", "send"]),
        ({"token_ids": ids(1, 2) + b"\0"}, "INVALID_ARGUMENT", ["9 bytes", "multiple of 4", "little-endian"]),
        ({"token_ids": ids(1, 272)}, "INVALID_ARGUMENT", ["272", "vocabulary", "own tokenizer"]),
        ({"token_ids": ids(2**32 - 1)}, "INVALID_ARGUMENT", ["4294967295", "vocabulary"]),
        ({"token_ids": ids(*[1] * 2048)}, "INVALID_ARGUMENT", ["2048 tokens", "at most 2047"]),
        ({"temperature": -0.5}, "INVALID_ARGUMENT", ["temperature is -0.5", "0 .greedy. or positive"]),
        ({"temperature": float("nan")}, "INVALID_ARGUMENT", ["temperature is nan"]),
        ({"temperature": float("inf")}, "INVALID_ARGUMENT", ["temperature is inf"]),
        ({"top_p": 1.5}, "INVALID_ARGUMENT", ["top_p is 1.5", "between 0 and 1"]),
        ({"top_p": -0.1}, "INVALID_ARGUMENT", ["top_p is -0.1"]),
        ({"top_p": float("nan")}, "INVALID_ARGUMENT", ["top_p is nan"]),
        ({"stop_token_ids": [5, 272]}, "INVALID_ARGUMENT", ["stop token id 272", "vocabulary of 272"]),
        ({"stop_token_ids": [5] * 1025}, "INVALID_ARGUMENT", ["stop_token_ids has 1025 ids", "at most 1024"]),
        ({"text": "x" * 3000}, "INVALID_ARGUMENT", ["3000 characters", "1 characters each", "at most 2047 characters"]),
        ({"text": "x" * (15 << 20)}, "INVALID_ARGUMENT", ["15728640 bytes"]),
        ({"request_id": "x" * 300}, "INVALID_ARGUMENT", ["300 characters", "at most 256"]),
    ],
    ids=lambda value: None if isinstance(value, str | list) else "-".join(value) or "nothing",
)
@pytest.mark.slow
def test_generate(
    model_daemon: Remote, refused: Callable[..., Any], request_: dict[str, Any], status: str, words: list[str]
) -> None:
    fields = {name: request_.pop(name) for name in ("temperature", "top_p", "stop_token_ids") if name in request_}
    wanted = inference_pb2.GenerateRequest(
        text=request_.get("text", "fine" if fields or "request_id" in request_ else None),
        token_ids=inference_pb2.TokenIds(ids=request_["token_ids"]) if "token_ids" in request_ else None,
        request_id=request_.get("request_id", ""),
        sampling=inference_pb2.SamplingParams(**fields),
    )
    before = figures(model_daemon)
    with refused(status, *words):
        list(model_daemon.inference.Generate(wanted, timeout=60))
    assert figures(model_daemon) == before


@pytest.mark.slow
def test_cancel_without_an_id(model_daemon: Remote, refused: Callable[..., Any]) -> None:
    with refused("INVALID_ARGUMENT", "request_id is empty", "first message"):
        model_daemon.inference.Cancel(inference_pb2.CancelRequest())
    assert not model_daemon.inference.Cancel(inference_pb2.CancelRequest(request_id="never was")).cancelled


@pytest.mark.slow
def test_a_sidecar_generates_nothing(sidecar: Remote, rejected: Callable[..., None]) -> None:
    for call in (
        lambda: sidecar.generate("hello"),
        lambda: sidecar.inference.Cancel(inference_pb2.CancelRequest(request_id="r")),
    ):
        rejected(call, "UNIMPLEMENTED", "sidecar", "worker.model or worker.embedded")


# -- the engines' side ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_namespaces(sidecar: Remote, namespace: bytes, session: str, rejected: Callable[..., None]) -> None:
    def register(*arguments: Any, who: str = session, **fields: Any) -> Callable[[], bytes]:
        return lambda: sidecar.register(who, *arguments, **fields)

    cases: list[tuple[Callable[[], object], str, list[str]]] = [
        (register("", 100), "INVALID_ARGUMENT", ["name is empty"]),
        (register("n" * 1025, 100), "INVALID_ARGUMENT", ["name has 1025 bytes", "at most 1024"]),
        (register("new", 100, salt=bytes(257)), "INVALID_ARGUMENT", ["salt has 257 bytes", "at most 256"]),
        (register("new", 100, dtype="d" * 257), "INVALID_ARGUMENT", ["dtype has 257 bytes"]),
        (register("new", 100, layout="\u00e9" * 129), "INVALID_ARGUMENT", ["layout has 258 bytes"]),
        (register("new"), "INVALID_ARGUMENT", ["0 parts"]),
        (register("new", 0), "INVALID_ARGUMENT", ["0 bytes", "at least 1"]),
        (register("new", 2**64 - 1), "INVALID_ARGUMENT", ["18446744073709551615 bytes", "at most"]),
        (register("new", 100, block_tokens=0), "INVALID_ARGUMENT", ["block_tokens is 0", "between 1"]),
        (register("a\nb", 100), "INVALID_ARGUMENT", ["name 'a.*b' has", "cannot be printed"]),
        (register("new", *[100] * 1025), "INVALID_ARGUMENT", ["1025 parts"]),
        (register("n" * 1024, *[1 << 40] * 1024), "INVALID_ARGUMENT", ["with its 1024 parts", "at most 16384"]),
        (register("new", 100, who="nobody"), "NOT_FOUND", ["session nobody", "OpenSession"]),
    ]
    for call, status, words in cases:
        rejected(call, status, *words)
    assert register("bad-input", *PART_BYTES)() == namespace
    assert register("bad-input", *PART_BYTES, salt=b"tenant")() != namespace


@pytest.mark.parametrize("method", ["Match", "Acquire", "Reserve", "Prefetch", "Get"])
@pytest.mark.slow
def test_what_every_call_checks(
    sidecar: Remote, namespace: bytes, session: str, rejected: Callable[..., None], method: str
) -> None:
    def call(**changes: Any) -> Callable[[], object]:
        kind = getattr(pb, f"{method}Request")
        fields = {"session_id": session, "namespace_id": namespace, "token_ids": ids(1, 2, 3, 4), **changes}
        known = {name: value for name, value in fields.items() if name in kind.DESCRIPTOR.fields_by_name}

        def run() -> object:
            result = getattr(sidecar.cache, method)(kind(**known), timeout=60)
            return list(result) if method == "Get" else result

        return run

    if method == "Reserve":
        rejected(call(), "FAILED_PRECONDITION", "has not mapped the arena")
        sidecar.map_arena(session)
    rejected(call(token_ids=b""), "INVALID_ARGUMENT", "empty", "at least one token")
    rejected(call(token_ids=bytes(17)), "INVALID_ARGUMENT", "17 bytes", "multiple of 4")
    rejected(call(namespace_id=NOWHERE), "PERMISSION_DENIED", NOWHERE.hex(), "register it in this session")
    rejected(call(namespace_id=b""), "PERMISSION_DENIED", "empty", "RegisterNamespace")
    rejected(call(session_id="nobody"), "NOT_FOUND", "session nobody", "OpenSession")
    rejected(call(session_id=""), "NOT_FOUND", "OpenSession")
    with session_of(sidecar) as other:  # the id alone opens nothing
        rejected(call(session_id=other.session_id), "PERMISSION_DENIED", namespace.hex(), "register it in this session")
    if method not in ("Match", "Prefetch"):
        rejected(call(parts=[2]), "INVALID_ARGUMENT", "part 2", "0 to 1")
        rejected(call(parts=[1, 1]), "INVALID_ARGUMENT", "twice", "once")
    if method in ("Acquire", "Reserve"):
        rejected(call(ttl_s=-1.0), "INVALID_ARGUMENT", "ttl_s is -1", "positive")
        rejected(call(ttl_s=float("nan")), "INVALID_ARGUMENT", "ttl_s is nan")


@pytest.mark.slow
def test_commit_and_release(
    sidecar: Remote, namespace: bytes, session: str, rejected: Callable[..., None], refused: Callable[..., Any]
) -> None:
    def commit(reservation: str, blocks: int = 1, who: str = session, **flags: Any) -> Callable[[], object]:
        return lambda: sidecar.cache.Commit(
            pb.CommitRequest(session_id=who, reservation_id=reservation, blocks=blocks, **flags)
        )

    def release(lease: str, who: str = session) -> Callable[[], object]:
        return lambda: sidecar.cache.Release(pb.ReleaseRequest(session_id=who, lease_id=lease))

    rejected(commit("7-deadbeef"), "NOT_FOUND", "7-deadbeef", "never granted")
    rejected(commit(""), "NOT_FOUND", "empty")
    rejected(release("7-deadbeef"), "NOT_FOUND", "never granted")
    wanted = {"session_id": session, "namespace_id": namespace}
    tokens = ids(*range(300, 308))
    sidecar.map_arena(session)
    reservation = sidecar.cache.Reserve(pb.ReserveRequest(**wanted, token_ids=tokens)).reservation_id
    rejected(commit(reservation, 3), "INVALID_ARGUMENT", "3 blocks", "has 2")
    rejected(commit(reservation, 2, durable=True), "FAILED_PRECONDITION", "disk tier", "disk.bytes")
    with session_of(sidecar) as other:
        rejected(commit(reservation, 2, other.session_id), "NOT_FOUND", "never granted to this session")
        rejected(release(reservation, other.session_id), "NOT_FOUND", "never granted to this session")
    assert sidecar.match(session, namespace, range(300, 308)).blocks == 0
    commit(reservation, 2)()
    with refused("NOT_FOUND", "committed", "again"):
        commit(reservation, 2)()
    lease = sidecar.cache.Acquire(pb.AcquireRequest(**wanted, token_ids=tokens)).lease_id
    rejected(commit(lease), "INVALID_ARGUMENT", "lease for reading", "reservation")
    release(lease)()
    rejected(release(lease), "NOT_FOUND", "released", "again")
    # More than the daemon allows is granted as much as it allows.
    lasting = sidecar.cache.Acquire(pb.AcquireRequest(**wanted, token_ids=tokens, ttl_s=1e9))
    assert 60 < lasting.ttl_s <= 90
    release(lasting.lease_id)()


@pytest.mark.slow
def test_put(sidecar: Remote, namespace: bytes, session: str, rejected: Callable[..., None]) -> None:
    tokens = list(range(400, 408))
    data = bytes(2 * BLOCK_BYTES)

    def put(data: bytes = data, tokens: list[int] = tokens, **header: Any) -> Callable[[], object]:
        return lambda: sidecar.put(session, namespace, tokens, data, **header)

    def stream(*messages: pb.PutRequest) -> Callable[[], object]:
        return lambda: sidecar.cache.Put(iter(messages), timeout=60)

    header = pb.PutRequest(header=pb.PutHeader(session_id=session, namespace_id=namespace, token_ids=ids(*tokens)))
    rejected(put(data[:-1]), "INVALID_ARGUMENT", "255 bytes", "2 blocks of 128", "256", "whole blocks")
    rejected(put(data + b"x"), "INVALID_ARGUMENT", "257 bytes")
    rejected(put(data * 50), "INVALID_ARGUMENT", "12800 bytes")
    rejected(put(b""), "INVALID_ARGUMENT", "0 bytes")
    rejected(put(first_block=3), "INVALID_ARGUMENT", "first_block is 3", "2 full blocks")
    rejected(put(data[:128], first_block=1), "FAILED_PRECONDITION", "begins at block 1", "begin at block 0")
    rejected(put(parts=[7]), "INVALID_ARGUMENT", "part 7")
    rejected(put(tokens=[]), "INVALID_ARGUMENT", "empty")
    rejected(put(durable=True), "FAILED_PRECONDITION", "disk.bytes")
    rejected(lambda: sidecar.put("nobody", namespace, tokens, data), "NOT_FOUND", "OpenSession")
    rejected(lambda: sidecar.put(session, NOWHERE, tokens, data), "PERMISSION_DENIED", "RegisterNamespace")
    rejected(stream(), "INVALID_ARGUMENT", "no header", "send the header")
    rejected(stream(pb.PutRequest(data=data)), "INVALID_ARGUMENT", "no header")
    rejected(stream(pb.PutRequest()), "INVALID_ARGUMENT", "no header")
    rejected(stream(header, header), "INVALID_ARGUMENT", "one header only")
    rejected(stream(header, pb.PutRequest()), "INVALID_ARGUMENT", "no data")
    big = sidecar.register(session, "a block larger than the tier", 8 << 20)
    rejected(
        lambda: sidecar.put(session, big, [1, 2, 3, 4], b""), "RESOURCE_EXHAUSTED", "4194304", "8388608", "cpu.bytes"
    )


@pytest.mark.slow
def test_admin(sidecar: Remote, namespace: bytes, session: str, rejected: Callable[..., None]) -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):  # 40 prefixes; of 16 first digits some have several
        sidecar.put(session, namespace, rng.integers(0, 99, 4).tolist(), bytes(BLOCK_BYTES))
    admin = sidecar.admin
    keys = [p.key for p in admin.ListPrefixes(admin_pb2.ListPrefixesRequest()).prefixes]
    assert len(keys) >= 40
    for kind, method in (
        (admin_pb2.InspectRequest, admin.Inspect),
        (admin_pb2.PinRequest, admin.Pin),
        (admin_pb2.UnpinRequest, admin.Unpin),
        (admin_pb2.EvictRequest, lambda request: list(admin.Evict(request))),
    ):
        for key in ("", "abc", "g" * 8, keys[0] + "0", "%%%%", "z" * 100_000):
            rejected(lambda: method(kind(key=key)), "INVALID_ARGUMENT", "4 to 32 hex digits", "prefixd ls")  # noqa: B023
        rejected(lambda: method(kind(key="0" * 32)), "NOT_FOUND", "0" * 32, "prefixd ls")  # noqa: B023
    assert admin.Inspect(admin_pb2.InspectRequest(key=keys[0].upper())).prefix.key == keys[0]
    rejected(lambda: list(admin.Evict(admin_pb2.EvictRequest())), "INVALID_ARGUMENT", "all = true")
    rejected(lambda: list(admin.Evict(admin_pb2.EvictRequest(all=False))), "INVALID_ARGUMENT", "all = true")
    rejected(lambda: list(admin.Evict(admin_pb2.EvictRequest(namespace_id=NOWHERE))), "NOT_FOUND", NOWHERE.hex())
    rejected(lambda: admin.ListPrefixes(admin_pb2.ListPrefixesRequest(namespace_id=NOWHERE)), "NOT_FOUND")
    rejected(lambda: admin.Flush(admin_pb2.FlushRequest()), "FAILED_PRECONDITION", "no disk tier", "disk.bytes")
    admin.Pin(admin_pb2.PinRequest(key=keys[0]))
    rejected(lambda: list(admin.Evict(admin_pb2.EvictRequest(key=keys[0]))), "FAILED_PRECONDITION", "pinned", "unpin")
    admin.Unpin(admin_pb2.UnpinRequest(key=keys[0]))
    assert sidecar.evict(all=True).kept_blocks == 0


@pytest.mark.slow
def test_a_short_key_that_several_prefixes_share(sidecar: Remote, session: str, rejected: Callable[..., None]) -> None:
    """600 keys in a chain of one-token blocks: two begin with the same four digits (the birthday paradox)."""
    admin = sidecar.admin
    crowded = sidecar.register(session, "crowded", 1, block_tokens=1)
    sidecar.put(session, crowded, list(range(600)), bytes(600))
    (leaf,) = admin.ListPrefixes(admin_pb2.ListPrefixesRequest(namespace_id=crowded)).prefixes
    keys = [block.key for block in admin.Inspect(admin_pb2.InspectRequest(key=leaf.key)).blocks]
    assert (len(keys), keys[-1]) == (600, leaf.key)
    counts = Counter(key[:4] for key in keys)
    shared, times = counts.most_common(1)[0]
    assert times >= 2
    rejected(
        lambda: admin.Pin(admin_pb2.PinRequest(key=shared)), "INVALID_ARGUMENT", f"{times} prefixes", "more digits"
    )
    alone = next(key for key in keys if counts[key[:4]] == 1)
    assert admin.Inspect(admin_pb2.InspectRequest(key=alone[:4])).prefix.key == alone
    sidecar.evict(all=True)


# -- below the contract -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_unknown_methods_and_garbage_messages(sidecar: Remote, rejected: Callable[..., None]) -> None:
    unknown = sidecar.channel.unary_unary("/prefixd.v1.PrefixCache/Explode")
    rejected(lambda: unknown(b"", timeout=60), "UNIMPLEMENTED")
    match = sidecar.channel.unary_unary("/prefixd.v1.PrefixCache/Match")
    rejected(lambda: match(b"\xff" * 40, timeout=60), "INVALID_ARGUMENT", "cannot be read", "prefixd/v1")
    too_large = pb.MatchRequest(namespace_id=NOWHERE, token_ids=bytes(17 << 20))
    rejected(lambda: sidecar.cache.Match(too_large, timeout=60), "RESOURCE_EXHAUSTED")


@pytest.mark.slow
def test_unreadable_messages_in_streams(sidecar: Remote, rejected: Callable[..., None]) -> None:
    header = pb.PutRequest(header=pb.PutHeader(session_id="nobody")).SerializeToString()
    for path, messages in (
        ("/prefixd.v1.PrefixCache/Put", [b"\xff" * 9]),
        ("/prefixd.v1.PrefixCache/Put", [b"\xff" * 9, header]),
        ("/prefixd.v1.PrefixCache/OpenSession", [b"\x0a\x02\xff\xfe"]),  # a string that is no UTF-8
        ("/prefixd.v1.Inference/Generate", [b"\x0a"]),
        ("/grpc.health.v1.Health/Check", [b"\x0a\xff"]),
        ("/grpc.health.v1.Health/Watch", [b"\x0a\xff"]),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", [b"\x3a\x00", b"\xff"]),
    ):
        stream = sidecar.channel.stream_stream(path)
        rejected(lambda: list(stream(iter(messages), timeout=60)), "INVALID_ARGUMENT", "cannot be read")  # noqa: B023
    assert "Traceback" not in sidecar.daemon.log.read_text()


def test_messages_of_errors_fit_into_a_header() -> None:
    for message in ("short", "a" * 5000, "☃" * 5000, "a" * 480 + "😀" * 115, "%" * 700):
        short = _shorten_message(message)
        assert len(short) <= 600 and len(quote(short, " ")) <= 1800
        assert (short == message) == (message == "short")
        assert short[:60] == message[:60] and short[-60:] == message[-60:]


@pytest.mark.slow
def test_an_unknown_session_is_told_from_an_unknown_lease(sidecar: Remote) -> None:
    """Both are NOT_FOUND; only for the first is a new session the remedy."""

    def trailers(session_id: str) -> list[tuple[str, str]]:
        with pytest.raises(grpc.RpcError) as refusal:
            sidecar.cache.Release(pb.ReleaseRequest(session_id=session_id, lease_id="7-deadbeef"), timeout=60)
        assert refusal.value.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
        return [tuple(pair) for pair in refusal.value.trailing_metadata()]  # type: ignore[attr-defined]

    assert ("prefixd-session", "ended") in trailers("nobody")
    with session_of(sidecar) as opened:
        assert ("prefixd-session", "ended") not in trailers(opened.session_id)


@pytest.mark.slow
def test_a_long_name_comes_back_short(sidecar: Remote, namespace: bytes, rejected: Callable[..., None]) -> None:
    """An error travels in a header; one that repeats a long value must still arrive, with its remedy."""
    long = "ä" * 100_000
    release = pb.ReleaseRequest(session_id=long, lease_id=long)
    rejected(lambda: sidecar.cache.Release(release, timeout=60), "NOT_FOUND", "OpenSession")
    with session_of(sidecar) as opened:
        release.session_id = opened.session_id
        rejected(lambda: sidecar.cache.Release(release, timeout=60), "NOT_FOUND", "check the id")


@pytest.mark.parametrize("suffix", ["", "-memory"])
@pytest.mark.slow
def test_raw_bytes_on_the_sockets(sidecar: Remote, suffix: str) -> None:
    noise = np.random.default_rng(9)
    greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for data in (
        b"",
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        greeting,
        greeting + noise.bytes(500),
        noise.bytes(100_000),
        b"\0" * 5000,
    ):
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.settimeout(60)
            visitor.connect(f"{sidecar.daemon.socket}{suffix}")
            try:
                visitor.sendall(data)
                visitor.shutdown(socket.SHUT_WR)
                while visitor.recv(65536):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass
    os.kill(sidecar.daemon.pid, 0)
    sidecar.settled()
    with session_of(sidecar) as opened:
        assert opened.memory_socket


@pytest.mark.slow
def test_parts_of_a_namespace_are_counted_before_they_are_read(
    sidecar: Remote, session: str, refused: Callable[..., Any]
) -> None:
    unreadable = pb.Part(group="g", nbytes=1, rule=pb.Rule.FromString(b"\xa2\x06\x00"))  # of a kind that nobody knows
    with refused("INVALID_ARGUMENT", "kind"):
        few = pb.Namespace(name="few", block_tokens=1, parts=[unreadable])
        sidecar.cache.RegisterNamespace(pb.RegisterNamespaceRequest(namespace=few, session_id=session))
    many = pb.Namespace(name="many", block_tokens=1, parts=[unreadable] * 1025)
    with refused("INVALID_ARGUMENT", "namespace has 1025 parts", "between 1 and 1024"):
        sidecar.cache.RegisterNamespace(pb.RegisterNamespaceRequest(namespace=many, session_id=session))


@pytest.mark.slow
def test_messages_of_very_many_fields_are_not_parsed(
    sidecar: Remote, session: str, refused: Callable[..., Any]
) -> None:
    with refused("INVALID_ARGUMENT", "cannot be read", "RenewRequest of .* bytes has more than 16384 fields"):
        sidecar.cache.Renew(pb.RenewRequest(session_id=session, lease_ids=["0123456"] * 20_000))
    with refused("INVALID_ARGUMENT", "AcquireRequest.parts has .* bytes; send at most 65536"):
        sidecar.cache.Acquire(pb.AcquireRequest(session_id=session, parts=[0] * 70_000))
    header = pb.PutHeader(session_id=session, parts=[0] * 70_000)
    with refused("INVALID_ARGUMENT", "PutHeader.parts has .* bytes; send at most 65536"):
        sidecar.cache.Put(iter([pb.PutRequest(header=header)]))


@pytest.mark.slow
def test_a_call_without_a_message_is_refused(sidecar: Remote, refused: Callable[..., Any]) -> None:
    for method in ("prefixd.v1.PrefixCache/Match", "prefixd.v1.Admin/Stats"):
        with refused("INVALID_ARGUMENT", "the call has no message; send one"):
            sidecar.channel.stream_unary(f"/{method}")(iter(()), timeout=60)
