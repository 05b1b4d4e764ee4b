"""A daemon with a worker under mixed load for a long time: does it stay as large as it is?

Runs one daemon with the embedded model under mixed load: client processes that store, read, lease,
prefetch, pin, retain, generate and evict, prompts and whole namespaces; every few seconds one of them ends,
in order or by SIGKILL, and another comes. Quotas change every minute.
Two thirds of them share the daemon's memory and are of the default tenant, the others stream over TCP and
are of a tenant of their own; both have quotas. Every byte that is read is verified, and a prompt must always get
the same tokens. Every --sample seconds the resident memory, descriptors and mappings of daemon and worker
are read from /proc; every minute the daemon accounts for its slots. At the end nothing may count for a
tenant's quotas (left_of_tenants).

Slopes are medians over all pairs of samples (Theil-Sen) after the warm-up: a quarter of the run, or until
all tiers are full if that is later. Up to then memory grows on purpose: tiers are touched for the first
time, the index grows with the blocks, pools of buffers and threads reach their sizes, and the ten thousand
last leases that ended are remembered.

rss_slope_mib_per_min is of the whole resident memory of both processes, shared tiers included. The CPU tier
is populated at the start, so that first touches of its pages are no growth; anon_slope_mib_per_min, their
own memory without tiers and files, is given beside it. Of the GPU tier it is judged how much is mapped: in how
many pieces depends on which chunks happen to lie side by side. The run fails when memory grows by --max-slope
MiB a minute or more, descriptors or other mappings by one a minute, or what is mapped of the GPU tier by a
chunk (256 KiB) a minute. A run whose part after the warm-up is shorter than 5 minutes shows slopes but is not
judged by them.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.checks.tenancy.house import House, tenanted_daemon
from benchmarks.checks.tenancy.left_behind import left_of_tenants
from benchmarks.common import harness
from benchmarks.common.daemons import START_S, violations_of, wait_for_worker
from benchmarks.common.options import option, seed
from benchmarks.common.process_footprint import Footprint, footprint, slope_per_minute
from benchmarks.load.mixed_load import LoadPlan, Tally
from benchmarks.load.process import LoadProcess
from prefixd.base.tenancy.tenants import Role
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NotFoundError, Sampling

_SETTINGS: dict[str, object] = {
    "worker.embedded": True,
    "worker.threads": 1,
    "gpu.bytes": "16MiB",
    "cpu.bytes": "48MiB",
    "cpu.populate": True,
    "disk.bytes": "96MiB",
}
_QUOTA: dict[str, object] = {
    "gpu_guaranteed": "4MiB",
    "gpu_most": "14MiB",
    "cpu_guaranteed": "12MiB",
    "cpu_most": "40MiB",
    "disk_guaranteed": "24MiB",
    "disk_most": "80MiB",
    "sessions": 32,
    "grants": 1024,
    "namespaces": 32,
    "calls": 256,
    "waiting_requests": 256,
}
_TENANTS = ("default", "other")
_LEFT_S = 30.0
_CLIENTS = 3
_CLIENT_LIFE_S = 20.0
_WARM_UP = 0.25
_FULL = 0.85
"""Used share at which a tier counts as full: slots of several sizes do not fill it to the last byte."""
_INTEGRITY_S = 60.0
_JUDGED_S = 300.0
_MAX_COUNT_SLOPE = 1.0
_MAX_MAPPED_SLOPE = 0.25
"""MiB a minute: a chunk of the GPU tier."""


@dataclass(slots=True)
class Findings:
    """What was seen of daemon and worker, sample by sample, and of the clients."""

    daemon: list[Footprint] = field(default_factory=list)
    worker: list[Footprint] = field(default_factory=list)
    full_after_s: float | None = None
    violations: list[str] = field(default_factory=list)
    integrity_checks: int = 0
    worker_restarts: int = 0
    clients: int = 0
    left_of_tenants: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def result(self, seconds: float, max_slope: float) -> dict[str, Any]:
        """Figures, and under `broken` which bounds do not hold."""
        warm_up_s = max(_WARM_UP * seconds, self.full_after_s or 0.0)
        both = list(zip(self.daemon, self.worker, strict=True))
        warm = [(daemon, worker) for daemon, worker in both if daemon.at_s >= warm_up_s]

        def slope(name: str, which: Sequence[int] = (0, 1)) -> float:
            values = [sum(getattr(pair[index], name) for index in which) for pair in warm]
            return round(slope_per_minute([pair[0].at_s for pair in warm], values), 4)

        result: dict[str, Any] = {
            "rss_slope_mib_per_min": slope("rss"),
            "anon_slope_mib_per_min": slope("anon"),
            "descriptors_slope": slope("descriptors"),
            "mappings_slope": slope("mappings"),
            "gpu_tier_mapped_slope_mib_per_min": slope("gpu_tier_mapped"),
            "daemon_rss_slope_mib_per_min": slope("rss", [0]),
            "worker_rss_slope_mib_per_min": slope("rss", [1]),
            "daemon_anon_slope_mib_per_min": slope("anon", [0]),
            "worker_anon_slope_mib_per_min": slope("anon", [1]),
            "integrity_violations": len(self.violations),
            "integrity_checks": self.integrity_checks,
            "wrong_bytes": self.tally.wrong_bytes,
            "failed_calls": self.tally.failed_calls,
            "refused_calls": self.tally.refused.total(),
            "worker_restarts": self.worker_restarts,
            "left_of_tenants": len(self.left_of_tenants),
            "calls": self.tally.calls.total(),
            "calls_by_kind": dict(self.tally.calls),
            "verified_bytes": self.tally.verified_bytes,
            "clients": self.clients,
            "warm_up_s": round(warm_up_s, 1),
            "tiers_full_after_s": None if self.full_after_s is None else round(self.full_after_s, 1),
            "samples": len(both),
            "judged": seconds - warm_up_s >= _JUDGED_S,
        }
        for name, process in (("daemon", self.daemon), ("worker", self.worker)):
            last = process[-1]
            result |= {f"{name}_rss_mib": round(last.rss, 1), f"{name}_anon_mib": round(last.anon, 1)}
            result |= {f"{name}_shmem_mib": round(last.shmem, 1), f"{name}_descriptors": last.descriptors}
            result |= {f"{name}_mappings": last.mappings, f"{name}_gpu_tier_mapped_mib": round(last.gpu_tier_mapped, 2)}
        zero = ("integrity_violations", "wrong_bytes", "failed_calls", "worker_restarts", "left_of_tenants")
        broken = harness.missed(result, zero=zero)
        if result["judged"]:
            bounds = {"rss_slope_mib_per_min": max_slope, "anon_slope_mib_per_min": max_slope}
            bounds |= {"descriptors_slope": _MAX_COUNT_SLOPE, "mappings_slope": _MAX_COUNT_SLOPE}
            bounds["gpu_tier_mapped_slope_mib_per_min"] = _MAX_MAPPED_SLOPE
            broken += [f"{name} is {result[name]:g}" for name, bound in bounds.items() if result[name] >= bound]
        found = [*self.violations, *self.left_of_tenants, *self.tally.wrong, *self.tally.failures]
        return {**result, "broken": broken, "found": found}


class Soak:
    """One daemon, and clients that come and go."""

    def __init__(self, daemon: DaemonProcess, house: House, seed: int, stack: ExitStack) -> None:
        self.findings = Findings()
        self._daemon = daemon
        self._house = house
        self._seed = seed
        self._rng = random.Random(f"soak {seed}")
        self._stack = stack
        self._admin = stack.enter_context(Client(daemon.address, name="soak"))
        self._owners = itertools.count(1)
        self._clients: list[LoadProcess] = []
        self._worker_pid = 0

    def run(self, seconds: float, sample_s: float, step: Any) -> None:
        """Load and samples for `seconds`; `step` is called after each sample."""
        self._worker_pid = self._wait_for_worker()
        while len(self._clients) < _CLIENTS:
            self._begin_client()
        begin = time.monotonic()
        replace_s = integrity_s = 0.0
        for number in itertools.count():
            at_s = time.monotonic() - begin
            if at_s >= seconds:
                break
            if at_s - replace_s >= _CLIENT_LIFE_S / _CLIENTS:
                replace_s = at_s
                self._end_client()
                self._begin_client()
            if at_s - integrity_s >= _INTEGRITY_S:
                integrity_s = at_s
                self._check_integrity()
                self._change_quotas()
            self._sample(at_s)
            step()
            time.sleep(max(0.0, begin + (number + 1) * sample_s - time.monotonic()))
        for client in self._clients:
            self.findings.tally.add(client.stop())
        self._unpin_all()
        self._check_integrity()
        self.findings.left_of_tenants = left_of_tenants(self._admin, _LEFT_S)

    def _begin_client(self) -> None:
        owner = next(self._owners)
        streams = owner % 3 == 0
        plan = LoadPlan(
            owner,
            self._seed,
            tasks=3,
            own_durable=8,
            generate=True,
            operator=True,
            memory="streamed" if streams else "shared",
            timeout_s=60.0,
            token=self._house.token(_TENANTS[1], Role.ADMIN) if streams else "",
        )
        address = (self._daemon.tcp or "") if streams else self._daemon.address
        client = self._stack.enter_context(LoadProcess(address, plan))
        client.ask("go")
        self._clients.append(client)
        self.findings.clients += 1

    def _end_client(self) -> None:
        client = self._clients.pop(0)
        if self._rng.random() < 0.5:
            self.findings.tally.add(client.stop())
        else:
            self.findings.tally.add(client.count())
            client.kill()
        self._unpin_all()

    def _unpin_all(self) -> None:
        """Pins outlive their clients: they would fill the tiers, and count as held at the end."""
        for prefix in self._admin.prefixes(limit=100_000).prefixes:
            if prefix.pinned:
                with suppress(NotFoundError):
                    self._admin.unpin(prefix.key)

    def _change_quotas(self) -> None:
        most = self._rng.choice([60 << 20, 80 << 20])
        self._admin.set_tenant(self._rng.choice(_TENANTS), tiers={"disk": (24 << 20, most)})

    def _sample(self, at_s: float) -> None:
        findings, stats = self.findings, self._admin.stats()
        findings.daemon.append(footprint(self._daemon.pid, at_s))
        if stats.worker.pid != self._worker_pid:
            raise harness.BenchmarkError(f"the worker was restarted{self._daemon.last_words()}")
        findings.worker.append(footprint(self._worker_pid, at_s))
        findings.worker_restarts = stats.worker.restarts
        full = all(tier.used_bytes >= _FULL * tier.capacity_bytes for tier in stats.tiers)
        if full and findings.full_after_s is None:
            findings.full_after_s = at_s

    def _check_integrity(self) -> None:
        self.findings.integrity_checks += 1
        self.findings.violations += violations_of(self._admin)

    def _wait_for_worker(self) -> int:
        """The worker's pid, once it has answered a request: what it loads and maps for its first one is no growth."""
        pid = wait_for_worker(self._admin)
        list(self._admin.generate([1], sampling=Sampling(max_tokens=1), timeout_s=START_S))
        return pid


def draw(axes: Any, findings: Findings, warm_up_s: float) -> None:
    """Resident memory over time, and descriptors and mappings on a second scale."""
    for name, samples, colour in (("daemon", findings.daemon, "#4477aa"), ("worker", findings.worker, "#ee6677")):
        minutes = [each.at_s / 60 for each in samples]
        axes.plot(minutes, [each.rss for each in samples], color=colour, label=f"{name}, all")
        axes.plot(minutes, [each.anon for each in samples], color=colour, linestyle="--", label=f"{name}, own")
    axes.axvspan(0, warm_up_s / 60, color="#dddddd", label="warm-up")
    axes.set_xlabel("minutes")
    axes.set_ylabel("resident memory, MiB")
    axes.set_title("Memory, mappings and descriptors under load")
    axes.set_ylim(bottom=0)
    counts = axes.twinx()
    for samples, colour in ((findings.daemon, "#4477aa"), (findings.worker, "#ee6677")):
        minutes = [each.at_s / 60 for each in samples]
        counts.plot(minutes, [each.mappings for each in samples], color=colour, linewidth=0.7, linestyle=":")
        counts.plot(minutes, [each.descriptors for each in samples], color=colour, linewidth=0.7, linestyle="-.")
    counts.set_ylabel("mappings (dotted), descriptors (dash-dotted)")
    counts.set_ylim(bottom=0)
    axes.legend(loc="lower right", fontsize="small")


@harness.benchmark(
    "checks.soak",
    __doc__,
    option("--minutes", 20.0, "how long", float),
    option("--sample", 2.0, "seconds from sample to sample", float, metavar="S"),
    option("--max-slope", 1.0, "growth that fails the run", float, metavar="MIB"),
    seed("of the load"),
    harness.PLOT,
    unrecorded=("sample", "max_slope"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Load and samples. Raises BenchmarkError for times that are not positive."""
    if options.minutes <= 0 or options.sample <= 0:
        raise harness.BenchmarkError("--minutes and --sample must be positive")
    seconds = options.minutes * 60
    with tenanted_daemon(_SETTINGS, dict.fromkeys(_TENANTS, _QUOTA)) as (daemon, house), ExitStack() as stack:
        soak = Soak(daemon, house, options.seed, stack)
        with harness.progress("samples", max(1, round(seconds / options.sample))) as step:
            soak.run(seconds, options.sample, step)
    findings = soak.findings
    result = findings.result(seconds, options.max_slope)
    result["series"] = [{name: [asdict(each) for each in getattr(findings, name)] for name in ("daemon", "worker")}]
    return harness.Outcome(result, result["broken"], draw=lambda axes: draw(axes, findings, result["warm_up_s"]))


if __name__ == "__main__":
    harness.run(main)
