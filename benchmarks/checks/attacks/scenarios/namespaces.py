"""Attacks with namespaces: other tenants', too many, too large, and the served model's own."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

from benchmarks.checks.attacks.attacker import Given, Mallory, refusal, until_refused
from benchmarks.checks.attacks.scenario import Scenario
from benchmarks.checks.attacks.scene import Scene, ask, fresh_bytes, fresh_prompt
from prefixd.client import AsyncClient, ClientError, NamespaceSpec, PartSpec
from prefixd.v1 import cache_pb2 as pb

_SALT = b"alice's salt"


class Poisoning(Scenario):
    """Stores noise and NaN in the served model's own namespace, under prompts that other tenants send."""

    name = "poisoning"
    prompts = 6

    def prepare(self, scene: Scene) -> Given:
        """Returns the right answers to some prompts, and the model's namespace as `stats` shows it."""
        numbers = [scene.next() for _ in range(self.prompts)]
        with scene.client() as client:  # with secret salts, which change the cache key but not the answer
            right = [ask(client, fresh_prompt(number) % 256, salt=b"%d" % number)[0] for number in numbers]
        return {"numbers": numbers, "right": right, "namespace": scene.served().namespace.SerializeToString().hex()}

    async def attack(self, mallory: Mallory) -> None:
        client = await mallory.client()
        namespace = pb.Namespace.FromString(bytes.fromhex(mallory.given["namespace"]))
        refused: list[str] = []
        stored = 0
        for index, number in enumerate(mallory.given["numbers"]):
            spec = _sdk_spec(namespace)
            content = np.full(4 * spec.block_bytes // 4, np.nan if index % 2 else 7.5e8, np.float32)
            try:
                cache = await client.register(spec)
                stored += (await cache.store(fresh_prompt(number) % 256, content.view(np.uint8))).committed
            except ClientError as error:
                refused.append(refusal(error))
        await mallory.hold(stored=stored, refused=refused[:2], **mallory.given)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        wrong: Counter[str] = Counter()
        with scene.client() as client:
            for number, right in zip(facts["numbers"], facts["right"], strict=True):
                for _ in range(2):
                    try:
                        wrong["wrong"] += ask(client, fresh_prompt(number) % 256)[0] != right
                    except ClientError as error:
                        wrong[refusal(error)] += 1
        if found := {outcome: count for outcome, count in wrong.items() if count}:
            yield f"of {2 * len(facts['numbers'])} answers to others: {found}"


class LockOut(Scenario):
    """Registers other tenants' names with another geometry; a restart must not make that permanent."""

    name = "geometry lock-out"

    def prepare(self, scene: Scene) -> Given:
        """Returns the served model's name, and the name of a model that a victim is about to use."""
        return {"served": scene.served().namespace.name, "other": f"model-to-come-{scene.next()}"}

    async def attack(self, mallory: Mallory) -> None:
        """Registers both names; the served model's with a salt that a victim has revealed."""
        client = await mallory.client()
        geometry = (PartSpec("full", 0, 64),)
        taken: list[str] = []
        for name, salt in ((mallory.given["other"], b""), (mallory.given["served"], _SALT)):
            with suppress(ClientError):
                cache = await client.register(NamespaceSpec(name, 48, geometry, salt=salt))
                await cache.store(np.arange(48, dtype=np.uint32), np.zeros(64, np.uint8))
                taken.append(name)
        await mallory.hold(taken=taken, **mallory.given)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        yield from self._find_lock_out(scene, facts["other"])
        self._name = facts["other"]

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        scene.pause()
        scene.restart()
        for breach in self._find_lock_out(scene, self._name):
            yield f"after a restart, {breach}"
        scene.resume()

    def _find_lock_out(self, scene: Scene, name: str) -> Iterable[str]:
        number = scene.next()
        with scene.client() as client:
            try:
                cache = client.register(NamespaceSpec(name, 16, (PartSpec("full", 0, 8192),)))
                cache.store(fresh_prompt(number), fresh_bytes(number))
            except ClientError as error:
                yield f"a model's owner is locked out: {refusal(error)}"
            try:
                prompt = fresh_prompt(number) % 256
                ask(client, prompt, salt=_SALT)
                _, finished = ask(client, prompt, salt=_SALT)
                if not sum(finished.hit_tokens.values()):
                    yield "prompts with a salt that another tenant has used are never cached"
            except ClientError as error:
                yield f"prompts with a salt that another tenant has used fail: {refusal(error)}"


class ManySalts(Scenario):
    """Registers more namespaces than the daemon keeps at a time, each with its own salt."""

    name = "1,024 salts"
    salts = 1100

    async def attack(self, mallory: Mallory) -> None:
        client = await mallory.client()
        content = np.zeros(64, np.uint8)
        tokens = np.arange(16, dtype=np.uint32)

        async def fill_one(number: int) -> None:
            cache = await client.register(NamespaceSpec("m", 16, (PartSpec("full", 0, 64),), salt=b"%d" % number))
            await cache.store(tokens, content)

        registered, refused = await until_refused(self.salts, fill_one)
        await mallory.hold(registered=registered, refused=refused)


class LongParts(Scenario):
    """Registers 64 namespaces of 1,024 parts with long names: more than one message with figures can hold."""

    name = "long parts"

    async def attack(self, mallory: Mallory) -> None:
        client = await mallory.client()
        parts = tuple(PartSpec(f"{number:04d}" + "x" * 250, number, 64) for number in range(1024))
        registered, refused = await until_refused(
            64, lambda number: client.register(NamespaceSpec(f"{number:02d}" + "n" * 1000, 16, parts))
        )
        await mallory.hold(registered=registered, refused=refused)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        try:
            with scene.operator() as operator:
                operator.stats()
                operator.prefixes(limit=1000)
        except ClientError as error:
            yield f"the operator does not get the figures: {refusal(error)}"


class OddGeometry(Scenario):
    """Sends rules, parts, sizes and estimates at the ends of their ranges."""

    name = "odd rules and parts"
    closed_by = "tests/cache/rules/test_rules.py"

    async def attack(self, mallory: Mallory) -> Given:
        """Registers namespaces of all odd geometries, uses those that are accepted, and counts the statuses."""
        client = await mallory.client()
        session = await client.session()
        statuses: Counter[str] = Counter()
        mallory.in_place()
        for number, namespace in itertools.cycle(enumerate(_odd_namespaces())):
            if not mallory.going:
                break
            namespace.name = f"odd-{number}"
            await _use_namespace(client, session.session_id, namespace, statuses)
        return {"statuses": dict(statuses)}

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        unexpected = {"INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"} & set(found.get("statuses", ()))
        if unexpected:
            yield f"the daemon answers {', '.join(sorted(unexpected))}"


def _odd_namespaces() -> Iterable[pb.Namespace]:
    most = (1 << 32) - 1
    rules = [
        pb.Rule(),
        *(pb.Rule(sliding_window=pb.SlidingWindow(tokens=tokens)) for tokens in (0, 1, 2, 16, most)),
        *(pb.Rule(chunked_window=pb.ChunkedWindow(tokens=tokens)) for tokens in (0, 1, 17, most)),
        *(pb.Rule(recurrent_state=pb.RecurrentState(checkpoint_tokens=tokens)) for tokens in (0, 15, 16, most)),
        *(pb.Rule(cross_attention=pb.CrossAttention(image_blocks=blocks)) for blocks in (0, 2, most)),
        pb.Rule(vision_embedding=pb.VisionEmbedding()),
    ]
    for rule in rules:
        for block_tokens in (1, 16, 65_536):
            yield pb.Namespace(block_tokens=block_tokens, parts=[pb.Part(group="a", nbytes=1, rule=rule)])
    for count in (8, 64, 1024):
        parts = [pb.Part(group="g", rank=rank, nbytes=1, rule=rules[rank % 8]) for rank in range(count)]
        yield pb.Namespace(block_tokens=1, parts=parts)
    yield pb.Namespace(block_tokens=1, parts=[pb.Part(group="a", nbytes=1 << 63)])
    yield pb.Namespace(block_tokens=most, parts=[pb.Part(group="\0\x1b", nbytes=1 << 40)])


_FLOATS = (1e308, -1.0, float("nan"), float("inf"), 5e-324)


async def _use_namespace(client: AsyncClient, session: str, namespace: pb.Namespace, statuses: Counter[str]) -> None:
    """Registers, reserves, commits and matches, with estimates of impossible speeds."""
    cache = client.connection.cache

    async def call(method: Any, request: Any) -> Any:
        try:
            answer = await method(request, timeout=20.0)
        except grpc.aio.AioRpcError as error:
            statuses[error.code().name] += 1
            return None
        statuses["OK"] += 1
        return answer

    registered = await call(
        cache.RegisterNamespace, pb.RegisterNamespaceRequest(namespace=namespace, session_id=session)
    )
    if registered is None:
        return
    tokens = np.arange(64 * min(namespace.block_tokens, 64), dtype=np.uint32).tobytes()
    common = {"session_id": session, "namespace_id": registered.namespace_id, "token_ids": tokens}
    reserved = await call(cache.Reserve, pb.ReserveRequest(**common))
    if reserved is not None and reserved.reservation_id:
        done = pb.CommitRequest(session_id=session, reservation_id=reserved.reservation_id, blocks=reserved.blocks)
        await call(cache.Commit, done)
    for number in _FLOATS:
        prefill = pb.Prefill(pass_s=number, token_s=-number, pair_s=number)
        await call(cache.Match, pb.MatchRequest(**common, prefill=prefill))
    leased = await call(cache.Acquire, pb.AcquireRequest(**common, prefill=pb.Prefill(pair_s=1e308)))
    if leased is not None and leased.lease_id:
        await call(cache.Release, pb.ReleaseRequest(session_id=session, lease_id=leased.lease_id))
    await asyncio.sleep(0)


def _sdk_spec(namespace: pb.Namespace) -> NamespaceSpec:
    parts = tuple(PartSpec(part.group, part.rank, part.nbytes) for part in namespace.parts)
    return NamespaceSpec(namespace.name, namespace.block_tokens, parts, dtype=namespace.dtype, layout=namespace.layout)
