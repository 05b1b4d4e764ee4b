"""One tenant's load, in a process of its own: `python -m benchmarks.checks.tenancy.tenant_load ADDRESS TENANT`.

The token comes with the first line of its standard input. Each line after it is an order in JSON, answered with a line
of JSON; it ends with its input. {"calls": 4, "requests": 2}: from now on 4 calls of the cache and 2 requests to
the model are under way, each followed by another when it has ended. {}: asks for the counts so far.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from benchmarks.checks.fuzzing.calls import FORGOTTEN
from benchmarks.common.background import step_back
from benchmarks.load.companion import Companion, order_lines
from prefixd.v1 import cache_pb2, cache_pb2_grpc, inference_pb2, inference_pb2_grpc

BLOCK_TOKENS, PART_BYTES = 16, 8192
KINDS = ("calls", "requests")
_FAMILIES = 6
_FAMILY_BLOCKS = 4
_LONGEST_TAIL = 6
_REPEATED = 0.5
_REMEMBERED = 400
_CHANNELS = 4  # a connection carries 256 calls
_VOCABULARY = 256
_TIMEOUT_S = 120.0
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


class TenantLoad(Companion):
    """Starts and controls the process; used in the harness."""

    def __init__(self, address: str, tenant: str, token: str) -> None:
        super().__init__("benchmarks.checks.tenancy.tenant_load", address, tenant)
        self.tell(token)

    def order(self, calls: int, requests: int) -> dict[str, Any]:
        self.tell(json.dumps({"calls": calls, "requests": requests}))
        return self.answer()

    def count(self) -> dict[str, Any]:
        """Returns the counts so far: `at_s` by `time.monotonic`, `done` and `refused` by kind, and the first
        `failures`."""
        self.tell("{}")
        return self.answer()


class Load:
    """Calls and requests of one tenant, as many at once as it is told.

    All tenants do the same, with the same code: a flood is more of it at once. A call's message is made of a few random
    bytes, so that the load takes little of the processor that it shares with the daemon.
    """

    def __init__(self, address: str, tenant: str, token: str) -> None:
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failures: list[str] = []
        self._rng = random.Random(f"tenants {tenant}")
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._tenant = tenant
        self._channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for _ in range(_CHANNELS)]
        self._caches = itertools.cycle([cache_pb2_grpc.PrefixCacheStub(channel) for channel in self._channels])
        self._models = itertools.cycle([inference_pb2_grpc.InferenceStub(channel) for channel in self._channels])
        self._families = [self._tokens(_FAMILY_BLOCKS) for _ in range(_FAMILIES)]
        self._known: list[bytes] = []
        self._named: dict[str, Any] = {}
        self._running: dict[str, list[asyncio.Task[None]]] = {kind: [] for kind in KINDS}
        self._work: list[Callable[[], Awaitable[None]]] = [self._put, self._get, self._match, self._lease]

    async def open(self) -> None:
        cache = next(self._caches)
        self._session = cache.OpenSession(
            cache_pb2.OpenSessionRequest(client_name=self._tenant, pid=os.getpid()), metadata=self._metadata
        )
        opened = (await self._session.read()).opened
        namespace = cache_pb2.Namespace(
            name="tenants", block_tokens=BLOCK_TOKENS, parts=[cache_pb2.Part(group="full", nbytes=PART_BYTES)]
        )
        registered = await cache.RegisterNamespace(
            cache_pb2.RegisterNamespaceRequest(session_id=opened.session_id, namespace=namespace),
            metadata=self._metadata,
        )
        self._named = {"session_id": opened.session_id, "namespace_id": registered.namespace_id}

    async def close(self) -> None:
        await self.order(dict.fromkeys(KINDS, 0))
        self._session.cancel()
        for channel in self._channels:
            await channel.close()

    async def order(self, wanted: dict[str, int]) -> None:
        """Sets the numbers of calls and requests that are under way. Cancels those beyond the new numbers."""
        for kind, count in wanted.items():
            running = self._running[kind]
            ended, running[count:] = running[count:], []
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)
            running += [asyncio.create_task(self._repeat(kind)) for _ in range(count - len(running))]

    async def _repeat(self, kind: str) -> None:
        while True:
            work = self._generate if kind == "requests" else self._rng.choice(self._work)
            try:
                await work()
                self.done[kind] += 1
            except grpc.aio.AioRpcError as error:
                # gRPC's client forgets the status that comes while it sends.
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED or error.details() in FORGOTTEN:
                    self.refused[kind] += 1
                else:
                    self.failures = [*self.failures, f"{self._tenant}: {error.code().name}: {error.details()}"][:20]
                    await asyncio.sleep(1.0)

    # -- calls ----------------------------------------------------------------------------------------------------

    async def _put(self) -> None:
        tokens = self._prompt()

        async def pieces() -> AsyncIterator[cache_pb2.PutRequest]:
            yield cache_pb2.PutRequest(header=cache_pb2.PutHeader(**self._named, token_ids=tokens))
            blocks = len(tokens) // 4 // BLOCK_TOKENS
            yield cache_pb2.PutRequest(data=bytes(PART_BYTES * blocks))

        await next(self._caches).Put(pieces(), metadata=self._metadata, timeout=_TIMEOUT_S)

    async def _get(self) -> None:
        request = cache_pb2.GetRequest(**self._named, token_ids=self._prompt())
        async for _ in next(self._caches).Get(request, metadata=self._metadata, timeout=_TIMEOUT_S):
            pass

    async def _match(self) -> None:
        request = cache_pb2.MatchRequest(**self._named, token_ids=self._prompt())
        await next(self._caches).Match(request, metadata=self._metadata, timeout=_TIMEOUT_S)

    async def _lease(self) -> None:
        """Leases the cached blocks of a prompt and releases them: two calls that count as one."""
        cache = next(self._caches)
        request = cache_pb2.AcquireRequest(**self._named, token_ids=self._prompt())
        leased = await cache.Acquire(request, metadata=self._metadata, timeout=_TIMEOUT_S)
        if leased.lease_id:
            release = cache_pb2.ReleaseRequest(session_id=self._named["session_id"], lease_id=leased.lease_id)
            await cache.Release(release, metadata=self._metadata, timeout=_TIMEOUT_S)

    async def _generate(self) -> None:
        """A few tokens for a prompt of which a part is known."""
        length = self._rng.choice((48, 80, 120))
        family = self._rng.randrange(_FAMILIES)
        prompt = [(family * 37 + at) % _VOCABULARY for at in range(64)]
        prompt += [self._rng.randrange(_VOCABULARY) for _ in range(length - 32)]
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=b"".join(token.to_bytes(4, "little") for token in prompt)),
            sampling=inference_pb2.SamplingParams(max_tokens=4, ignore_eos=True),
        )
        async for _ in next(self._models).Generate(request, metadata=self._metadata, timeout=_TIMEOUT_S):
            pass

    def _prompt(self) -> bytes:
        """Token ids: one of the last prompts, or a family's beginning and a tail of its own."""
        if self._known and self._rng.random() < _REPEATED:
            return self._rng.choice(self._known)
        tokens = self._rng.choice(self._families) + self._tokens(self._rng.randint(1, _LONGEST_TAIL))
        self._known = [*self._known[-_REMEMBERED:], tokens]
        return tokens

    def _tokens(self, blocks: int) -> bytes:
        return self._rng.randbytes(4 * BLOCK_TOKENS * blocks)


async def _serve(address: str, tenant: str) -> None:
    orders = await order_lines()
    load = Load(address, tenant, (await orders.readline()).decode().strip())
    await load.open()
    while line := await orders.readline():
        if order := json.loads(line):
            await load.order(order)
        counted = {"done": dict(load.done), "refused": dict(load.refused), "failures": load.failures}
        print(json.dumps({"at_s": time.monotonic(), **counted}), flush=True)
    await load.close()


def main() -> None:
    """Runs the load."""
    address, tenant = sys.argv[1:]
    step_back(5)
    asyncio.run(_serve(address, tenant))


if __name__ == "__main__":
    main()
