"""A daemon under load, killed again and again.

Kills a daemon with SIGKILL at random moments while two client processes store, read, lease, prefetch, pin,
retain and evict, prompts and whole namespaces, each with four calls at a time; starts it again on the same
directory; audits it; and lets the load go on. One client shares the daemon's memory and is of the default
tenant; the other streams over TCP and is of a tenant of its own. Both have quotas, which change. Most kills
come under load, some in a drain, some while the daemon that was just killed starts again. The load is idle
during an audit: the clients read everything they know of and compare every byte with what it has to be, and
the daemon accounts for its slots.

In three of four lives the disk tier has room for everything, so that every block that was acknowledged as
durable must be there (lost_durable), unless its client had asked to drop it; and then it must stay away
(resurrected). In the others the disk tier is full and evicts all the time, and starts again larger or
smaller; there a durable block may have had to go (evicted_durable), and what is there must be right. What
was acknowledged as pinned must be there and pinned (lost_pins), but after a start with a smaller disk tier.
wrong_bytes counts bytes under load and in audits; reopen_failures counts starts that did not end in a daemon
that answers.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.checks.tenancy.house import House
from benchmarks.common import harness
from benchmarks.common.daemons import violations_of
from benchmarks.common.options import option, seed
from benchmarks.load.mixed_load import LoadPlan, Tally
from benchmarks.load.process import LoadProcess, tell_all
from benchmarks.load.world import prompts
from benchmarks.storage.key_file import write_key_file
from prefixd.base.tenancy.tenants import Role
from prefixd.cli.demo.daemon_process import DaemonFailed, DaemonProcess
from prefixd.client import Client

_NUMBERS = 20
"""Prompts of each namespace that a tenant's clients ask for: 22 MiB a tenant."""
_CPU_BYTES = 12 << 20
_ROOMY_BYTES, _TIGHT_BYTES = 224 << 20, (14 << 20, 20 << 20)
_RESIZED = 0.2
"""Share of the starts with a tight disk tier that give it another size."""
TENANTS = ("default", "other")
_DURABLE = 4
"""Prompts that each client knows to be durable before the first kill: without any, an audit could find no loss."""
_FULL = 0.5
"""A disk tier with more than this share in use is not roomy: a loss could not be told from an eviction."""

_ZEROS = (
    *("wrong_bytes", "lost_durable", "reopen_failures", "resurrected", "lost_pins"),
    *("integrity_violations", "failed_calls"),
)
Phase = Literal["load", "drain", "start"]
_PHASES: tuple[tuple[Phase, float], ...] = (("load", 0.7), ("drain", 0.1), ("start", 0.2))


@dataclass(slots=True)
class Findings:
    """What came of the kills."""

    kills: Counter[str] = field(default_factory=Counter)
    """By phase."""
    reopen_failures: int = 0
    lost_durable: int = 0
    evicted_durable: int = 0
    resurrected: int = 0
    lost_pins: int = 0
    pins: int = 0
    violations: list[str] = field(default_factory=list)
    audits: int = 0
    audited_blocks: int = 0
    durable_prompts: int = 0
    starts_s: list[float] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        return {
            "kills": self.kills.total(),
            **{f"kills_in_{phase}": self.kills[phase] for phase, _ in _PHASES},
            "wrong_bytes": self.tally.wrong_bytes,
            "lost_durable": self.lost_durable,
            "reopen_failures": self.reopen_failures,
            "resurrected": self.resurrected,
            "lost_pins": self.lost_pins,
            "evicted_durable": self.evicted_durable,
            "integrity_violations": len(self.violations),
            "failed_calls": self.tally.failed_calls,
            "interrupted_calls": self.tally.interrupted.total(),
            "interrupted_by_call": dict(self.tally.interrupted),
            "audits": self.audits,
            "audited_blocks": self.audited_blocks,
            "durable_prompts_checked": self.durable_prompts,
            "pinned_prompts_checked": self.pins,
            "verified_bytes": self.tally.verified_bytes,
            **harness.median_and_most("start", self.starts_s),
            "found": [*self.notes, *self.violations, *self.tally.wrong, *self.tally.failures],
        }

    @property
    def broken(self) -> list[str]:
        return harness.missed(self.result(), zero=_ZEROS)


class Lives:
    """One daemon's lives on one directory, and the load on it.

    Args:
        directory: for the daemon, and the tokens of its tenants.
        roomy: whether the disk tier takes everything.
        seed: of the load and of the kills.
        between: called with the data directory while the daemon is dead; for tests of what the audit sees.
    """

    def __init__(
        self,
        directory: Path,
        roomy: bool,
        seed: int,
        findings: Findings,
        between: Callable[[Path], None] | None = None,
        *,
        encrypted: bool = False,
    ) -> None:
        self._roomy = roomy
        self._rng = random.Random(f"crash {seed} {roomy}")
        self._seed = seed
        self._findings = findings
        self._between = between
        disk_bytes = _ROOMY_BYTES if roomy else _TIGHT_BYTES[-1]
        # A client that the daemon shuts out has no chance to find its new port.
        self._house = House(
            directory, dict.fromkeys(TENANTS, _quota(_ROOMY_BYTES if roomy else _TIGHT_BYTES[0])), harness.free_port()
        )
        settings = {"cpu.bytes": _CPU_BYTES, "disk.bytes": disk_bytes, "disk.shrink": True, **self._house.settings}
        if encrypted:
            settings["disk.encryption_key_file"] = write_key_file(directory / "keys")
        self._disk_bytes, self._shrunk = disk_bytes, False
        self._daemon = DaemonProcess(settings, directory=directory / "daemon")
        self._clients: list[LoadProcess] = []
        self._start_s = 1.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """The daemon and its clients; what the clients counted goes to the findings at the end."""
        with self._daemon, ExitStack() as stack:
            for owner, tenant in enumerate(TENANTS, 1):
                local = tenant == TENANTS[0]
                token = "" if local else self._house.token(tenant, Role.ADMIN)
                plan = LoadPlan(owner, self._seed, numbers=_NUMBERS, outages=True, token=token, operator=True)
                address = self._daemon.address if local else self._daemon.tcp or ""
                self._clients.append(stack.enter_context(LoadProcess(address, plan)))
            while any(client.ask("pause")["durable"] < _DURABLE for client in self._clients):
                tell_all(self._clients, "go")
                time.sleep(0.1)
            yield
            for client in self._clients:
                self._findings.tally.add(client.stop())

    def kill(self, left: int) -> int:
        """Load, one kill or two (at most `left`), a start and an audit; how many kills."""
        rng, findings = self._rng, self._findings
        (phase,) = rng.choices(*zip(*_PHASES, strict=True))
        tell_all(self._clients, "go")
        time.sleep(rng.uniform(0.02, 0.7))
        if phase == "drain":
            self._daemon.terminate()
            time.sleep(rng.uniform(0, 0.15))
        self._daemon.kill()
        findings.kills[phase if phase == "drain" else "load"] += 1
        kills = 1
        for client in self._clients:
            client.order("pause")
        if phase == "start" and left > 1:
            self._daemon.launch()
            time.sleep(rng.uniform(0.3, 1.05) * self._start_s)
            self._daemon.kill()
            findings.kills["start"] += 1
            kills += 1
        if self._between is not None:
            self._between(self._daemon.directory / "data")
        self._resize()
        self._start()
        for client in self._clients:  # idle: their calls have failed, or found the new daemon
            client.answer()
        self._audit()
        self._change_quotas()
        return kills

    def _resize(self) -> None:
        """Now and then, the next start finds another size of a tight disk tier."""
        before, self._shrunk = self._disk_bytes, False
        if not self._roomy and self._rng.random() < _RESIZED:
            self._disk_bytes = self._rng.choice(_TIGHT_BYTES)
            self._shrunk = self._disk_bytes < before
            self._daemon.configure({"disk.bytes": self._disk_bytes})

    def _change_quotas(self) -> None:
        """What a tenant may have, until the next start; of a roomy disk tier it keeps its share."""
        most = {"cpu": (0, self._rng.choice([_CPU_BYTES // 2, _CPU_BYTES]))}
        if not self._roomy:
            most["disk"] = (0, self._rng.choice([_TIGHT_BYTES[0] // 2, _TIGHT_BYTES[0]]))
        with Client(self._daemon.address) as admin:
            admin.set_tenant(self._rng.choice(TENANTS), tiers=most)

    def _start(self) -> None:
        begin = time.perf_counter()
        try:
            self._daemon.start()
        except DaemonFailed as error:
            self._findings.reopen_failures += 1
            self._findings.notes.append(str(error))
            raise
        self._start_s = time.perf_counter() - begin
        self._findings.starts_s.append(self._start_s)

    def _audit(self) -> None:
        findings = self._findings
        everything = [(prompt.namespace, prompt.owner, prompt.number) for prompt in prompts(_NUMBERS)]
        for client in self._clients:  # each has its tenant's own
            client.order("audit", shared=everything)
        for client in self._clients:
            answer = client.answer()
            findings.audited_blocks += answer["found"]
            findings.durable_prompts += answer["durable"]
            findings.resurrected += len(answer["back"])
            findings.notes += [f"came back: {prompt}" for prompt in answer["back"]]
            findings.pins += answer["pinned"]
            if not self._shrunk:
                findings.lost_pins += len(answer["unpinned"])
                findings.notes += [f"not pinned any more: {prompt}" for prompt in answer["unpinned"]]
            if self._roomy:
                findings.lost_durable += answer["lost_blocks"]
                findings.notes += [f"lost: {lost}" for lost in answer["lost"]]
            else:
                findings.evicted_durable += answer["lost_blocks"]
        with Client(self._daemon.address) as admin:
            disk = admin.stats().tiers[-1]
            findings.violations += violations_of(admin)
        findings.audits += 1
        if self._roomy and disk.used_bytes > _FULL * disk.capacity_bytes:
            raise harness.BenchmarkError(
                f"the disk tier has {disk.used_bytes} of {disk.capacity_bytes} bytes in use, so that a loss cannot be "
                "told from an eviction; make it larger in benchmarks/checks/crash.py"
            )


def _quota(disk_bytes: int) -> dict[str, object]:
    return {
        "cpu_guaranteed": _CPU_BYTES // 4,
        "cpu_most": _CPU_BYTES * 3 // 4,
        "disk_guaranteed": disk_bytes // 4,
        "disk_most": disk_bytes * 3 // 4,
        "sessions": 16,
        "grants": 256,
        "namespaces": 16,
        "calls": 128,
    }


def run(
    kills: int,
    seed: int,
    step: Callable[[], None] = lambda: None,
    between: Callable[[Path], None] | None = None,
) -> Findings:
    """Kills daemons `kills` times in all, in four directories after each other.

    The first is tight, and blocks in the last are encrypted.

    `step` is called after each.
    """
    findings = Findings()
    for number in range(4):
        left = kills * (number + 1) // 4 - kills * number // 4
        if not left:
            continue
        with tempfile.TemporaryDirectory(prefix="prefixd-crash-") as folder:
            lives = Lives(Path(folder), number > 0, seed + number, findings, between, encrypted=number == 3)
            with lives.running():
                while left:
                    done = lives.kill(left)
                    left -= done
                    for _ in range(done):
                        step()
    return findings


@harness.benchmark(
    "checks.crash",
    __doc__,
    option("--kills", 200, "how often to kill"),
    seed("of the load and of the moments of the kills"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Kills and audits."""
    with harness.progress("kills", options.kills) as step:
        findings = run(options.kills, options.seed, step)
    return harness.Outcome(findings.result(), findings.broken)


if __name__ == "__main__":
    harness.run(main)
