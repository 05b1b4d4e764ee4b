"""Attacks of one client on a live daemon, beside honest clients of other tenants.

Runs a daemon with the small model that comes with prefixd, and with tenants. Alice, over TCP, and Bob, at the unix
socket, have guarantees and a client each that matches, loads, stores and generates at fixed times and compares every
byte and answer; Carol makes a few calls. Mallory has limits, and attacks. Bystanders and Mallory are processes of their
own and, for root, users of their own. Mallory's process has a low priority: a real attacker is on another host.

Each attack has a quiet phase, in which Mallory does nothing, and then the attack. In the quiet phase, during the attack
and after it, a new client of Alice has to get a session, a namespace, room and an answer; so its cost to the others
counts in both phases. During the attack the judge of the scenario checks whether the attack has succeeded; afterwards
the daemon's accounts must add up, and everything that Mallory took must be free again. breached: the attack succeeded
(breaches lists how), or the daemon and its worker grew by more memory than the scenario's bound, or ended. not_made:
the error that ended an attack before it took place, if that error is not its defence. bystander_p99_ratio: the 99th
percentile of the bystanders' calls meanwhile against the median of those of all quiet phases with the same settings,
each call counted in medians of its kind. honest_failures: their calls that failed, had other bytes or tokens than they
should, or found less than they had stored and are guaranteed.

All attacks are made in turn, and all of them three times (--rounds), with a new daemon each time. The p99 of a phase is
the time of some three calls, and one stall of the machine moves it: of an attack's ratios (ratios) the median counts.
Anything else counts when it was seen once.

Scenarios that need a second user of the host are skipped unless root runs them. closed_by names the test that shows an
attack without its fix, where the fix is older than this harness; hostile_before.json and hostile_unread_before.json in
benchmarks/results have the others.

example: python -m benchmarks.checks.hostile --only "silent Put" --only "key squatting" --json hostile.json
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.checks.attacks.attacker import Attacker, Order
from benchmarks.checks.attacks.people import MALLORY, MIB
from benchmarks.checks.attacks.scenario import Scenario
from benchmarks.checks.attacks.scenarios import SCENARIOS
from benchmarks.checks.attacks.scene import Memory, Scene
from benchmarks.checks.attacks.tenant_client import Sample
from benchmarks.checks.attacks.verdict import Verdict, compare, complaints, totals
from benchmarks.common import harness
from benchmarks.common.daemons import violations_of
from benchmarks.common.options import number, only, option
from prefixd.client import ClientError

_BACK_S = 20.0
_POLL_S = 0.1
_SHOWN = 300  # characters


@dataclass(slots=True)
class _Made:
    """An attack, and the bystanders' calls."""

    verdict: Verdict
    quiet: list[list[Sample]]
    """In all quiet phases with the same settings."""
    attacks: list[list[Sample]]
    """Each time that it was made."""


def run(
    names: Sequence[str],
    seconds: float,
    rounds: int,
    step: Callable[[Verdict], None],
) -> tuple[list[Verdict], dict[str, str]]:
    """Runs the scenarios with these names; returns their verdicts, and reasons why others were skipped.

    Args:
        names: names of scenarios.
        seconds: duration of each quiet phase, and least duration of each attack.
        rounds: number of runs of all scenarios.
        step: called with the verdict of each run of an attack.
    """
    skipped = {
        name: "another user of this host is needed; run as root"
        for name in names
        if SCENARIOS[name].as_other_user and os.geteuid()
    }
    quiet: dict[tuple[object, ...], list[list[Sample]]] = {}
    made: dict[str, _Made] = {}
    for _ in range(rounds):
        with ExitStack() as stack:
            scene: Scene | None = None
            made_for: tuple[object, ...] = ()
            for name in (name for name in names if name not in skipped):
                scenario = SCENARIOS[name]
                begin_s = time.monotonic()
                kind = (type(scenario).daemon_settings, *scenario.settings.items())
                if scene is None or made_for != kind:
                    stack.close()
                    scene = stack.enter_context(Scene(scenario.daemon_settings))
                    made_for = kind
                all_quiet = quiet.setdefault(kind, [])
                verdict, meanwhile = _run_one(scenario, scene, seconds, all_quiet)
                verdict.seconds = time.monotonic() - begin_s
                compare(verdict, all_quiet, [meanwhile])
                step(verdict)
                if verdict.breached:  # its leftovers must not count for the next scenario
                    stack.close()
                    scene = None
                if before := made.get(name):
                    before.verdict.add(verdict)
                    before.attacks.append(meanwhile)
                else:
                    made[name] = _Made(verdict, all_quiet, [meanwhile])
    for each in made.values():
        compare(each.verdict, each.quiet, each.attacks)
    return [each.verdict for each in made.values()], skipped


def _run_one(
    scenario: Scenario, scene: Scene, seconds: float, quiet: list[list[Sample]]
) -> tuple[Verdict, list[Sample]]:
    """Returns the verdict, and the bystanders' calls during the attack. Adds those of its quiet phase to `quiet`."""
    verdict = Verdict(scenario.name, closed_by=scenario.closed_by)
    given = scenario.prepare(scene)
    order = Order(
        scenario.name, scene.tcp, scene.daemon.address, scene.metrics_port, scene.token(MALLORY), MALLORY.uid, given
    )
    with Attacker(order) as attacker:
        scene.take_samples()
        begin_s = time.monotonic()
        verdict.fail([f"before it, {what}" for what in _judged(scene.newcomer)])
        time.sleep(max(0.0, begin_s + seconds - time.monotonic()))
        end_s = time.monotonic()
        scene.wait_until_drained(end_s)
        samples, failures = scene.take_samples()
        quiet.append([sample for sample in samples if begin_s <= sample.begin_s < end_s])
        verdict.fail([f"before it, {failure}" for failure in failures])
        with Memory(scene.daemon.pid) as memory:
            begin_s = time.monotonic()
            facts = attacker.attack()
            verdict.breaches += _judged(scene.newcomer)
            verdict.breaches += _judged(lambda: scenario.judge(scene, facts))
            time.sleep(max(0.0, begin_s + seconds - time.monotonic()))
            found = attacker.stop()
            end_s = time.monotonic()
    verdict.found = {name: value for name, value in {**facts, **found}.items() if len(str(value)) <= _SHOWN}
    ended_by = str(verdict.found.get("ended_by", verdict.found.get("error", "")))
    if ended_by and not (scenario.refused_with and scenario.refused_with in ended_by):
        verdict.not_made = ended_by
    verdict.memory_mib = memory.grown_bytes / MIB
    if memory.grown_bytes > scenario.most_memory:
        most = scenario.most_memory // MIB
        verdict.breaches.append(f"the daemon grew by {memory.grown_bytes // MIB} MiB, more than {most}")
    if not scene.daemon.alive:
        verdict.breaches.append(f"the daemon ended{scene.daemon.last_words()}")
        return verdict, []
    if not scene.wait_until_drained(end_s):
        verdict.breaches.append("calls of bystanders do not end after the attack")
    samples, failures = scene.take_samples()
    ended = {each.kind for each in samples if begin_s <= each.begin_s and each.begin_s + each.seconds <= end_s}
    if starved := {each.kind for each in quiet[-1]} - ended:
        verdict.breaches.append(f"bystanders got no answer meanwhile: {', '.join(sorted(starved))}")
    verdict.breaches += _judged(lambda: scenario.judge_after(scene, found))
    verdict.breaches += [f"afterwards, {what}" for what in _judged(lambda: _left_behind(scene))]
    verdict.breaches += [f"afterwards, {what}" for what in _judged(lambda: _forgotten(scene))]
    verdict.fail(failures)
    verdict.fail(scene.take_samples()[1])
    return verdict, [sample for sample in samples if begin_s <= sample.begin_s < end_s]


def _judged(judge: Callable[[], Iterable[str]]) -> list[str]:
    """Returns the findings of a judge, and one more if the daemon does not answer the judge."""
    found = []
    try:
        for what in judge():
            found.append(what)
    except ClientError as error:
        found.append(f"the daemon does not answer: {type(error).__name__}: {error}"[:_SHOWN])
    return found


def _left_behind(scene: Scene) -> list[str]:
    """Returns faults that remain after the attacker has ended."""
    found: list[str] = []

    def works() -> bool:
        found[:] = scene.newcomer()
        return not found

    harness.wait_until(works, _BACK_S, _POLL_S)
    with scene.operator() as operator:
        return found + violations_of(operator)


def _forgotten(scene: Scene) -> list[str]:
    """Evicts the attacker's blocks, so that the next attack has its whole quota; returns a fault if some remain."""
    if harness.wait_until(lambda: not scene.evict(MALLORY), _BACK_S, _POLL_S):
        return []
    return [f"{scene.evict(MALLORY)} blocks of {MALLORY.name} cannot be evicted"]


def _of_a_closed_loop(record: logging.LogRecord) -> bool:
    """Returns False for the log record of gRPC's poller when a client of this process has ended its event loop."""
    return "PollerCompletionQueue._handle_events" not in record.getMessage()


@harness.benchmark(
    "checks.hostile",
    __doc__,
    only(SCENARIOS),
    option("--seconds", 4.0, "seconds of each quiet phase and each attack", number(0.5, 600)),
    option("--rounds", 3, "runs of each attack"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Runs all attacks, or those of `--only`."""
    logging.getLogger("asyncio").addFilter(_of_a_closed_loop)
    names = [name for name in SCENARIOS if name in (options.only or SCENARIOS)]
    begin_s = time.monotonic()
    with harness.progress("attacks", options.rounds * len(names)) as advance:

        def tell(verdict: Verdict) -> None:
            print(verdict, file=sys.stderr, flush=True)
            advance()

        verdicts, skipped = run(names, options.seconds, options.rounds, tell)
    result = {**totals(verdicts, skipped), "seconds": round(time.monotonic() - begin_s, 1)}

    return harness.Outcome(result, complaints(result, names))


if __name__ == "__main__":
    harness.run(main)
