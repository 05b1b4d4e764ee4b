"""Three tenants that fill a daemon, one of which floods it again and again.

Three tenants, a, b and c, each in a process of its own, keep a daemon with the embedded model busy for
--seconds: they store, read, match and lease prompts that are new or have been asked for before, and have
the model generate. Each has as many calls and requests under way as all of them together can be
served at once, so that there is always more to do than can be done. In every second phase c floods the
daemon: 300 calls and 300 requests at once, more than its quotas let wait, each followed by the next as soon
as it is answered or refused.

Four times a second it is looked at what the tenants have of each tier. above_most counts the times that
one had more than its most; below_guarantee those that one which had had what it is guaranteed of the CPU or
the disk tier had less. In a last phase b rests while a works and c floods: then it must not have less than
when it began to rest, as far as that is guaranteed, in the GPU tier too, where requests give back what they
took. Nobody removes anything meanwhile.

isolation is what tenant a kept of its throughput under the flood: its rate in each flooded phase by the
mean of its rates in the quiet phases before and after, the median of these, and the lower one of
cache calls and requests. Quiet phases are as full as flooded ones, so that a's share of the machine is the
same where the daemon serves tenants in turn. The three processes stand for other hosts and step back behind
the daemon, all by as much; the flood costs a little of the processor that they share with it, all the same.

  python -m benchmarks.checks.tenants --json benchmarks/results/tenants.json
  python -m benchmarks.checks.tenants --seconds 30
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks.checks.tenancy.house import House, tenanted_daemon
from benchmarks.checks.tenancy.isolation import Levels, Phase, broken, isolation, kept_shares
from benchmarks.checks.tenancy.tenant_load import KINDS, TenantLoad
from benchmarks.common import harness
from benchmarks.common.daemons import violations_of, wait_for_worker
from benchmarks.common.options import number, option
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.v1 import cache_pb2

_SETTINGS: dict[str, object] = {
    "worker.embedded": True,
    "worker.threads": 1,
    "worker.max_running": 6,  # fewer than each tenant has under way: what one does not take, others get
    "gpu.device": "cpu",
    "gpu.bytes": "48MiB",
    "cpu.bytes": "48MiB",
    "disk.bytes": "96MiB",
}
_QUOTA: dict[str, object] = {
    "gpu_guaranteed": "8MiB",
    "gpu_most": "32MiB",
    "cpu_guaranteed": "10MiB",
    "cpu_most": "30MiB",
    "disk_guaranteed": "20MiB",
    "disk_most": "60MiB",
    "waiting_requests": 256,
    "calls": 256,
}
TENANTS = ("a", "b", "c")
FILLED_TIERS = ("cpu", "disk")
"""Those of which each must have had its guarantee."""
_ORDINARY = (96, 8)
_FLOOD = (300, 300)
_PHASE_S, _SETTLE_S, _SAMPLE_S = 8.0, 1.0, 0.25
_FILL_S = 60.0
_IDLE_S = 60.0


class Run:
    """One daemon and its three tenants."""

    def __init__(self, daemon: DaemonProcess, house: House, stack: ExitStack) -> None:
        self.levels = Levels()
        self.phases: list[Phase] = []
        self._others: list[list[dict[str, float]]] = []
        self._admin = stack.enter_context(Client(daemon.address, name="tenants"))
        wait_for_worker(self._admin)
        address = daemon.tcp or ""
        self._loads = {name: stack.enter_context(TenantLoad(address, name, house.token(name))) for name in TENANTS}
        self._begin_s = time.monotonic()

    def fill(self) -> None:
        """Full load until every tenant has what it is guaranteed."""
        for load in self._loads.values():
            load.order(*_ORDINARY)
        deadline = time.monotonic() + _FILL_S
        while not self.levels.reached(TENANTS, FILLED_TIERS) and time.monotonic() < deadline:
            self._sample_for(_SAMPLE_S)

    def phase(self, seconds: float, *, flooded: bool) -> None:
        """Full load, and a flood, for so long."""
        self._loads[TENANTS[-1]].order(*(_FLOOD if flooded else _ORDINARY))
        self._sample_for(min(_SETTLE_S, seconds / 2))
        before = [load.count() for load in self._loads.values()]
        self._sample_for(seconds - min(_SETTLE_S, seconds / 2))
        after = [load.count() for load in self._loads.values()]
        watched, *others = map(_rates, before, after)
        self.phases.append(Phase(flooded, watched))
        self._others.append(others)

    def rest(self, seconds: float) -> None:
        self._loads[TENANTS[2]].order(*_FLOOD)
        self._loads[TENANTS[1]].order(0, 0)
        self._wait_until_idle(TENANTS[1])
        self._sample_for(seconds, resting=TENANTS[1])

    def end(self) -> dict[str, Any]:
        violations = violations_of(self._admin)
        counts = {name: load.count() for name, load in self._loads.items()}
        failures = [line for count in counts.values() for line in count["failures"]]
        by_kind = isolation(self.phases)
        levels = self.levels
        result = {
            "below_guarantee": levels.below_guarantee,
            "above_most": levels.above_most,
            "isolation": min(by_kind.values()),
            **{f"isolation_{kind}": share for kind, share in by_kind.items()},
            "samples": levels.samples,
            "resting_samples": levels.resting_samples,
            "unreached": [
                f"{tenant} {tier}"
                for tenant in TENANTS
                for tier in FILLED_TIERS
                if not levels.reached([tenant], [tier])
            ],
            "lowest_share_of_guarantee": levels.lowest,
            "failed_calls": len(failures),
            "integrity_violations": len(violations),
            **{f"done_{name}": count["done"] for name, count in counts.items()},
            **{f"refused_{name}": count["refused"] for name, count in counts.items()},
            "phases": [
                {"flooded": phase.flooded, **phase.rates, "others": others}
                for phase, others in zip(self.phases, self._others, strict=True)
            ],
            "kept_shares": [{kind: kept_shares(self.phases, kind) for kind in KINDS}],
            "found": [*levels.found, *failures, *violations],
        }
        return {**result, "broken": broken(result)}

    def _wait_until_idle(self, name: str) -> None:
        """Returns when nothing is done or moved for a tenant any more."""
        deadline, before = time.monotonic() + _IDLE_S, -1
        while time.monotonic() < deadline:
            (tenant,) = (each for each in self._admin.tenants() if each.name == name)
            busy = tenant.calls + tenant.waiting_requests + tenant.running_requests
            on_disk = sum(tier.used_bytes for tier in tenant.tiers if tier.tier == cache_pb2.TIER_DISK)
            if not busy and on_disk == before:
                return
            before = -1 if busy else on_disk
            time.sleep(_SAMPLE_S)
        raise harness.BenchmarkError(f"tenant {name} was not idle within {_IDLE_S:g} s of its last call")

    def _sample_for(self, seconds: float, resting: str = "") -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            at_s = time.monotonic() - self._begin_s
            self.levels.look(at_s, self._admin.tenants(), resting)
            time.sleep(min(_SAMPLE_S, left_s))


def _rates(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """What a tenant got done a second between two counts, by kind."""
    took_s = after["at_s"] - before["at_s"]
    return {kind: round((after["done"].get(kind, 0) - before["done"].get(kind, 0)) / took_s, 2) for kind in KINDS}


def phases_in(seconds: float) -> int:
    """How many phases to cut a run into: an odd number, so that it begins and ends quiet."""
    return max(1, round(seconds / _PHASE_S) // 2) * 2 + 1


def run(seconds: float, step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The result of a run; `step` is called after each of its `phases_in(seconds)` phases."""
    with tenanted_daemon(_SETTINGS, dict.fromkeys(TENANTS, _QUOTA)) as (daemon, house), ExitStack() as stack:
        tenants = Run(daemon, house, stack)
        tenants.fill()
        count = phases_in(seconds)
        for number in range(count):
            tenants.phase(seconds / count, flooded=number % 2 == 1)
            step()
        tenants.rest(seconds / count)
        return tenants.end()


@harness.benchmark(
    "checks.tenants",
    __doc__,
    option("--seconds", 120.0, "how long", number(3, 3600)),
)
def main(options: harness.Options) -> harness.Outcome:
    """Quiet and flooded phases in turn."""
    with harness.progress("phases", phases_in(options.seconds)) as step:
        result = {"seconds": options.seconds, **run(options.seconds, step)}
    return harness.Outcome(result, result["broken"])


if __name__ == "__main__":
    harness.run(main)
