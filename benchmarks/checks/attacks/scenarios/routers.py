"""Attacks on cache-aware routers, to which the daemon announces its blocks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from benchmarks.checks.attacks.attacker import Given, Mallory
from benchmarks.checks.attacks.scenario import Scenario
from benchmarks.checks.attacks.scene import Scene, fresh_prompt
from benchmarks.common.harness import free_port
from prefixd.client import NamespaceSpec, PartSpec

_LISTEN_S = 8.0
_POLL_MS = 100
_AGAIN_S = 2.0
_PROMPT = 4040  # the number of the prompt that Mallory claims


class _WithRouters(Scenario):
    """The daemon announces its blocks to routers at a TCP port of loopback."""

    closed_by = "tests/server/kv_events/test_kv_announcer.py"
    endpoint: ClassVar[str] = ""
    """The endpoint of the daemon that runs; these scenarios share the daemon."""

    def daemon_settings(self, folder: Path) -> Mapping[str, object]:
        """Opens an endpoint. A new subscriber makes the daemon announce everything again, at most every two seconds."""
        _WithRouters.endpoint = f"tcp://127.0.0.1:{free_port()}"
        return {"events.endpoint": self.endpoint, "events.again_s": _AGAIN_S}

    def receive_events(self) -> list[dict[str, Any]]:
        """Returns the events that an honest router receives in the next 8 s."""
        events: list[dict[str, Any]] = []
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            socket = context.socket(zmq.SUB)
            socket.subscribe(b"")
            socket.connect(self.endpoint)
            end_s = time.monotonic() + _LISTEN_S
            while time.monotonic() < end_s:
                if socket.poll(_POLL_MS):
                    events += msgspec.msgpack.decode(socket.recv_multipart()[2])[1]
        finally:
            context.destroy(linger=0)
        return events


class ClaimedModel(_WithRouters):
    """Stores two bytes in a namespace with the name of the served model's, to attract the requests for that model."""

    name = "claimed model"

    def prepare(self, scene: Scene) -> Given:
        return {"served": scene.served().namespace.name}

    async def attack(self, mallory: Mallory) -> None:
        """Stores the blocks of a prompt that other tenants are about to send."""
        client = await mallory.client()
        cache = await client.register(NamespaceSpec(mallory.given["served"], 16, (PartSpec("full", 0, 2),)))
        stored = (await cache.store(fresh_prompt(_PROMPT), np.zeros(2 * 4, np.uint8))).committed
        await mallory.hold(stored=stored)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        if not facts.get("stored"):
            yield "the attacker stored nothing, so the attack did not take place"
        claimed = {tuple(block.tolist()) for block in fresh_prompt(_PROMPT).reshape(-1, 16)}
        for event in self.receive_events():
            tokens = np.array(event.get("token_ids", []), np.uint32)
            if event["type"] == "BlockStored" and claimed & {tuple(each.tolist()) for each in tokens.reshape(-1, 16)}:
                yield "a router gets the blocks of another tenant as KV of the served model"
                return


class ManySubscriptions(_WithRouters):
    """Subscribes again and again: each time the daemon announces everything again, to all routers."""

    name = "137 subscriptions"

    async def attack(self, mallory: Mallory) -> None:
        context = zmq.asyncio.Context()
        mallory.in_place(subscriptions="17 a second")
        try:
            while mallory.going:
                with context.socket(zmq.SUB) as socket:
                    socket.subscribe(b"")
                    socket.connect(mallory.given["endpoint"])
                    await asyncio.sleep(_LISTEN_S / 137)
        finally:
            context.destroy(linger=0)

    def prepare(self, scene: Scene) -> Given:
        return {"endpoint": self.endpoint}

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        begun = Counter(event["type"] for event in self.receive_events())["AllBlocksCleared"]
        if begun > (most := 2 + int(_LISTEN_S / _AGAIN_S)):
            yield f"the daemon announced everything {begun} times in {_LISTEN_S:g} s; at most {most} times is promised"
