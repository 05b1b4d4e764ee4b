"""A daemon under load whose disk, limits and files fail, one after the other.

Two client processes store, load and match prompts whose every byte they can verify, half of the stores
durable, while one fault after the other is made on a real daemon: a disk that is full, failing, read-only,
slow or lying, files that vanish, limits of the process that are too low. Each fault comes under load, stays
for some seconds and goes again, without a restart of the daemon.

crashes: daemons that ended. wrong_bytes: of what clients read, then and after a restart. unserved: calls that
failed though they needed nothing that was broken; while nothing can be made durable, a commit that asks for
durable may be refused with FAILED_PRECONDITION or RESOURCE_EXHAUSTED and a remedy, and its blocks are cached all
the same. unreported: ways of reporting (stats, tier, health, metrics, one log line with a remedy, counters of
lost blocks) that did not. not_back: faults after whose end the trouble stayed, or commits were not durable, or
were not there after a restart. silently_lost: blocks that were acknowledged, are gone, and no counter knows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checks.fault_injection import worker_fault as worker
from benchmarks.checks.fault_injection.fault_load import FaultLoad, Kind, Outcome, load
from benchmarks.checks.fault_injection.fault_result import Result
from benchmarks.checks.fault_injection.faults_made import REFUSED, SCENARIOS, Scenario, Skip, Stage
from benchmarks.checks.fault_injection.faulty_daemon import FaultyDaemon
from benchmarks.checks.fault_injection.watch import Log, Seen, Watch
from benchmarks.common import harness
from benchmarks.common.daemons import violations_of
from benchmarks.common.options import only, seed
from benchmarks.load.world import FAMILIES, Prompt
from prefixd.cli.demo.daemon_process import DaemonFailed
from prefixd.client import Client
from prefixd.v1 import admin_pb2

SETTINGS: dict[str, object] = {"cpu.bytes": "16MiB", "disk.bytes": "128MiB"}

_NOTICED_S = 60.0
_BACK_S = 60.0
_CALL_S = 60.0
_PHASE_S = 100.0
_AGAIN_S = 60.0
_AUDIT_S = 60.0
_SHOWN = 5
_NESTED = "PREFIXD_FAULTS_NESTED"


@dataclass(frozen=True, slots=True)
class Pace:
    """The load of each phase."""

    calls: int = 12
    """Calls of each kind before, during and after the fault."""
    during_s: float = 2.0
    """The least that a fault lasts."""
    pause_s: float = 0.02
    """Between two calls of a client."""


def run_scenario(scenario: Scenario, folder: Path, seed: int = 0, pace: Pace = Pace()) -> Result:
    """Makes one fault in `folder`, which must be empty, and has the daemon survive it.

    Raises Skip: this machine cannot make it.
    """
    begin = time.monotonic()
    port = harness.free_port()
    disk = folder / "disk"
    settings = {**SETTINGS, "disk.path": disk, "server.metrics": f"127.0.0.1:{port}", **scenario.settings}
    daemon = FaultyDaemon(settings, directory=folder / "daemon")
    stage = Stage(daemon, folder)
    result = Result(scenario.name)
    with ExitStack() as stack:
        if scenario.prepare is not None:
            stack.enter_context(scenario.prepare(stage))
        stack.callback(daemon.stop)
        log = Log(daemon.log)
        daemon.start()
        try:
            watch = Watch(daemon.address, port)
            told = _under_load(scenario, stage, result, watch, log, seed, pace)
            if not daemon.alive:
                raise DaemonFailed(f"the daemon ended by itself{daemon.last_words()}")
            _audit(scenario, daemon, result, told)
        except DaemonFailed as error:
            result.crashes += 1
            result.failures.append(str(error))
    result.seconds = round(time.monotonic() - begin, 2)
    return result


@dataclass(frozen=True, slots=True)
class _Acknowledged:
    """The clients' calls, and the time of the fault."""

    outcomes: Sequence[Outcome]
    broken_s: float
    healed_s: float


def _under_load(
    scenario: Scenario, stage: Stage, result: Result, watch: Watch, log: Log, seed: int, pace: Pace
) -> _Acknowledged:
    """The load, with the fault in the middle of it."""
    daemon = stage.daemon
    with watch, FaultLoad(daemon.address, pause_s=pace.pause_s, timeout_s=_CALL_S, seed=seed) as clients:

        def wait(what: str, enough: Callable[[Sequence[Outcome]], bool]) -> None:
            if not clients.wait(enough, _PHASE_S):
                result.failures.append(f"{what} did not come about within {_PHASE_S:g} s")

        calls = _calls(pace.calls, 0.0, ok=True)
        wait("load before the fault", lambda outcomes: calls(outcomes) and clients.all_served(outcomes))
        before = watch.stats
        watch.begin()
        broken_s = time.monotonic()
        with scenario.fault(stage):
            if scenario.trouble is not None:
                if watch.wait(lambda now, _: scenario.trouble in now.troubles, _NOTICED_S):
                    result.noticed_s = round(time.monotonic() - broken_s, 2)
                result.said = "; ".join(watch.now.troubles.get(scenario.trouble or "", ()))
            elif scenario.lost:
                watch.wait(lambda _, stats: _lost(before, stats, scenario) > 0, _NOTICED_S)
            wait("load during the fault", _calls(pace.calls, time.monotonic()))
            time.sleep(max(0.0, broken_s + pace.during_s - time.monotonic()))
            seen = watch.end()
            lines = log.lines()
        healed_s = time.monotonic()
        if watch.wait(lambda now, _: not now.any, _BACK_S):
            result.back_s = round(time.monotonic() - healed_s, 2)
        else:
            result.not_back.append(f"trouble after {_BACK_S:g} s: {watch.now}")
        back_s = time.monotonic()
        if not clients.wait(_calls(pace.calls, back_s, ok=True), _AGAIN_S):
            result.not_back.append("calls of every kind do not succeed again")
        if scenario.check is not None:
            result.not_back += scenario.check(stage)
        clients.stop()
        after = watch.stats
        outcomes = clients.outcomes
    result.lost_blocks = _difference(before, after)
    result.unreported += _unreported(scenario, seen, lines, result, before, after)
    _judge(scenario, result, outcomes, broken_s, back_s)
    return _Acknowledged(outcomes, broken_s, back_s)


def _calls(count: int, since_s: float, ok: bool = False) -> Callable[[Sequence[Outcome]], bool]:
    """Whether `count` calls of each kind began after `since_s` and ended; successfully, if `ok`."""
    kinds: tuple[Kind, ...] = ("store", "durable", "load")

    def enough(outcomes: Sequence[Outcome]) -> bool:
        done = [one.kind for one in outcomes if one.begin_s >= since_s and not (ok and one.error)]
        return all(done.count(kind) >= count for kind in kinds)

    return enough


def _judge(scenario: Scenario, result: Result, outcomes: Sequence[Outcome], broken_s: float, back_s: float) -> None:
    for one in outcomes:
        result.calls += 1
        result.wrong_bytes += one.wrong_bytes
        result.slowest_call_s = round(max(result.slowest_call_s, one.end_s - one.begin_s), 3)
        if not one.error:
            continue
        at_risk = one.kind == "durable" and one.end_s >= broken_s and one.begin_s <= back_s and not scenario.durable
        if at_risk and one.error in REFUSED and "; " in one.message:
            result.refused += 1
            continue
        result.unserved += 1
        if result.unserved <= _SHOWN:
            when = "before" if one.end_s < broken_s else "after" if one.begin_s > back_s else "during"
            result.failures.append(f"{when} the fault: {one.kind}: {one.error}: {one.message}")


def _unreported(
    scenario: Scenario,
    seen: Seen,
    lines: Sequence[str],
    result: Result,
    before: admin_pb2.StatsResponse,
    after: admin_pb2.StatsResponse,
) -> list[str]:
    missing = seen.silent_about(scenario.trouble, lines) if scenario.trouble is not None else []
    if scenario.lost and not _lost(before, after, scenario):
        missing.append(f"lost_blocks ({' or '.join(scenario.lost)})")
    if result.refused and not result.lost_blocks:
        missing.append("lost_blocks")
    return missing


def _audit(scenario: Scenario, daemon: FaultyDaemon, result: Result, told: _Acknowledged) -> None:
    """Nothing leaked, and nothing acknowledged is gone without a counter; then the same after a restart."""
    stored = [one for one in told.outcomes if one.kind in ("store", "durable") and not one.error]
    with Client(daemon.address, name="audit", timeout_s=_AUDIT_S) as client:
        result.failures += [f"integrity: {line}" for line in violations_of(client)]
        stats = client.stats()
        missing = _missing(client, result, {one.prompt for one in stored})
    counted = sum(stats.lost_blocks.values()) + sum(tier.evicted_blocks for tier in stats.tiers)
    result.silently_lost = max(0, len(missing) - counted)
    if daemon.stop() != 0:
        result.crashes += 1
    daemon.start()
    durable = [one for one in stored if one.kind == "durable"]
    with Client(daemon.address, name="audit", timeout_s=_AUDIT_S) as client:
        result.failures += [f"integrity: {line}" for line in violations_of(client)]
        gone = _missing(client, result, {one.prompt for one in durable if one.begin_s > told.healed_s})
        if gone:
            result.not_back.append(f"{len(gone)} blocks that became durable after the fault are gone after a restart")
        gone = _missing(client, result, {one.prompt for one in durable if one.begin_s <= told.healed_s})
        evicted = sum(tier.evicted_blocks for tier in stats.tiers)
        if gone and not scenario.drops and len(gone) > evicted:
            result.failures.append(f"{len(gone)} blocks that were durable are gone after a restart")


def _missing(client: Client, result: Result, prompts: set[Prompt]) -> set[tuple[int, ...]]:
    """Blocks of `prompts` that are not cached; what is cached is read and compared."""
    missing: set[tuple[int, ...]] = set()
    for prompt in sorted(prompts, key=lambda one: (one.namespace, one.owner, one.number)):
        there, wrong = load(client.register(prompt.spec), prompt)
        result.wrong_bytes += wrong
        for block in range(there, prompt.blocks):
            if block < prompt.shared_blocks:
                missing.add((prompt.namespace, prompt.number % FAMILIES, block))
            else:
                missing.add((prompt.namespace, prompt.owner, prompt.number, block))
    return missing


def _difference(before: admin_pb2.StatsResponse, after: admin_pb2.StatsResponse) -> dict[str, int]:
    grown = {reason: count - before.lost_blocks.get(reason, 0) for reason, count in after.lost_blocks.items()}
    return {reason: count for reason, count in grown.items() if count}


def _lost(before: admin_pb2.StatsResponse, after: admin_pb2.StatsResponse, scenario: Scenario) -> int:
    return sum(_difference(before, after).get(reason, 0) for reason in scenario.lost)


NAMES = (*(scenario.name for scenario in SCENARIOS), worker.NAME)


def run(names: Sequence[str], seed: int, pace: Pace = Pace()) -> tuple[list[Result], dict[str, str]]:
    """Runs the scenarios with these names; returns their results, and reasons why others were skipped."""
    results: list[Result] = []
    skipped = {}
    with harness.progress("faults", len(names)) as step:
        for name in names:
            folder = Path(tempfile.mkdtemp(prefix="prefixd-faults-"))
            try:
                results.append(_run_one(name, folder, seed, pace))
                print(results[-1], file=sys.stderr, flush=True)
            except Skip as why:
                skipped[name] = str(why)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            step()
    return results, skipped


def _run_one(name: str, folder: Path, seed: int, pace: Pace) -> Result:
    if name == worker.NAME:
        return worker.run_worker_scenario(folder, harness.free_port())
    (scenario,) = (one for one in SCENARIOS if one.name == name)
    try:
        return run_scenario(scenario, folder, seed, pace)
    except Skip:
        if scenario.mounts and not _is_nested():
            return _run_nested(name, folder, seed)
        raise


def _is_nested() -> bool:
    return os.environ.get(_NESTED) is not None


def _run_nested(name: str, folder: Path, seed: int) -> Result:
    """The scenario where we are root of a user namespace, and may mount.

    Raises Skip: there is no such namespace for us.
    """
    report = folder / "nested.json"
    options = ["--only", name, "--seed", str(seed), "--json", str(report)]
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-m", "benchmarks.checks.faults", *options],
        env={**os.environ, _NESTED: "1"},
        capture_output=True,
        text=True,
    )
    if not report.exists():
        raise Skip(f"neither mount nor `unshare -rm` works here ({done.stderr.strip()[-200:]}); run as root")
    found = json.loads(report.read_text())
    if found["skipped"]:
        raise Skip(found["skipped"][name])
    return Result(**found["scenarios"][0])


@harness.benchmark(
    "checks.faults",
    __doc__,
    only(NAMES),
    seed("of the load"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Runs all scenarios, or those of `--only`."""
    results, skipped = run([name for name in NAMES if name in (options.only or NAMES)], options.seed)
    bad = [result.name for result in results if not result.good]
    totals = {
        "crashes": sum(result.crashes for result in results),
        "wrong_bytes": sum(result.wrong_bytes for result in results),
        "unserved": sum(result.unserved for result in results),
        "unreported": sum(len(result.unreported) for result in results),
        "not_back": sum(bool(result.not_back) for result in results),
        "silently_lost": sum(result.silently_lost for result in results),
        "survived": len(results) - len(bad),
        "skipped": skipped,
        "seconds": round(sum(result.seconds for result in results), 1),
        "scenarios": [result.plain() for result in results],
    }
    broken = [f"{len(bad)} of {len(results)} faults were not survived: {', '.join(bad)}"] if bad else []
    return harness.Outcome(totals, broken)


if __name__ == "__main__":
    harness.run(main)
