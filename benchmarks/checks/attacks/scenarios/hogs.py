"""Attacks that take memory, sessions, leases and calls, or do not give them back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import grpc
import numpy as np

from benchmarks.checks.attacks.attacker import Given, Mallory, refusal, until_refused, varint
from benchmarks.checks.attacks.people import CAROL, MALLORY, MIB
from benchmarks.checks.attacks.relay import Relay
from benchmarks.checks.attacks.scenario import Scenario
from benchmarks.checks.attacks.scene import TOKENS_OF_EACH, Scene, ask, fresh_bytes, fresh_prompt
from benchmarks.common.harness import BenchmarkError
from prefixd.client import AsyncCache, AsyncClient, ClientError, NamespaceSpec, PartSpec, Retention, Tier
from prefixd.v1 import cache_pb2 as pb

_BLOCK = 64 << 10
_SPEC = NamespaceSpec("hog", 16, (PartSpec("full", 0, _BLOCK),))
_PIECE = 128  # blocks of a prompt that an attack stores
_RETAINED = 2 * _PIECE * _BLOCK  # bytes that the attacker may retain in `pins and retention`
_HOUR_S = 3600.0
_OF_TOKEN = 4  # messages in transit that the daemon allows to one caller
_LAST_BYTES = 1 << 18


class SilentPut(Scenario):
    """Sends the header of a `Put` as large as the CPU tier, and then nothing more."""

    name = "silent Put"

    async def attack(self, mallory: Mallory) -> None:
        client = await mallory.client()
        session = await client.session()
        cache = await client.register(_SPEC)
        agreed = 0
        streams = []
        for number in range(12):

            async def silent(number: int = number) -> AsyncIterator[pb.PutRequest]:
                header = pb.PutHeader(
                    session_id=session.session_id,
                    namespace_id=cache.namespace_id,
                    token_ids=_prompt(number, 1024 >> min(number // 2, 8)).tobytes(),
                )
                yield pb.PutRequest(header=header)
                await mallory.until_stopped()

            stream = client.connection.cache.Put(silent())
            streams.append(stream)
            with suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(2.0):
                    agreed += any(name == "prefixd-agreed" for name, _ in await stream.initial_metadata())
        await mallory.hold(agreed=agreed)
        for stream in streams:
            stream.cancel()


class LeasesForAnHour(Scenario):
    """Fills the CPU tier, leases everything for an hour, and reserves what is left."""

    name = "leases for an hour"

    async def attack(self, mallory: Mallory) -> None:
        """Uses one session and raw calls: the SDK would not lease blocks that it cannot map."""
        client = await mallory.client()
        cache = await client.register(_SPEC)
        session = (await client.session()).session_id
        raw = client.connection.cache
        common: dict[str, Any] = {"session_id": session, "namespace_id": cache.namespace_id, "ttl_s": _HOUR_S}
        granted = 0
        refused = ""
        try:
            for number in range(10):
                tokens = _prompt(number, _PIECE)
                with suppress(ClientError):
                    await cache.store(tokens, np.zeros(_PIECE * _BLOCK, np.uint8))
                lease = await raw.Acquire(pb.AcquireRequest(**common, token_ids=tokens.tobytes()), timeout=20)
                granted += lease.blocks
            for number in range(100, 200):
                tokens = _prompt(number, 16)
                reserved = await raw.Reserve(pb.ReserveRequest(**common, token_ids=tokens.tobytes()), timeout=20)
                granted += reserved.blocks
        except grpc.aio.AioRpcError as error:
            refused = refusal(error)
        await mallory.hold(granted_blocks=granted, refused=refused)


class CacheFlood(Scenario):
    """Stores new blocks as fast as it can, so that other tenants' blocks are evicted."""

    name = "cache flood"

    def prepare(self, scene: Scene) -> Given:
        """Stores blocks of Carol, which she does not use during the attack: 4 MiB, half of her guarantee."""
        with scene.client(CAROL) as victim:
            cache = victim.register(NamespaceSpec("idle-model", 16, (PartSpec("full", 0, _BLOCK),)))
            stored = cache.store(_prompt(9_999, 64), fresh_bytes(9_999, 64, _BLOCK))
        return {"stored": stored.committed + stored.duplicates}

    async def attack(self, mallory: Mallory) -> Given:
        client = await mallory.client()
        cache = await client.register(_SPEC)
        content = np.zeros(_PIECE * _BLOCK, np.uint8)
        stored = refused = 0

        async def flood(first: int) -> None:
            nonlocal stored, refused
            number = first
            while mallory.going:
                number += 1
                try:
                    stored += (await cache.store(_prompt(number, _PIECE), content)).committed
                except ClientError:
                    refused += 1
                    await asyncio.sleep(0.05)

        await mallory.run_all((flood(1_000_000 * (1 + index)) for index in range(4)), in_place_s=3.0)
        return {"stored_blocks": stored, "refused": refused}

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        with scene.client(CAROL) as victim:
            cache = victim.register(NamespaceSpec("idle-model", 16, (PartSpec("full", 0, _BLOCK),)))
            matched = cache.match(_prompt(9_999, 64))
        if (near := matched.blocks_in(Tier.CPU) + matched.blocks_in(Tier.GPU)) < 64:
            yield f"{64 - near} of 64 blocks of another tenant, within its guarantee, were evicted from memory"


class RetainedPool(Scenario):
    """Stores blocks with the highest priority until the daemon refuses more of the bytes that tenants retain in
    common."""

    name = "retained pool"
    closed_by = "tests/cache/placement/test_retention.py"
    settings: ClassVar[Mapping[str, object]] = {f"tenants.mallory.{tier}_most": 256 * MIB for tier in ("cpu", "disk")}

    async def attack(self, mallory: Mallory) -> Given:
        client = await mallory.client()
        cache = await client.register(_SPEC)
        content, stored, refused = np.zeros(_PIECE * _BLOCK, np.uint8), 0, ""
        while mallory.going and not refused:
            try:
                result = await cache.store(
                    _prompt(7_000_000 + stored, _PIECE), content, retention=[Retention(priority=100)]
                )
                refused = result.retention_refused
                stored += result.committed
            except ClientError as error:  # no room just now
                refused = refused or ("" if "retain" not in str(error) else str(error))
                await asyncio.sleep(0.02)
        await mallory.hold(retained_blocks=stored, refused=refused[:120])
        return {}

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        number = scene.next()
        with scene.client() as client:
            cache = client.register(NamespaceSpec(f"kept-{number}", 16, (PartSpec("full", 0, 8192),)))
            keep = [Retention(priority=50, ttl_s=5)]
            stored = cache.store(fresh_prompt(number), fresh_bytes(number), retention=keep)
            if stored.dropped:
                yield f"a store of another tenant with a priority fails: {stored.dropped} blocks are dropped"
            if stored.retention_refused:
                yield f"another tenant may retain nothing: {stored.retention_refused}"
            ask(client, [number % 256, 1, 2], retention=keep)

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        scene.evict(MALLORY)
        return ()


class PrefetchFlood(Scenario):
    """Prefetches prefixes in many sessions at once: each session has a limit of its own."""

    name = "prefetch flood"

    def prepare(self, scene: Scene) -> Given:
        return CacheFlood().prepare(scene)

    async def attack(self, mallory: Mallory) -> Given:
        """Stores more than memory holds, and prefetches all of it in many sessions, again and again."""
        client = await mallory.client()
        cache = await client.register(_SPEC)
        numbers = range(30_000, 30_012)
        for number in numbers:
            with suppress(ClientError):
                await cache.store(_prompt(number, _PIECE), np.zeros(_PIECE * _BLOCK, np.uint8), durable=True)
        caches: list[AsyncCache] = []
        with suppress(ClientError):
            for _ in range(24):
                caches.append(await (await mallory.client()).register(_SPEC))
        asked = 0

        async def flood(cache: AsyncCache, first: int) -> None:
            nonlocal asked
            for index in range(1_000_000):
                if not mallory.going:
                    return
                with suppress(ClientError):
                    asked += await cache.prefetch(_prompt(numbers[(first + index) % len(numbers)], _PIECE))
                await asyncio.sleep(0.01)

        await mallory.run_all((flood(each, index) for index, each in enumerate(caches)), sessions=len(caches))
        return {"asked_blocks": asked}

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        return CacheFlood().judge_after(scene, found)


class LongSessionNames(Scenario):
    """Opens sessions with names of 1 MiB; the figures contain the names of sessions."""

    name = "session names"

    async def attack(self, mallory: Mallory) -> None:

        async def open_one(number: int) -> None:
            client = await mallory.client(name=f"{number:04d}" + "n" * (1 << 20))
            await client.session()

        opened, refused = await until_refused(12, open_one)
        await mallory.hold(opened=opened, refused=refused)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        with scene.operator() as operator:
            longest = max((len(session.client_name) for session in operator.stats().sessions), default=0)
        if longest > 1024:
            yield f"the daemon keeps a session's name of {longest} characters"


class ManySessions(Scenario):
    """Opens sessions until the daemon refuses them: tries 100,000, or fewer if the time is up."""

    name = "100,000 sessions"

    async def attack(self, mallory: Mallory) -> Given:
        clients = [await mallory.client() for _ in range(8)]
        streams: list[Any] = []
        counted: Counter[str] = Counter()

        async def open_one(client: AsyncClient) -> None:
            stream = client.connection.cache.OpenSession(pb.OpenSessionRequest(client_name="m"))
            try:
                async with asyncio.timeout(10):
                    event = await stream.read()
                counted["opened" if event is not grpc.aio.EOF else "ended"] += 1
                streams.append(stream)
            except TimeoutError:
                stream.cancel()
                counted["no answer"] += 1
            except grpc.aio.AioRpcError as error:
                counted[error.code().name] += 1

        async def keep_trying(client: AsyncClient) -> None:
            while mallory.going and counted.total() < 100_000:
                await asyncio.gather(*(open_one(client) for _ in range(8)))

        tasks = [asyncio.create_task(keep_trying(client)) for client in clients]
        await asyncio.sleep(2.0)
        mallory.in_place(opened=counted["opened"])
        await asyncio.gather(*tasks)
        for stream in streams:
            stream.cancel()
        return dict(counted)


class LargeCalls(Scenario):
    """Makes hundreds of calls of 15 MiB at once."""

    name = "16 MiB calls"

    async def attack(self, mallory: Mallory) -> Given:
        """Uses many connections, so that no window slows the calls down. Makes the message once: a real attacker
        computes on another host, and takes no CPU time from the daemon."""
        message = pb.MatchRequest(session_id="s" * 32, token_ids=bytes(15 << 20)).SerializeToString()
        metadata = [("authorization", f"Bearer {mallory.token}")]
        counted: Counter[str] = Counter()

        async def send(channel: Any) -> None:
            match = channel.unary_unary("/prefixd.v1.PrefixCache/Match")
            while mallory.going:
                try:
                    await match(message, metadata=metadata, timeout=20)
                except grpc.aio.AioRpcError as error:
                    counted[error.code().name] += 1

        await mallory.run_all(send(channel) for channel in await mallory.channels(32) for _ in range(8))
        return dict(counted)


class LargeAtOnce(Scenario):
    """Makes calls of 15 MiB whose last bytes arrive together, so that one turn of the loop could assemble all of
    them."""

    name = "16 MiB at one moment"
    closed_by = "tests/server/rpc/test_receiving.py"

    def prepare(self, scene: Scene) -> Given:
        """Gives the attacker several tokens: with one token, only a few messages can be in transit."""
        return {"tokens": [scene.token(MALLORY, number) for number in range(TOKENS_OF_EACH)]}

    async def attack(self, mallory: Mallory) -> Given:
        message = pb.MatchRequest(session_id="s" * 32, token_ids=bytes(15 << 20)).SerializeToString()
        tokens = mallory.given["tokens"] * _OF_TOKEN
        together = asyncio.Barrier(len(tokens))
        relays = [Relay(mallory.tcp, len(message) - _LAST_BYTES, together) for _ in tokens]
        counted: Counter[str] = Counter()

        async def send(relay: Relay, token: str) -> None:
            async with await relay.listen() as server:
                address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
                async with grpc.aio.insecure_channel(address) as channel:
                    match: Any = channel.unary_unary("/prefixd.v1.PrefixCache/Match")
                    while mallory.going:
                        relay.begin()
                        try:
                            await match(message, metadata=[("authorization", f"Bearer {token}")], timeout=20)
                        except grpc.aio.AioRpcError as error:
                            counted[error.code().name] += 1

        await mallory.run_all(map(send, relays, tokens))
        if not (moments := max(relay.moments for relay in relays)):
            raise BenchmarkError("the last bytes of all messages never arrived together")
        return {**counted, "moments": moments}


class LargeStreams(Scenario):
    """Sends messages of 15 MiB that are not the first of their streams. The large field in them is unknown to the
    daemon."""

    name = "16 MiB in streams"
    closed_by = "tests/server/rpc/test_receiving.py"

    async def attack(self, mallory: Mallory) -> Given:
        """Uses many calls of `Put` and of server reflection at once."""
        client = await mallory.client()
        session = await client.session()
        cache = await client.register(_SPEC)
        header = pb.PutHeader(
            session_id=session.session_id, namespace_id=cache.namespace_id, token_ids=_prompt(0, _PIECE).tobytes()
        )
        unknown = bytes([0xFA, 0x01]) + varint(15 << 20) + bytes(15 << 20)  # a field with the number 31
        counted: Counter[str] = Counter()

        async def messages(first: bytes) -> AsyncIterator[bytes]:
            yield first
            while mallory.going:
                counted["messages"] += 1
                yield unknown

        async def send(channel: Any, method: str, first: bytes) -> None:
            metadata = [("authorization", f"Bearer {mallory.token}")]
            while mallory.going:
                counted[(await channel.stream_stream(method)(messages(first), metadata=metadata).code()).name] += 1

        put, asked = "/prefixd.v1.PrefixCache/Put", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        first = pb.PutRequest(header=header).SerializeToString()
        each = ((put, first), (put, first), (asked, b""))
        await mallory.run_all(send(channel, *what) for channel in await mallory.channels(8) for what in each)
        return dict(counted)


class LargeAnswers(Scenario):
    """Makes leases with answers larger than the largest message: the caller never learns of them, and they would
    stay."""

    name = "answers too large"
    refused_with = "the namespace takes"
    blocks = 1800

    async def attack(self, mallory: Mallory) -> None:
        """Uses blocks of 1,024 parts. All parts but one are needed only at the prompt's end, but the answer names them
        all."""
        client = await mallory.client()
        window = pb.Rule(sliding_window=pb.SlidingWindow(tokens=1))
        parts = [pb.Part(group="full", nbytes=64)]
        parts += [pb.Part(group="w", rank=rank, nbytes=64, rule=window) for rank in range(1023)]
        session = (await client.session()).session_id
        raw = client.connection.cache
        registered = await raw.RegisterNamespace(
            pb.RegisterNamespaceRequest(
                session_id=session, namespace=pb.Namespace(name="large", block_tokens=1, parts=parts)
            )
        )
        tokens = np.arange(self.blocks, dtype=np.uint32).tobytes()
        common: dict[str, Any] = {"session_id": session, "namespace_id": registered.namespace_id, "token_ids": tokens}
        for wanted in ({"parts": [0]}, {"first_block": self.blocks - 1}):
            reserved = await raw.Reserve(pb.ReserveRequest(**common, **wanted), timeout=20)
            await raw.Commit(
                pb.CommitRequest(session_id=session, reservation_id=reserved.reservation_id, blocks=reserved.blocks)
            )
        statuses: Counter[str] = Counter()
        for _ in range(4):
            try:
                await raw.Acquire(pb.AcquireRequest(**common), timeout=20)
                statuses["OK"] += 1
            except grpc.aio.AioRpcError as error:
                statuses[f"{error.code().name}: {error.details()}"[:200]] += 1
        await mallory.hold(session=session, statuses=dict(statuses))

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        answered = sum(count for status, count in facts.get("statuses", {}).items() if status == "OK")
        for session in scene.stats().sessions:
            if facts.get("session", "-").startswith(session.session_id) and session.leases > answered:
                yield f"{session.leases - answered} leases stay though their answers could not be sent"


class LateWriter(Scenario):
    """Maps the memory in one session, reserves slots in another and closes that one: the daemon could give the slots to
    others while the attacker can still write to them."""

    name = "two sessions"
    refused_with = "has not mapped the arena"
    settings: ClassVar = {"tenants.mallory.map_memory": True}
    as_other_user = True

    async def attack(self, mallory: Mallory) -> None:
        mapping = await mallory.client("unix", memory="shared")
        arena = (await mapping.session()).arena
        assert arena is not None
        writing = await mallory.client("unix", memory="streamed")
        cache = await writing.register(_SPEC)
        session = (await writing.session()).session_id
        raw = writing.connection.cache
        reserved = await raw.Reserve(
            pb.ReserveRequest(
                session_id=session, namespace_id=cache.namespace_id, token_ids=_prompt(1, 32).tobytes(), ttl_s=60
            )
        )
        await writing.close()
        await mallory.hold(offsets=list(reserved.offsets))

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        kept = sum(tier.quarantined_bytes for tier in scene.stats().tiers)
        if "offsets" in facts and kept < len(facts["offsets"]) * _BLOCK:
            yield f"slots of {len(facts['offsets']) * _BLOCK} bytes are given to others while their writer is alive"


class HoldEverything(Scenario):
    """Pins blocks, and retains more blocks with the highest priority than it may."""

    name = "pins and retention"
    settings: ClassVar[Mapping[str, object]] = {"tenants.mallory.retained_bytes": _RETAINED}

    def prepare(self, scene: Scene) -> Given:
        return CacheFlood().prepare(scene)

    async def attack(self, mallory: Mallory) -> Given:
        """Stores blocks, and tries to keep all of them: as a client it retains them, and as if it were the operator it
        pins them."""
        client = await mallory.client()
        cache = await client.register(_SPEC)
        session = (await client.session()).session_id
        local = await mallory.client("unix")
        counted: Counter[str] = Counter()
        content = np.zeros(_PIECE * _BLOCK, np.uint8)
        seed = int.from_bytes(cache.namespace_id, "little")
        for number in range(50_000, 50_012):
            tokens = _prompt(number, _PIECE)
            with suppress(ClientError):
                await cache.store(tokens, content)
            highest = pb.Retention(priority=100, ttl_s=_HOUR_S)
            try:
                kept = await client.connection.cache.Retain(
                    pb.RetainRequest(
                        session_id=session,
                        namespace_id=cache.namespace_id,
                        token_ids=tokens.tobytes(),
                        retention=[highest],
                    ),
                    timeout=20,
                )
                counted["retained"] += kept.blocks
            except grpc.aio.AioRpcError as error:
                counted[error.code().name] += 1
            with suppress(ClientError):
                counted["pinned"] += (await local.pin(_last_key(tokens, seed))).blocks
        await mallory.hold(**counted)
        return dict(counted)

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        held = max(found.get("retained", 0), found.get("pinned", 0)) * _BLOCK
        if held > _RETAINED:
            yield f"one client holds {held // MIB} MiB without a time limit; {_RETAINED // MIB} MiB are allowed"
        yield from CacheFlood().judge_after(scene, found)


def _last_key(tokens: Any, seed: int) -> str:
    from prefixd.cache import BlockChain

    chain = BlockChain(tokens.tobytes(), 16, seed)
    return chain.key(len(chain) - 1).hex()


def _prompt(number: int, blocks: int) -> Any:
    return np.random.default_rng([666, number]).integers(0, 1 << 32, blocks * 16, dtype=np.uint32)
