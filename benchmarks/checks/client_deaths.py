"""Kills clients in the middle of their work, while other clients go on.

Kills client processes with SIGKILL at random moments: while they connect, between reserve and commit, in
the middle of a copy into the shared arena, between acquire and release, in the middle of a streamed put or
get, while the daemon writes to disk for them, and with eight calls of all kinds under way. Several live at
a time; two others work on, one through shared memory and one streamed, and none of their calls may fail
and no byte that they read may be wrong. Clients that share memory are of the default tenant; the one that
streams and half of the victims that do are of another tenant, over TCP. Both have quotas.

After each kill the session of the dead must end within --patience seconds (leaked_leases: leases and
reservations in those that did not). Every --check kills the load pauses, and all that is left in use, held,
in flight or in quarantine is a leak (leaked_slots, in slots of 4 KiB), and the daemon accounts for all
slots. Nothing ends by expiry meanwhile. At the end everything is evicted and no byte may stay in use, and
no tenant may have anything left that counts for its quotas.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from benchmarks.checks.tenancy.house import House, tenanted_daemon
from benchmarks.checks.tenancy.left_behind import left_of_tenants
from benchmarks.common import harness
from benchmarks.common.daemons import violations_of
from benchmarks.common.options import option, seed
from benchmarks.load.mixed_load import LoadPlan, Tally
from benchmarks.load.process import LoadProcess, tell_all
from benchmarks.load.victim import SCENES, STREAMED_SCENES
from prefixd.base.tenancy.tenants import Role
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.v1 import admin_pb2

_SETTINGS: dict[str, object] = {"cpu.bytes": "48MiB", "disk.bytes": "64MiB", "server.lease_ttl_s": 900}
_COUNTS: dict[str, object] = {"sessions": 32, "grants": 1024, "namespaces": 32, "calls": 256}
_QUOTAS: dict[str, dict[str, object]] = {
    "default": {"cpu_guaranteed": "16MiB", "cpu_most": "40MiB", "disk_guaranteed": "16MiB", "disk_most": "56MiB"}
    | _COUNTS,
    "other": {"cpu_guaranteed": "8MiB", "cpu_most": "32MiB", "disk_guaranteed": "8MiB", "disk_most": "48MiB"} | _COUNTS,
}
_AT_ONCE = 4
_SLOT_BYTES = 4096
_POLL_S = 0.005
_ZEROS = ("leaked_slots", "leaked_leases", "left_of_tenants", "failed_calls", "wrong_bytes", "integrity_violations")


@dataclass(slots=True)
class Findings:
    """Leftovers of the killed clients."""

    kills: Counter[str] = field(default_factory=Counter)
    """By scene of the victim."""
    leaked_leases: int = 0
    leaked_bytes: int = 0
    violations: list[str] = field(default_factory=list)
    checks: int = 0
    noticed_s: list[float] = field(default_factory=list)
    """From a kill until the daemon had ended the session of the dead."""
    tally: Tally = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)
    left_of_tenants: list[str] = field(default_factory=list)
    """Sessions, grants and so on that still count for a tenant's quotas after all clients have ended."""

    @property
    def failed_calls(self) -> int:
        """Calls of the other clients that failed; a refusal for want of room is a failure, too."""
        return self.tally.failed_calls + self.tally.refused.total()

    @property
    def broken(self) -> list[str]:
        return harness.missed(self.result(), zero=_ZEROS)

    def result(self) -> dict[str, Any]:
        return {
            "kills": self.kills.total(),
            "kills_by_scene": dict(self.kills),
            "leaked_slots": -(-self.leaked_bytes // _SLOT_BYTES),
            "leaked_leases": self.leaked_leases,
            "left_of_tenants": len(self.left_of_tenants),
            "failed_calls": self.failed_calls,
            "wrong_bytes": self.tally.wrong_bytes,
            "integrity_violations": len(self.violations),
            "checks": self.checks,
            "calls_of_others": self.tally.calls.total(),
            "verified_bytes": self.tally.verified_bytes,
            **harness.median_and_most("noticed", self.noticed_s),
            "found": [*self.notes, *self.left_of_tenants, *self.violations, *self.tally.wrong, *self.tally.failures],
        }


class VictimProcess:
    """A victim, from its start to its death."""

    def __init__(self, address: str, scene: str, owner: int, *token: str) -> None:
        self.scene = scene
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load.victim", address, scene, str(owner), *token],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_until_busy(self) -> None:
        """Returns when it has begun; BenchmarkError when it ended instead."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise self._ended_by_itself()

    def kill(self) -> None:
        """SIGKILL; BenchmarkError when it had ended by itself, so that its death shows nothing."""
        ended = self._process.poll() is not None
        self._process.kill()
        if ended:
            raise self._ended_by_itself()
        with self._process:
            pass

    def _ended_by_itself(self) -> harness.BenchmarkError:
        _, said = self._process.communicate()
        last = said.strip().splitlines()[-1:]
        return harness.BenchmarkError(f"a victim ({self.scene}) ended before it was killed: {''.join(last)}")


def in_use(stats: admin_pb2.StatsResponse, dead: Iterable[int] | None = None) -> tuple[int, int]:
    """(leases and reservations, bytes in flight, in quarantine or of held blocks) that sessions still have.

    With `dead`, only what the sessions of these processes have, a session counting as one, and no bytes, since the
    living have some, too.
    """
    if dead is not None:
        gone = set(dead)
        return sum(1 + each.leases + each.reservations for each in stats.sessions if each.pid in gone), 0
    nbytes = sum(tier.in_flight_bytes + tier.quarantined_bytes + tier.held_blocks * _SLOT_BYTES for tier in stats.tiers)
    return stats.leases + stats.reservations, nbytes


def wait_until_free(admin: Client, patience_s: float, dead: Iterable[int] | None = None) -> tuple[int, int, float]:
    """Waits until `in_use` is 0; returns the rest after `patience_s`, and the time that it took."""
    begin = time.monotonic()
    while True:
        leases, nbytes = in_use(admin.stats(), dead)
        took = time.monotonic() - begin
        if not leases + nbytes or took > patience_s:
            return leases, nbytes, took
        time.sleep(_POLL_S)


class Deaths:
    """One daemon, two clients that go on, and victims one after another."""

    def __init__(
        self, daemon: DaemonProcess, house: House, admin: Client, seed: int, patience_s: float, stack: ExitStack
    ) -> None:
        self.findings = Findings()
        self._address = daemon.address
        self._tcp = daemon.tcp or ""
        self._house = house
        self._admin = admin
        self._patience_s = patience_s
        self._rng = random.Random(f"client_deaths {seed}")
        self._stack = stack
        self._victims: deque[VictimProcess] = deque()
        self._owners = iter(range(100, 1 << 30))
        streamed = LoadPlan(2, seed, memory="streamed", token=house.token("other", Role.ADMIN))
        self._others = [
            stack.enter_context(LoadProcess(self._address, LoadPlan(1, seed, memory="shared"))),
            stack.enter_context(LoadProcess(self._tcp, streamed)),
        ]
        stack.callback(self._kill_all)

    def kill(self, count: int, step: Callable[[], None]) -> None:
        """Kills `count` victims, each after the others have worked on for a while; then checks what is in use."""
        tell_all(self._others, "go")
        begun = 0
        for _ in range(count):
            while len(self._victims) < _AT_ONCE and begun < count:
                self._victims.append(self._victim(self._rng.choice(SCENES)))
                begun += 1
            victim = self._victims[0]
            victim.wait_until_busy()
            time.sleep(self._rng.uniform(0, 0.15))
            self._victims.popleft()
            victim.kill()
            self.findings.kills[victim.scene] += 1
            leases, _, took = wait_until_free(self._admin, self._patience_s, [victim.pid])
            self.findings.noticed_s.append(took)
            if leases:
                self.findings.leaked_leases += leases
                self.findings.notes.append(f"the session of a dead client ({victim.scene}) still has {leases} grants")
            step()
        self._check()

    def _victim(self, scene: str) -> VictimProcess:
        owner = next(self._owners)
        if scene in STREAMED_SCENES and self._rng.random() < 0.5:
            return VictimProcess(self._tcp, scene, owner, self._house.token("other"))
        return VictimProcess(self._address, scene, owner)

    def end(self) -> None:
        """The last check: without clients, nothing may stay in use when everything is evicted."""
        for other in self._others:
            self.findings.tally.add(other.stop())
        # Blocks are held while they are written back.
        harness.wait_until(lambda: not self._admin.evict(all=True).kept_blocks, self._patience_s, _POLL_S)
        left = {tier.tier: tier.used_bytes for tier in self._admin.stats().tiers if tier.used_bytes}
        if left:
            self.findings.leaked_bytes += sum(left.values())
            self.findings.notes.append(f"with everything evicted these bytes are still in use, by tier: {left}")
        self.findings.left_of_tenants = left_of_tenants(self._admin, self._patience_s)

    def _check(self) -> None:
        tell_all(self._others, "pause")
        leases, nbytes, _ = wait_until_free(self._admin, self._patience_s)
        findings = self.findings
        findings.checks += 1
        findings.leaked_leases += leases
        findings.leaked_bytes += nbytes
        if leases or nbytes:
            findings.notes.append(
                f"with all clients idle, {leases} leases and {nbytes} bytes are in use: {self._admin.stats()}"
            )
        findings.violations += violations_of(self._admin)

    def _kill_all(self) -> None:
        for victim in self._victims:
            with suppress(harness.BenchmarkError):
                victim.kill()


def run(kills: int, seed: int, check: int, patience_s: float, step: Callable[[], None] = lambda: None) -> Findings:
    """Kills `kills` clients of one daemon; `step` is called after each."""
    with tenanted_daemon(_SETTINGS, _QUOTAS) as (daemon, house), ExitStack() as stack:
        admin = stack.enter_context(Client(daemon.address, name="client_deaths"))
        deaths = Deaths(daemon, house, admin, seed, patience_s, stack)
        for start in range(0, kills, check):
            deaths.kill(min(check, kills - start), step)
        deaths.end()
        return deaths.findings


@harness.benchmark(
    "checks.client_deaths",
    __doc__,
    option("--kills", 300, "clients to kill"),
    option("--check", 20, "kills from check to check"),
    option("--patience", 5.0, "seconds to notice a death", float, metavar="S"),
    seed("of what they do and when they die"),
    unrecorded=("check", "patience"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Kills and checks."""
    with harness.progress("kills", options.kills) as step:
        findings = run(options.kills, options.seed, options.check, options.patience, step)
    return harness.Outcome(findings.result(), findings.broken)


if __name__ == "__main__":
    harness.run(main)
