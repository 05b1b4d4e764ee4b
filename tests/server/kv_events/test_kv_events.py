"""KV events of a real daemon, read by a subscriber that knows nothing but ZMQ and msgpack."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import msgspec
import numpy as np
import pytest
import zmq

from benchmarks.checks.fault_injection.faulty_daemon import FaultyDaemon
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.server.kv_events.block_hashes import block_hash
from prefixd.v1 import admin_pb2, cache_pb2
from tests.daemons import Remote
from tests.waiting import WAIT_S

SIZE = 3000
TOKENS = list(range(100, 140))  # ten blocks
END = (1 << 64) - 1


class Subscriber:
    """A router: what it has been told since it was told to forget everything, and what it therefore believes."""

    def __init__(self, endpoint: str, topic: bytes = b"", *, name: bytes = b"") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(topic)
        self._socket.connect(endpoint)
        self._name = name
        self.numbers: list[int] = []
        self.events: list[dict[str, Any]] = []
        self.blocks: dict[str, dict[int, dict[str, Any]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def read(self) -> None:
        """One message."""
        assert self._socket.poll(WAIT_S * 1000), f"silence; last heard: {self.events[-3:]}"
        topic, number, payload = self._socket.recv_multipart()
        assert topic == self._name and len(number) == 8
        self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes) -> None:
        stamp, events, rank = msgspec.msgpack.decode(payload)
        assert abs(stamp - time.time()) < 600 and rank == 0
        if not self.numbers and events[0]["type"] != "AllBlocksCleared":
            return  # said just then to those who had heard the rest; all of it comes again
        self.numbers.append(number)
        for event in events:
            self.events.append(event)
            match event["type"]:
                case "AllBlocksCleared":
                    assert event.keys() == {"type"}
                    self.blocks = {}
                case "BlockRemoved":
                    assert event.keys() == {"type", "block_hashes", "medium", "locality"}
                    for key in event["block_hashes"]:
                        del self.blocks[event["medium"]][key]
                case "BlockStored":
                    self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        assert event["locality"] == "LOCAL" and event["lora_id"] is None and event["lora_name"] is None
        keys, tokens, width = event["block_hashes"], event["token_ids"], event["block_size"]
        assert len(tokens) == len(keys) * width and len(event["extra_keys"]) == len(keys)
        parent = event["parent_block_hash"]
        assert parent is None or any(parent in held for held in self.blocks.values()), "parents come first"
        for i, key in enumerate(keys):
            self.blocks.setdefault(event["medium"], {})[key] = {
                "parent": parent,
                "tokens": tokens[i * width : (i + 1) * width],
                "extra": event["extra_keys"][i],
            }
            parent = key

    def until(self, condition: Callable[[], bool]) -> None:
        """Reads until `condition` holds."""
        while not condition():
            self.read()

    def has(self, medium: str, *keys: int) -> bool:
        """Whether exactly these are believed to be there, and something was heard."""
        return bool(self.numbers) and set(self.blocks.get(medium, {})) == set(keys)


def hashes(namespace: bytes, tokens: Sequence[int], block_tokens: int = 4) -> list[int]:
    chain = BlockChain(np.asarray(tokens, "<u4").tobytes(), block_tokens, int.from_bytes(namespace, "little"))
    return [block_hash(namespace, chain.key(i)) for i in range(len(chain))]


def data(tokens: Sequence[int], size: int = SIZE) -> bytes:
    return np.random.default_rng(1).bytes(len(tokens) // 4 * size)


@pytest.fixture
def start(launch: Callable[..., Remote], folder: Path) -> Iterator[Callable[..., Remote]]:
    """Starts a daemon with events at `folder`/events, which is stopped at the end."""
    started: list[Remote] = []

    def begin(settings: dict[str, Any] | None = None, **options: Any) -> Remote:
        events = {"events.endpoint": f"ipc://{folder}/events", "events.replay_endpoint": f"ipc://{folder}/replay"}
        all_settings = {"cpu.bytes": "4MiB", "disk.bytes": "16MiB", **events, **(settings or {})}
        started.append(launch(all_settings, directory=folder, **options))
        return started[-1]

    yield begin
    for remote in started:
        remote.daemon.stop()


@pytest.fixture
def subscriber(folder: Path) -> Iterator[Callable[..., Subscriber]]:
    made: list[Subscriber] = []

    def join(**options: Any) -> Subscriber:
        made.append(Subscriber(f"ipc://{folder}/events", **options))
        made[-1].until(lambda: bool(made[-1].events))
        assert made[-1].events[0] == {"type": "AllBlocksCleared"}
        return made[-1]

    yield join
    for one in made:
        one.__exit__()


def put(remote: Remote, tokens: Sequence[int] = TOKENS, name: str = "m", *, salt: bytes = b"", **header: Any) -> bytes:
    with remote.session() as session:
        namespace = remote.register(session.session_id, name, SIZE, salt=salt)
        remote.put(session.session_id, namespace, tokens, data(tokens), **header)
    return namespace


def test_a_block_on_its_way_through_the_tiers(
    start: Callable[..., Remote], subscriber: Callable[..., Subscriber]
) -> None:
    remote = start({"cache.write_back": "false"})
    router = subscriber()
    namespace = put(remote)
    keys = hashes(namespace, TOKENS)
    router.until(lambda: router.has("CPU", *keys))
    (stored,) = [event for event in router.events if event["type"] == "BlockStored"]
    assert stored == {
        "type": "BlockStored",
        "block_hashes": keys,
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": 4,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "extra_keys": [None] * 10,
        "locality": "LOCAL",
    }
    assert remote.admin.Flush(admin_pb2.FlushRequest()).blocks == 10
    router.until(lambda: router.has("STORAGE", *keys))
    assert router.has("CPU", *keys)
    # A longer prompt: only what is new is told, under the block that it continues.
    longer = [*TOKENS, 1, 2, 3, 4]
    put(remote, longer, durable=True)
    keys = hashes(namespace, longer)
    router.until(lambda: router.has("CPU", *keys) and router.has("STORAGE", *keys))
    assert {event["parent_block_hash"] for event in router.events[-2:]} == {keys[-2]}
    assert [event["token_ids"] for event in router.events[-2:]] == [[1, 2, 3, 4]] * 2
    # It ends as a whole, everywhere.
    assert remote.evict(namespace_id=namespace).evicted_blocks == 11
    router.until(lambda: router.has("CPU") and router.has("STORAGE"))
    assert router.numbers == list(range(router.numbers[0], router.numbers[0] + len(router.numbers)))


@pytest.mark.slow
def test_room_made_in_memory(start: Callable[..., Remote], subscriber: Callable[..., Subscriber]) -> None:
    """What the CPU tier lets go is told, and is still told to be on disk; a read brings it up again."""
    remote = start({"cpu.bytes": "64KiB", "cache.write_back": "false"})
    router = subscriber()
    namespace = put(remote)
    keys = hashes(namespace, TOKENS)
    router.until(lambda: router.has("CPU", *keys))
    other = [token + 1000 for token in TOKENS]
    put(remote, other)
    others = hashes(namespace, other)
    router.until(lambda: not set(others) - set(router.blocks.get("CPU", {})))
    gone = set(keys) - set(router.blocks["CPU"])
    assert gone and not gone - set(router.blocks["STORAGE"])
    with remote.session() as session:
        space = remote.register(session.session_id, "m", SIZE)
        assert remote.get(session.session_id, space, TOKENS) == (10, data(TOKENS))
    router.until(lambda: not set(keys) - set(router.blocks["CPU"]))


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.slow
def test_after_a_restart(start: Callable[..., Remote], subscriber: Callable[..., Subscriber], how: str) -> None:
    """The same subscriber hears that nothing holds any more, what came back from disk, and what is read of it."""
    remote = start()
    router = subscriber()
    namespace = put(remote, durable=True)
    keys = hashes(namespace, TOKENS)
    router.until(lambda: router.has("CPU", *keys) and router.has("STORAGE", *keys))
    getattr(remote.daemon, how)()
    if how == "stop":  # a daemon that ends in order says so
        router.until(lambda: not router.blocks)
    remote.daemon.start()
    grpc.channel_ready_future(remote.channel).result(WAIT_S)
    router.until(lambda: router.has("CPU") and router.has("STORAGE", *keys))
    with remote.session() as session:
        space = remote.register(session.session_id, "m", SIZE)
        assert remote.get(session.session_id, space, TOKENS) == (10, data(TOKENS))
    router.until(lambda: router.has("CPU", *keys))
    assert router.has("STORAGE", *keys)


@pytest.mark.slow
def test_who_comes_late_hears_everything(
    start: Callable[..., Remote], subscriber: Callable[..., Subscriber], folder: Path
) -> None:
    remote = start()
    namespace = put(remote, durable=True)
    keys = hashes(namespace, TOKENS)
    late = subscriber()
    late.until(lambda: late.has("CPU", *keys) and late.has("STORAGE", *keys))
    latest = subscriber()
    latest.until(lambda: latest.has("CPU", *keys) and latest.has("STORAGE", *keys))
    # And who was there before believes the same.
    late.until(lambda: late.numbers[-1] == latest.numbers[-1])
    assert late.blocks == latest.blocks


def replayed(endpoint: str, first: int) -> list[tuple[bytes, int, bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        got = []
        while True:
            assert dealer.poll(WAIT_S * 1000)
            empty, topic, number, payload = dealer.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big") == END:
                assert (topic, payload) == (b"", b"")
                return got
            got.append((topic, int.from_bytes(number, "big"), payload))


@pytest.mark.slow
def test_replay(start: Callable[..., Remote], subscriber: Callable[..., Subscriber], folder: Path) -> None:
    """All batches from any number on, so that who missed some believes the same as who did not."""
    remote = start()
    router = subscriber()
    namespace = put(remote, durable=True)
    keys = hashes(namespace, TOKENS)
    router.until(lambda: router.has("CPU", *keys) and router.has("STORAGE", *keys))
    last = router.numbers[-1]
    everything = replayed(f"ipc://{folder}/replay", 0)
    assert [number for _, number, _ in everything] == list(range(last + 1))
    again = Subscriber(f"ipc://{folder}/nobody")
    with again:
        for topic, number, payload in everything:
            assert topic == b""
            again.take(number, payload)
    assert again.blocks == router.blocks
    assert replayed(f"ipc://{folder}/replay", last) == everything[-1:]
    assert replayed(f"ipc://{folder}/replay", last + 1) == []
    with zmq.Context() as context, context.socket(zmq.DEALER) as wrong:
        wrong.setsockopt(zmq.LINGER, 0)
        wrong.connect(f"ipc://{folder}/replay")
        wrong.send_multipart((b"", b"3"))
        wrong.send_multipart((b"x",))
        # Those get nothing, and others are served as before.
        assert replayed(f"ipc://{folder}/replay", last) == everything[-1:]
        assert not wrong.poll(0)


@pytest.mark.slow
def test_salts_keep_tenants_apart(start: Callable[..., Remote], subscriber: Callable[..., Subscriber]) -> None:
    remote = start({"disk.bytes": 0})
    router = subscriber()
    salts = {b"": None, b"tenant": ["tenant"], b"\xff\x00": [b"\xff\x00"]}
    all_keys: set[int] = set()
    for salt, extra in salts.items():
        keys = hashes(put(remote, salt=salt), TOKENS)
        assert not all_keys & set(keys)
        all_keys |= set(keys)
        router.until(lambda: router.has("CPU", *all_keys))  # noqa: B023
        assert [router.blocks["CPU"][key]["extra"] for key in keys] == [extra] + [None] * 9


@pytest.mark.slow
def test_a_block_of_which_parts_are_missing_is_not_told(
    start: Callable[..., Remote], subscriber: Callable[..., Subscriber]
) -> None:
    remote = start({"disk.bytes": 0})
    router = subscriber()
    with remote.session() as opened:
        session = opened.session_id
        namespace = remote.register(session, "two ranks", SIZE, SIZE)
        remote.map_arena(session)
        who = {"session_id": session, "namespace_id": namespace}
        token_ids = np.asarray(TOKENS, "<u4").tobytes()

        def fill(part: int) -> None:
            granted = remote.cache.Reserve(cache_pb2.ReserveRequest(**who, token_ids=token_ids, parts=[part]))
            wanted = {"session_id": session, "reservation_id": granted.reservation_id}
            assert remote.cache.Commit(cache_pb2.CommitRequest(**wanted, blocks=10)).committed == 10

        fill(0)
        other = [7, 7, 7, 7]
        remote.put(session, namespace, other, bytes(2 * SIZE))
        marker = hashes(namespace, other)
        router.until(lambda: router.has("CPU", *marker))  # and nothing else
        fill(1)
        router.until(lambda: router.has("CPU", *marker, *hashes(namespace, TOKENS)))


@pytest.mark.slow
def test_a_disk_out_of_service(start: Callable[..., Remote], subscriber: Callable[..., Subscriber]) -> None:
    """What cannot be read is told to be gone, and to be back when it can."""
    remote = start({"cpu.bytes": "64KiB", "disk.scrub_bytes_per_s": 0}, kind=FaultyDaemon)
    daemon = remote.daemon
    assert isinstance(daemon, FaultyDaemon)
    router = subscriber()
    namespace = put(remote, durable=True)
    other = [token + 1000 for token in TOKENS]
    put(remote, other, durable=True)
    keys = hashes(namespace, TOKENS) + hashes(namespace, other)
    router.until(lambda: router.has("STORAGE", *keys))
    daemon.break_disk("read error")
    with remote.session() as session:
        space = remote.register(session.session_id, "m", SIZE)
        for tokens in (TOKENS, other):
            remote.get(session.session_id, space, tokens)
    router.until(lambda: router.has("STORAGE"))
    daemon.heal_disk()
    router.until(lambda: router.has("STORAGE", *keys))


@pytest.mark.slow
def test_topics_by_namespace(start: Callable[..., Remote], subscriber: Callable[..., Subscriber]) -> None:
    """Whoever subscribes to one model's topic hears of that one alone, from its AllBlocksCleared on."""
    remote = start({"events.topic": "kv@host@{namespace}", "disk.bytes": 0})
    with remote.session() as session:  # known before somebody subscribes
        remote.register(session.session_id, "one", SIZE)
    one = subscriber(topic=b"kv@host@one", name=b"kv@host@one")
    keys = hashes(put(remote, name="one"), TOKENS)
    put(remote, name="two")
    one.until(lambda: one.has("CPU", *keys))
    two = subscriber(topic=b"kv@host@two", name=b"kv@host@two")
    two.until(lambda: len(two.blocks.get("CPU", {})) == 10)
    assert not set(two.blocks["CPU"]) & set(keys)
    assert remote.evict(all=True).evicted_blocks == 20
    one.until(lambda: one.has("CPU"))
    two.until(lambda: two.has("CPU"))


@pytest.mark.slow
def test_figures(start: Callable[..., Remote], subscriber: Callable[..., Subscriber], folder: Path) -> None:
    remote = start({"server.metrics": "127.0.0.1:0", "disk.bytes": 0})
    router = subscriber()
    keys = hashes(put(remote), TOKENS)
    router.until(lambda: router.has("CPU", *keys))
    batches = replayed(f"ipc://{folder}/replay", 0)
    events = sum(len(msgspec.msgpack.decode(payload)[1]) for _, _, payload in batches)
    stats = remote.stats().kv_events
    assert (stats.events, stats.batches, stats.overruns, stats.subscriptions) == (events, len(batches), 0, 1)
    with urllib.request.urlopen(f"{remote.daemon.metrics}/metrics", timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    for line in (
        f"prefixd_kv_events_total {events:.1f}",
        f"prefixd_kv_event_batches_total {len(batches):.1f}",
        "prefixd_kv_event_overruns_total 0.0",
        "prefixd_kv_event_subscriptions 1.0",
    ):
        assert line in lines
    router.__exit__()
    remote.until(lambda stats: stats.kv_events.subscriptions == 0)


@pytest.mark.slow
def test_a_router_that_listens_itself(launch: Callable[..., Remote]) -> None:
    with Subscriber("inproc://unused") as router:
        endpoint = f"tcp://127.0.0.1:{router._socket.bind_to_random_port('tcp://127.0.0.1')}"
        remote = launch({"disk.bytes": 0, "events.endpoint": endpoint, "events.connect": "true"})
        router.read()
        keys = hashes(put(remote), TOKENS)
        router.until(lambda: router.has("CPU", *keys))


@pytest.mark.slow
def test_an_endpoint_that_is_taken_is_refused(
    serve_failing: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        mine = {"data_dir": str(folder / "data"), "server.socket": str(folder / "s"), "disk.bytes": 0}
        good = {"events.endpoint": f"ipc://{folder}/events"}
        for name, settings in (
            ("events.endpoint", {"events.endpoint": endpoint}),
            ("events.replay_endpoint", {**good, "events.replay_endpoint": endpoint}),
            ("events.endpoint", {"events.endpoint": f"ipc://{folder}/none/such"}),
        ):
            result = serve_failing({**mine, **settings})
            assert result.returncode == 2 and "Traceback" not in result.stderr
            line = result.stderr.splitlines()[-1]
            assert line.startswith(f"prefixd: {name} = {settings[name]} ") and "choose another" in line


@pytest.mark.slow
def test_nothing_is_watched_without_an_endpoint(launch: Callable[..., Remote]) -> None:
    assert not launch({"disk.bytes": 0}).stats().HasField("kv_events")


@pytest.mark.slow
def test_blocks_are_told_in_the_engines_size(
    start: Callable[..., Remote], subscriber: Callable[..., Subscriber]
) -> None:
    """Prompts that part inside a block have its beginning in common, until the last of them goes."""
    remote = start({"events.block_tokens": 2, "disk.bytes": 0})
    router = subscriber()
    namespace = put(remote, [1, 2, 3, 4, 5, 6, 7, 8])
    router.until(lambda: len(router.blocks.get("CPU", {})) == 4)
    put(remote, [1, 2, 3, 4, 5, 6, 9, 9])
    router.until(lambda: len(router.blocks["CPU"]) == 5)
    told = {tuple(block["tokens"]): (key, block["parent"]) for key, block in router.blocks["CPU"].items()}
    key_of = {tokens: key for tokens, (key, _) in told.items()}
    assert {tokens: parent for tokens, (_, parent) in told.items()} == {
        (1, 2): None,
        (3, 4): key_of[1, 2],
        (5, 6): key_of[3, 4],
        (7, 8): key_of[5, 6],
        (9, 9): key_of[5, 6],
    }
    assert key_of[7, 8] == hashes(namespace, [1, 2, 3, 4, 5, 6, 7, 8])[1]
    remote.evict(namespace_id=namespace)
    router.until(lambda: router.has("CPU"))
