"""Attacks on blocks that several tenants have computed and that are common to all (`cache.share_after`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np

from benchmarks.checks.attacks.attacker import Given, Mallory
from benchmarks.checks.attacks.people import ALICE, BOB, CAROL, MIB
from benchmarks.checks.attacks.scenario import Scenario
from benchmarks.checks.attacks.scene import Scene, fresh_bytes, fresh_prompt
from prefixd.client import AsyncClient, NamespaceSpec, PartSpec

_SHARED = NamespaceSpec("shared", 16, (PartSpec("full", 0, 8192),))
_COMMON = "(common)"
_MOST_BYTES = 8 * MIB
_COMMON_S = 20.0  # most time that the daemon's background task has to make blocks common
_POLL_S = 0.1


class _WithCommonBlocks(Scenario):
    """Blocks that two tenants have computed become common."""

    settings: ClassVar[Mapping[str, object]] = {"cache.share_after": 2, "cache.common_bytes": _MOST_BYTES}
    closed_by = "tests/cache/background/test_common_blocks.py"


class Colluders(_WithCommonBlocks):
    """Mallory and Carol store the same blocks, new ones each time, to have more bytes in the cache than they may."""

    name = "colluders"
    blocks = 64

    def prepare(self, scene: Scene) -> Given:
        return {"carol": scene.token(CAROL), "first": 10_000 * scene.next()}

    async def attack(self, mallory: Mallory) -> None:
        together = [await mallory.client()]
        async with AsyncClient(mallory.tcp, name="carol", memory="streamed", token=mallory.given["carol"]) as carol:
            together.append(carol)
            caches = [await client.register(_SHARED) for client in together]
            for number in range(mallory.given["first"], mallory.given["first"] + 80):
                for cache in caches:
                    await cache.store(fresh_prompt(number, self.blocks), fresh_bytes(number, self.blocks))
            await mallory.hold(stored_mib=80 * self.blocks * 8192 // MIB)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        yield from self._find_excess(scene)

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        scene.pause()
        scene.restart()
        yield from (f"after a restart, {breach}" for breach in self._find_excess(scene))
        scene.resume()

    def _find_excess(self, scene: Scene) -> Iterable[str]:
        with scene.operator() as operator:
            for tenant in operator.tenants():
                for tier in tenant.tiers if tenant.name == _COMMON else ():
                    if tier.used_bytes > _MOST_BYTES:
                        yield f"common blocks take {tier.used_bytes // MIB} MiB of a tier, not {_MOST_BYTES // MIB}"


class ForgottenComputations(_WithCommonBlocks):
    """Stores 147,456 blocks of one byte, so that the daemon forgets which tenant has computed which block."""

    name = "forgotten computations"

    def prepare(self, scene: Scene) -> Given:
        self._number = scene.next()
        with scene.client(ALICE) as client:
            client.register(_SHARED).store(fresh_prompt(self._number), fresh_bytes(self._number))
        return {}

    async def attack(self, mallory: Mallory) -> None:
        client = await mallory.client()
        cache = await client.register(NamespaceSpec("bytes", 1, (PartSpec("full", 0, 1),)))
        for call in range(36):
            tokens = np.arange(4096, dtype=np.uint32) + call * 4096
            await cache.store(tokens, np.zeros(4096, np.uint8))
        await mallory.hold(blocks=36 * 4096)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        tokens, content = fresh_prompt(self._number), fresh_bytes(self._number)
        with scene.client(BOB) as bob:
            bob.register(_SHARED).store(tokens, content)
        with scene.client(CAROL) as carol:
            cache = carol.register(_SHARED)
            end_s = time.monotonic() + _COMMON_S
            while not (found := cache.match(tokens).blocks) and time.monotonic() < end_s:
                time.sleep(_POLL_S)
        if not found:
            yield "blocks that two tenants have computed do not become common after a third tenant stored many blocks"
