"""An attacker that may write to the store but lacks the secret, against a host that reads its objects."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checks.damaged_store.forgery import KINDS, Forger
from benchmarks.checks.damaged_store.stored_objects import BlockId, StoredObject, block_id, read_objects
from benchmarks.common import harness
from benchmarks.common.block_bytes import BlockBytes, Bytes, Tokens
from benchmarks.sharing.hosts import Secrets, cache_host, lost_in_store, sharing, wait_until_shared
from benchmarks.sharing.valkey_server import ValkeyObjects, ValkeyServer, valkey_objects
from prefixd.client import Client, NamespaceSpec, PartSpec
from prefixd.client.connecting.session import MemoryMode
from prefixd_swap.stores.sealed import Seal

BLOCKS = 1000  # that are forged again and again
_BLOCK_TOKENS = 16
_PARTS = (PartSpec("full", 0, 2048), PartSpec("window", 0, 2048))
_TENANTS = (
    NamespaceSpec("forged", _BLOCK_TOKENS, _PARTS, salt=b"one"),
    NamespaceSpec("forged", _BLOCK_TOKENS, _PARTS, salt=b"two"),
)
_CPU_BYTES = 64 << 20
_MOST_NOTES = 20


@dataclass(frozen=True, slots=True)
class Target:
    """A prompt whose last block is forged: the only one, or the second."""

    tenant: int
    tokens: Tokens

    @property
    def sound(self) -> int:
        return len(self.tokens) // _BLOCK_TOKENS - 1

    def content(self) -> Bytes:
        return BlockBytes(_TENANTS[self.tenant], self.tokens).content()


@dataclass(slots=True)
class Findings:
    """The results of the forgeries."""

    forged: Counter[str] = field(default_factory=Counter)
    """Blocks, by kind."""
    refused: int = 0
    """Of them, those that a host read, counted as lost, and did not serve."""
    served: int = 0
    lost_sound: int = 0
    """Blocks before a forged one, and right objects put back at the end, that were not served."""
    notes: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        """Promises that were not kept, and forgeries that were never read, which prove nothing."""
        result = {**self.result(), "forged_not_refused": self.forged.total() - self.refused}
        return harness.missed(result, zero=("forged_served", "forged_lost_sound", "forged_not_refused"))

    def result(self) -> dict[str, Any]:
        return {
            "forged": self.forged.total(),
            "forged_refused": self.refused,
            "forged_served": self.served,
            "forged_lost_sound": self.lost_sound,
            "forged_by_kind": dict(sorted(self.forged.items())),
            "forged_found": self.notes[:_MOST_NOTES],
        }


class Attack:
    """A store that a host has filled, and an attacker at it."""

    def __init__(
        self,
        objects: ValkeyObjects,
        settings: dict[str, object],
        seal: Seal,
        blocks: int,
        findings: Findings,
        rng: random.Random,
    ) -> None:
        # The attack is on bytes, not on deadlines.
        self._settings = settings | {"remote.lookup_s": 10.0, "remote.timeout_s": 10.0}
        self._objects = objects
        self._findings = findings
        self._rng = rng
        self._targets = _targets(blocks)
        objects.delete_all()
        with cache_host(_CPU_BYTES, self._settings) as host, Client(host.address) as client:
            caches = [client.register(spec) for spec in _TENANTS]
            ids = [cache.namespace_id for cache in caches]
            wanted: dict[BlockId, NamespaceSpec] = {}
            for target in self._targets:
                caches[target.tenant].store(target.tokens, target.content())
                wanted |= {
                    block_id(ids[target.tenant], target.tokens, end * _BLOCK_TOKENS): _TENANTS[target.tenant]
                    for end in range(1, target.sound + 2)
                }
            wait_until_shared(client, len(wanted))
        self._stored = read_objects(objects, wanted, seal)
        self._blocks = [block_id(ids[each.tenant], each.tokens, len(each.tokens)) for each in self._targets]
        self._forger = Forger(self._stored, rng)

    def round(self, first: int, count: int) -> None:
        """Forges one part of each of `count` blocks, in ways from number `first` on, and has a cold host ask for
        them; then puts the right objects back."""
        writes, kinds, right = [], [], []
        for at, block in enumerate(self._blocks[:count]):
            victim = self._rng.choice(self._stored[block])
            kind, forged = self._forged(first + at, victim)
            writes.append((victim.name, forged))
            right.append((victim.name, victim.data))
            kinds.append(kind)
        self._objects.write(writes)
        memory: MemoryMode = "auto" if first // count % 2 else "streamed"
        with cache_host(_CPU_BYTES, self._settings) as host, Client(host.address, memory=memory) as client:
            caches = [client.register(spec) for spec in _TENANTS]
            lost_before = 0
            for target, kind in zip(self._targets, kinds, strict=False):
                got = np.zeros(len(target.content()), np.uint8)
                there = caches[target.tenant].load(target.tokens, got)
                self._findings.forged[kind] += 1
                lost = lost_in_store(client)
                self._judge(target, kind, there, got, lost > lost_before)
                lost_before = lost
        self._objects.write(right)

    def control(self) -> None:
        with cache_host(_CPU_BYTES, self._settings) as host, Client(host.address) as client:
            caches = [client.register(spec) for spec in _TENANTS]
            for target in self._targets:
                got = np.zeros(len(target.content()), np.uint8)
                there = caches[target.tenant].load(target.tokens, got)
                right = there == target.sound + 1 and np.array_equal(got, target.content())
                self._findings.lost_sound += not right

    def _forged(self, number: int, target: StoredObject) -> tuple[str, bytes]:
        for kind in (KINDS[number % len(KINDS)], "random"):
            forged = self._forger.forge(kind, target)
            if forged is not None:
                if forged == target.data:
                    raise harness.BenchmarkError(f"the forger ({kind}) has made the right object")
                return kind, forged
        raise harness.BenchmarkError("nothing could be forged")

    def _judge(self, target: Target, kind: str, there: int, got: Bytes, lost: bool) -> None:
        findings, size = self._findings, _TENANTS[0].block_bytes
        wrong = not np.array_equal(got[: there * size], target.content()[: there * size])
        if there > target.sound or wrong:
            findings.served += 1
            findings.notes.append(f"{kind}: {there} blocks were served{', with wrong bytes' if wrong else ''}")
        elif not lost:
            findings.notes.append(f"{kind}: it was not read")
        else:
            findings.refused += 1
            findings.lost_sound += target.sound - there


def _targets(blocks: int) -> list[Target]:
    """Returns `blocks` prompts, the same ones for both tenants; in every second pair a sound block precedes the
    last."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 1 << 32, _BLOCK_TOKENS, dtype=np.uint32)
    targets = []
    for number in range(-(-blocks // 2)):
        own = rng.integers(0, 1 << 32, _BLOCK_TOKENS, dtype=np.uint32)
        tokens = own if number % 2 else np.concatenate([first, own])
        targets += [Target(tenant, tokens) for tenant in range(len(_TENANTS))]
    return targets[:blocks]


def run(forged: int, seed: int, step: Callable[[int], None] = lambda made: None, blocks: int = BLOCKS) -> Findings:
    """Forges `forged` blocks, half of them where blocks are encrypted, `blocks` in a round."""
    findings, rng = Findings(), random.Random(f"forged {seed}")
    halves: Sequence[tuple[bool, int]] = ((False, -(-forged // 2)), (True, forged))
    with tempfile.TemporaryDirectory(prefix="prefixd-forged-") as folder, ValkeyServer(Path(folder)) as valkey:
        secrets = Secrets(Path(folder))
        with valkey_objects(valkey.port) as objects:
            for encrypt, most in halves:
                if findings.forged.total() >= most:
                    continue
                settings = sharing(valkey.port, secrets, encrypt=encrypt)
                attack = Attack(objects, settings, secrets.seal(encrypt=encrypt), blocks, findings, rng)
                while (left := most - findings.forged.total()) > 0:
                    attack.round(findings.forged.total(), min(left, blocks))
                    step(min(left, blocks))
                attack.control()
    return findings
