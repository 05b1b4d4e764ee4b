"""Objects of a shared store that change, and hosts that read them."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checks.damaged_store.object_damage import Flip, StoredPaths, draw
from benchmarks.checks.damaged_store.rot import DamagedPrompts, RotFindings
from benchmarks.checks.damaged_store.stored_objects import BlockId, block_id, read_objects
from benchmarks.common import harness
from benchmarks.load.world import Prompt, prompts, store_prompt
from benchmarks.sharing.hosts import Secrets, cache_host, lost_in_store, remote_stats, sharing, wait_until_shared
from benchmarks.sharing.valkey_server import ValkeyObjects, ValkeyServer, valkey_objects
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.client.connecting.session import MemoryMode
from prefixd_swap.stores.sealed import Seal

NUMBERS = 40  # prompts of each namespace
ROUND = 50  # flips in a round, less in the last
_CPU_BYTES = 256 << 20
_REPAIR_S = 30.0


@dataclass(slots=True)
class Findings(RotFindings):
    """Of a host that reads, and of the next one."""

    ZEROS = ("not_repaired",)

    not_repaired: int = 0
    """Prompts that a host stored again, and that the next cold host still does not get whole."""
    bad_objects: Counter[str] = field(default_factory=Counter)
    """As the daemons counted them."""

    def more(self) -> dict[str, Any]:
        return {"not_repaired": self.not_repaired, "bad_objects": dict(sorted(self.bad_objects.items()))}


class RemoteRot:
    """A store that a first host has filled: damaged, read by a cold host, and put back as it was, again and again."""

    def __init__(
        self,
        objects: ValkeyObjects,
        settings: dict[str, object],
        seal: Seal,
        numbers: int,
        findings: Findings,
    ) -> None:
        # What is attacked is bytes: a lookup is waited for as long as it takes.
        self._settings = settings | {"remote.lookup_s": 10.0, "remote.timeout_s": 10.0}
        self._objects = objects
        self._findings = findings
        chosen = list(prompts(numbers))
        objects.delete_all()
        with self._host() as host, Client(host.address) as client:
            for prompt in chosen:
                store_prompt(client, prompt)
            ids = {spec: client.register(spec).namespace_id for spec in {prompt.spec for prompt in chosen}}
            self._paths = {prompt: _path(ids[prompt.spec], prompt) for prompt in chosen}
            blocks = {block: prompt.spec for prompt, path in self._paths.items() for block in path}
            wait_until_shared(client, len(blocks))
        self._reader = DamagedPrompts(self._paths, findings)
        self._stored = StoredPaths(read_objects(objects, blocks, seal))
        if set(self._stored.objects) != set(blocks):
            raise harness.BenchmarkError(
                f"{len(blocks)} blocks were stored, {len(self._stored.objects)} are in the store"
            )

    def round(self, wanted: int, memory: MemoryMode, rng: random.Random) -> int:
        """Flips about `wanted` blocks and has a cold host read everything; how many it hit."""
        flips = draw(self._stored, wanted, rng)
        hit = {block for flip in flips for block in flip.blocks}
        self._objects.write([write for flip in flips for write in flip.writes])
        with self._host() as host, Client(host.address, memory=memory) as client:
            detected = self._read_everything(client, hit)
            for flip in flips:
                self._findings.flips[flip.kind] += len(flip.blocks)
                self._findings.notes += [
                    f"a {flip.kind} in block {block[1][-4:].hex()} was not detected"
                    for block in flip.blocks
                    if block not in detected
                ]
            self._findings.detected["read"] += len(detected)
            self._reader.store_again(client, hit)
            self._wait_for_repair(flips)
            self._findings.bad_objects.update(remote_stats(client).bad_objects)
            self._findings.violations += client.check_integrity().violations
        self._look_for_repair(hit)
        self._restore(flips)
        return len(hit)

    def _read_everything(self, client: Client, hit: set[BlockId]) -> set[BlockId]:
        """Reads every prompt: what comes is right, and ends just before the first block that was hit.

        Returns the blocks that the host has noticed and never served; it reads each once and remembers.
        """
        noticed: set[BlockId] = set()
        served: set[BlockId] = set()
        lost_before = 0
        for prompt, path in self._paths.items():
            there, sound = self._reader.read_damaged(client, prompt, hit)
            if sound < len(path):
                if there != sound:
                    served.add(path[sound])
                elif (lost := lost_in_store(client)) > lost_before:
                    noticed.add(path[sound])
                    lost_before = lost
        return noticed - served

    def _wait_for_repair(self, flips: list[Flip]) -> None:
        """Until the host has written right objects in place of the damaged ones, or a while has passed."""
        damaged = dict(write for flip in flips for write in flip.writes)

        def repaired() -> bool:
            found = zip(damaged.values(), self._objects.read(list(damaged)), strict=True)
            return all(data not in (b"", wrong) for wrong, data in found)

        harness.wait_until(repaired, _REPAIR_S)

    def _look_for_repair(self, hit: set[BlockId]) -> None:
        """The next cold host finds what the last one has stored again."""
        before = self._findings.read_blocks
        with self._host() as host, Client(host.address) as client:
            for prompt, path in self._paths.items():
                if not hit.isdisjoint(path):
                    there, wrong = self._reader.read(client, prompt)
                    self._findings.served_wrong += wrong
                    self._findings.not_repaired += there < len(path)
        self._findings.read_blocks = before

    def _restore(self, flips: list[Flip]) -> None:
        right = {each.name: each.data for parts in self._stored.objects.values() for each in parts}
        self._objects.write([(name, right[name]) for flip in flips for name, _ in flip.writes])

    def _host(self) -> DaemonProcess:
        return cache_host(_CPU_BYTES, self._settings)


def _path(namespace_id: bytes, prompt: Prompt) -> list[BlockId]:
    width = prompt.spec.block_tokens
    return [block_id(namespace_id, prompt.tokens, (at + 1) * width) for at in range(prompt.blocks)]


def run(flips: int, seed: int, step: Callable[[int], None] = lambda hit: None, numbers: int = NUMBERS) -> Findings:
    """Flips in `flips` blocks, half of them encrypted; `step` is called with how many after each round.

    There are `numbers` prompts in each namespace.
    """
    findings, rng = Findings(), random.Random(f"remote rot {seed}")
    with tempfile.TemporaryDirectory(prefix="prefixd-rot-") as folder, ValkeyServer(Path(folder) / "valkey") as valkey:
        secrets = Secrets(Path(folder))
        with valkey_objects(valkey.port) as objects:
            for encrypt, most in ((False, -(-flips // 2)), (True, flips)):
                if findings.flips.total() == most:
                    continue
                settings = sharing(valkey.port, secrets, encrypt=encrypt)
                rot = RemoteRot(objects, settings, secrets.seal(encrypt=encrypt), numbers, findings)
                rounds = 0
                while (left := most - findings.flips.total()) > 0:
                    hit = rot.round(min(left, ROUND), "auto" if rounds % 2 else "streamed", rng)
                    rounds += 1
                    step(hit)
    return findings
