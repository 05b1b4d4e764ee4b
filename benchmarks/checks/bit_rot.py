"""Changes bytes on disk, and checks that all damage is found.

With --tier disk (the default), changes bytes of blocks in a daemon's disk tier: single bits, four bytes,
sectors, ranges that read as zeros,
what another block had, two blocks in each other's place, files that end too early; in blocks of several
sizes, parts and namespaces; while the daemon runs, and before it starts. Each flip hits another block, none
of which continues another one. They are then to be found by reading, by `prefixd verify`, or by the scrubber.

A flip counts as detected when its block was reported (by key, by verify), dropped before anybody read it
(scrubber), or refused to a reader as a miss. served_wrong counts blocks that a client was given with a wrong
byte, lost_sound those that were not hit and could not be read all the same. Every prompt is read and
compared byte by byte after each round, what was dropped is stored again, and the daemon has to account for
its slots.

In rounds of their own, bits of the index's file are flipped (index_flips). That may cost blocks, or all of
them; but a wrong byte is never served (index_wrong), and the daemon starts again (index_failures).

With --tier remote, changes objects in a real Valkey that a first host has filled, half of them encrypted: bits
of head and payload, four bytes, zeros, another block's object, two in each other's place, another version's
head, objects cut short or too long. A cold host then reads every prompt. A flip counts as detected when that
host counted its block as lost and served what comes before it, and nothing more. not_repaired counts prompts
that a host stored again, and that the next cold host still does not get whole.

Then an attacker that may read and write the store, but lacks the secret, puts made-up blocks there
(forged): sealed with a secret of its own, replayed from other blocks, parts and tenants, with the right head or
tag. Each is read by a host (forged_refused); forged_served has to be 0, and the right objects, put back, are
served.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.checks.damaged_store import forged, remote_rot
from benchmarks.checks.damaged_store.rot import DamagedPrompts, RotFindings
from benchmarks.common import harness
from benchmarks.common.options import option, seed
from benchmarks.load.world import block_key, prompts, store_prompt
from benchmarks.storage.bit_flips import Flip, Stored, StoredBlocks, draw
from benchmarks.storage.key_file import keys_of_file, write_key_file
from prefixd.cli.demo.daemon_process import DaemonFailed, DaemonProcess
from prefixd.client import Client, NotFoundError, ServerUnavailable
from prefixd.client.connecting.session import MemoryMode

_NUMBERS = 40  # prompts of each namespace
_CPU_BYTES, _DISK_BYTES = 12 << 20, 256 << 20
_ROUND = 42  # flips in a round, less in the last
_INDEX_ROUND = 6
_WAIT_S = 60.0
_STARTS = 3

Way = Literal["read", "verify", "scrub"]
WAYS: tuple[Way, ...] = ("read", "verify", "scrub")


@dataclass(slots=True)
class Findings(RotFindings):
    """Findings that include flips in the index."""

    ZEROS = ("index_wrong", "index_failures")

    index_flips: int = 0
    index_wrong: int = 0
    index_failures: int = 0
    """Daemons that did not start, or died, because of it."""
    index_kept_blocks: int = 0
    index_lost_blocks: int = 0
    index_violations: int = 0
    """Rounds after which the index does not name what the daemon has: `prefixd doctor` says so."""

    def more(self) -> dict[str, Any]:
        index = {name: getattr(self, name) for name in Findings.__slots__}
        return {**index, "detected_by": dict(sorted(self.detected.items()))}


class Rot:
    """One data directory: filled once, damaged, looked through, and put back as it was, again and again."""

    def __init__(
        self, directory: Path, findings: Findings, rng: random.Random, numbers: int, *, encrypted: bool
    ) -> None:
        self._directory = directory
        self._key_file = write_key_file(directory / "keys") if encrypted else None
        self._findings = findings
        self._rng = rng
        self._prompts = list(prompts(numbers))
        self._blocks = directory / "data/blocks"
        self._pristine = directory / "pristine"
        with self._daemon({}) as daemon:
            self._fill(daemon)
        shutil.copytree(self._blocks, self._pristine)
        self._stored = StoredBlocks(self._blocks, _DISK_BYTES, keys_of_file())
        self._paths = {prompt: [block_key(prompt, block) for block in range(prompt.blocks)] for prompt in self._prompts}
        keys = {key for path in self._paths.values() for key in path}
        if keys != set(self._stored.blocks):
            raise harness.BenchmarkError(f"{len(keys)} blocks were stored, {len(self._stored.blocks)} are on disk")
        self._reader = DamagedPrompts(self._paths, findings)

    # -- blocks -----------------------------------------------------------------------------------------------------

    def round(self, wanted: int, way: Way, running: bool, memory: MemoryMode) -> int:
        """Flips about `wanted` blocks, has them found in that way, and looks at everything; how many it hit.

        The client maps the daemon's memory, or has the bytes streamed.
        """
        self._restore()
        flips = draw(self._stored, wanted, self._rng)
        hit = [block for flip in flips for block in flip.blocks]
        settings: dict[str, object] = {}
        if way == "scrub":
            settings = {"disk.scrub_bytes_per_s": "2GiB", "disk.scrub_every_s": 0.1}
        if not running:
            _apply(flips)
        with self._daemon(settings) as daemon, Client(daemon.address, memory=memory) as client:
            if running:
                _apply(flips)
                dropped: set[str] = set()
            else:
                dropped = _gone(client, hit)  # at the start: their file had lost them
            self._findings.detected["start"] += len(dropped)
            left = [block for block in hit if block.key not in dropped]
            if way == "verify":
                reported = {block.key for progress in client.verify() for block in progress.damaged}
                self._count(way, left, reported & {block.key for block in left})
                sound = reported - {block.key for block in hit}
                self._findings.lost_sound += len(sound)
                self._findings.notes += [f"verify reported a sound block: {key}" for key in sound]
            elif way == "scrub":
                _wait_for_a_pass(client)
                self._count(way, left, _gone(client, left))
            keys = {block.key for block in hit}
            for prompt in self._prompts:
                self._reader.read_damaged(client, prompt, keys)
            if way == "read":
                self._count(way, left, _gone(client, left))
            self._reader.store_again(client, keys)
            self._findings.violations += client.check_integrity().violations
        for flip in flips:
            self._findings.flips[flip.kind] += len(flip.blocks)
        return len(hit)

    def _count(self, way: Way, hit: Sequence[Stored], found: set[str]) -> None:
        self._findings.detected[way] += len(found)
        missed = [block.key for block in hit if block.key not in found]
        self._findings.notes += [f"{way} did not find {key}" for key in missed]

    # -- the index --------------------------------------------------------------------------------------------------

    def index_round(self, flips: int) -> None:
        """Flips bits of the index's file and reads everything."""
        findings = self._findings
        self._restore()
        file = self._blocks / "index/data.mdb"
        data = bytearray(file.read_bytes())
        for _ in range(flips):
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        file.write_bytes(data)
        findings.index_flips += flips
        kept = 0
        for _ in range(_STARTS):
            try:
                with self._daemon({}) as daemon:
                    kept = self._read_index_round(daemon.address)
                break
            except (DaemonFailed, ServerUnavailable) as error:
                findings.index_failures += 1
                findings.notes.append(f"flips in the index: {error}")
        findings.index_kept_blocks += kept
        findings.index_lost_blocks += sum(len(path) for path in self._paths.values()) - kept

    def _read_index_round(self, address: str) -> int:
        kept = 0
        with Client(address) as client:
            for prompt in self._prompts:
                there, wrong = self._reader.read(client, prompt)
                self._findings.index_wrong += wrong
                kept += there
            violations = client.check_integrity().violations
            self._findings.index_violations += bool(violations)
            self._findings.notes += [f"flips in the index: {violation}" for violation in violations]
        return kept

    # -- the daemon ---------------------------------------------------------------------------------------------------

    def _daemon(self, settings: dict[str, object]) -> DaemonProcess:
        sizes = {"cpu.bytes": _CPU_BYTES, "disk.bytes": _DISK_BYTES, "disk.scrub_bytes_per_s": 0}
        keys = {} if self._key_file is None else {"disk.encryption_key_file": self._key_file}
        return DaemonProcess({**sizes, **keys, **settings}, directory=self._directory)

    def _fill(self, daemon: DaemonProcess) -> None:
        with Client(daemon.address) as client, harness.progress("prompts stored", len(self._prompts)) as step:
            for prompt in self._prompts:
                store_prompt(client, prompt, durable=True)
                step()

    def _restore(self) -> None:
        shutil.rmtree(self._blocks)
        shutil.copytree(self._pristine, self._blocks)


def _apply(flips: Sequence[Flip]) -> None:
    for flip in flips:
        flip.apply()


def _gone(client: Client, blocks: Sequence[Stored]) -> set[str]:
    """Keys of the blocks of which the daemon has no bytes, in any tier."""
    gone = set()
    for block in blocks:
        try:
            there = bool(client.inspect(block.key).blocks[-1].tiers)
        except NotFoundError:
            there = False
        if not there:
            gone.add(block.key)
    return gone


def _wait_for_a_pass(client: Client) -> None:
    """Waits until the scrubber has gone through everything once more, from the beginning."""
    wanted = client.stats().scrub.passes + 2
    if not harness.wait_until(lambda: client.stats().scrub.passes >= wanted, _WAIT_S):
        raise harness.BenchmarkError(f"the scrubber did not go through everything within {_WAIT_S:g} s")


def run(
    flips: int,
    index_flips: int,
    seed: int,
    step: Callable[[int], None] = lambda hit: None,
    numbers: int = _NUMBERS,
    *,
    encrypted: bool = False,
) -> Findings:
    """Flips in `flips` blocks and `index_flips` bits of the index; `step` is called with how many after each round.

    There are `numbers` prompts in each namespace.
    """
    findings = Findings()
    rng = random.Random(f"bit rot {seed}")
    with tempfile.TemporaryDirectory(prefix="prefixd-rot-") as folder:
        rot = Rot(Path(folder), findings, rng, numbers, encrypted=encrypted)
        rounds = max(-(-flips // _ROUND), min(flips, 2 * len(WAYS)))
        for number in range(rounds):
            left = flips - findings.flips.total()
            wanted = -(-left // (rounds - number))
            way, running = WAYS[number % len(WAYS)], number // len(WAYS) % 2 == 1
            step(rot.round(wanted, way, running, "auto" if number % 2 else "streamed"))
        while findings.index_flips < index_flips:
            wanted = min(_INDEX_ROUND, index_flips - findings.index_flips)
            rot.index_round(wanted)
            step(wanted)
    return findings


@harness.benchmark(
    "checks.bit_rot",
    __doc__,
    option("--tier", "disk", "whose bytes", str, choices=("disk", "remote")),
    option("--flips", 500, "blocks to damage"),
    option("--at-rest", "clear", "disk: how blocks are stored", str, choices=("clear", "encrypted")),
    option("--index-flips", 120, "disk: bits of the index to flip"),
    option("--forged", 10_000, "remote: blocks to make up"),
    seed("of what is flipped where"),
    unrecorded=("at_rest", "index_flips", "forged"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Damages blocks of the chosen tier."""
    total = options.flips + (options.index_flips if options.tier == "disk" else options.forged)
    with harness.progress("flips", total) as step:

        def steps(hit: int) -> None:
            for _ in range(hit):
                step()

        if options.tier == "disk":
            encrypted = options.at_rest == "encrypted"
            findings = run(options.flips, options.index_flips, options.seed, steps, encrypted=encrypted)
            return harness.Outcome(findings.result(), findings.broken)
        flips = remote_rot.run(options.flips, options.seed, steps)
        made_up = forged.run(options.forged, options.seed, steps)
        return harness.Outcome({**flips.result(), **made_up.result()}, [*flips.broken, *made_up.broken])


if __name__ == "__main__":
    harness.run(main)
