"""What the harness of attacks makes of what it has seen; the attacks themselves need a daemon and minutes."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks import hostile
from benchmarks.checks.attacks import people
from benchmarks.checks.attacks.crafted_tokens import block_with_key, crowded_chain
from benchmarks.checks.attacks.scenario import Scenario
from benchmarks.checks.attacks.scenarios import SCENARIOS
from benchmarks.checks.attacks.scene import PLAIN
from benchmarks.checks.attacks.tenant_client import Sample
from benchmarks.checks.attacks.verdict import Verdict, compare, complaints, totals
from benchmarks.checks.tenancy.house import House
from benchmarks.common import harness
from prefixd.cache import BlockChain
from prefixd.cache.index.keys.block_keys import xxh3_digest
from prefixd.settings import Settings
from tests.benchmarks.test_benchmarks_run import run

TOKENS = bytes(range(64))


def samples(kind: str, *milliseconds: float) -> list[Sample]:
    return [Sample(kind, 0.0, each / 1000) for each in milliseconds]


def verdict_with(**fields: Any) -> Verdict:
    return Verdict("an attack", **fields)


def test_calls_are_compared_by_kind_whatever_each_takes() -> None:
    quiet = samples("match", *[1.0] * 99, 2.0) + samples("generate", *[100.0] * 99, 200.0)
    verdict = verdict_with()
    compare(verdict, [quiet], [quiet])
    assert verdict.bystander_p99_ratio == pytest.approx(1.0)
    meanwhile = samples("match", *[1.0] * 90, *[50.0] * 10) + samples("generate", *[100.0] * 100)
    disturbed = samples("match", *[1.0] * 50, *[900.0] * 50)
    compare(verdict, [quiet, disturbed, quiet], [meanwhile])
    assert verdict.bystander_p99_ratio > 20, "a quiet phase that was none changes nothing"
    assert verdict.samples == (500, 200)
    assert verdict.p99_ms["match"][1] == pytest.approx(50.0)
    assert verdict.p99_ms["generate"][1] == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("verdict", "complaint"),
    [
        (verdict_with(breaches=["it got in"]), "1 of 2 attacks succeed: an attack"),
        (verdict_with(honest_failures=3, failures=["match: gone"]), "3 calls of honest clients failed: an attack"),
        (verdict_with(not_made="no room"), "attacks did not take place: an attack (no room)"),
        (verdict_with(bystander_p99_ratio=5.01), "bystanders' p99 grew to more than 5 times: an attack (5.01)"),
    ],
)
def test_each_bound_is_one(verdict: Verdict, complaint: str) -> None:
    good = Verdict("another", bystander_p99_ratio=4.99)
    assert complaints(totals([good], {})) == []
    assert complaints(totals([good, verdict], {})) == [complaint]


def test_of_an_attack_that_was_made_three_times_the_median_counts() -> None:
    quiet = [samples("match", *[10.0] * 100)] * 3
    attacks = [samples("match", *[each] * 100) for each in (80.0, 20.0, 30.0)]
    verdict = Verdict("one")
    compare(verdict, quiet, attacks)
    assert verdict.ratios == pytest.approx([8.0, 2.0, 3.0])
    assert verdict.bystander_p99_ratio == pytest.approx(3.0) and verdict.samples == (300, 300)


def test_what_was_seen_once_counts() -> None:
    verdict = verdict_with(memory_mib=4.0, seconds=2.0)
    verdict.add(verdict_with(breaches=["it got in"], honest_failures=2, failures=["match: gone"], seconds=3.0))
    verdict.add(verdict_with(not_made="no room", memory_mib=3.0, seconds=1.0))
    assert verdict.breached and verdict.honest_failures == 2 and verdict.failures == ["match: gone"]
    assert (verdict.not_made, verdict.memory_mib, verdict.seconds) == ("no room", 4.0, 6.0)


def test_all_attacks_are_made_in_every_round_and_each_has_one_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes: list[object] = []
    quiet, slow = samples("match", *[10.0] * 100), samples("match", *[20.0] * 100)

    def made(scenario: Scenario, scene: object, seconds: float, phases: list[list[Sample]]) -> tuple[Verdict, Any]:
        phases.append(quiet)
        breaches = ["it got in"] if len(phases) == 3 else []
        return Verdict(scenario.name, breaches=breaches, found={"phase": len(phases)}), slow

    def scene(settings: object) -> AbstractContextManager[object]:
        scenes.append(settings)
        return nullcontext("a scene")

    monkeypatch.setattr(hostile, "_run_one", made)
    monkeypatch.setattr(hostile, "Scene", scene)
    steps: list[str] = []
    names = ["key squatting", "silent Put"]
    verdicts, skipped = hostile.run(names, 1.0, 2, lambda verdict: steps.append(verdict.name))
    assert steps == names * 2 and [verdict.name for verdict in verdicts] == names and not skipped
    first, second = verdicts
    assert first.breached and first.found == {"phase": 3} and not second.breached and second.found == {"phase": 2}
    assert [first.ratios, second.ratios] == [[2.0, 2.0]] * 2 and first.samples == (400, 200)
    assert len(scenes) == 3, "one a round, and one after a breach"


def test_of_two_ratios_the_greater_counts() -> None:
    verdict = Verdict("one")
    compare(verdict, [samples("match", *[10.0] * 100)], [samples("match", *[each] * 100) for each in (10.0, 80.0)])
    assert verdict.bystander_p99_ratio == pytest.approx(8.0)


def test_a_scenario_that_did_not_run_is_missed_unless_it_was_skipped() -> None:
    result = totals([Verdict("one")], {"two": "run as root"})
    assert complaints(result, ["one", "two"]) == []
    assert complaints(result, ["one", "two", "three"]) == ["scenarios did not run: three"]


def test_the_command_fails_and_writes_what_it_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    breached = Verdict("silent Put", breaches=["nobody has room"], bystander_p99_ratio=2.0, seconds=1.0)
    breached.fail(["alice: store: no room"] * 7)
    monkeypatch.setattr(hostile, "run", lambda names, seconds, rounds, step: (step(breached), ([breached], {}))[1])
    monkeypatch.setattr("sys.argv", ["hostile", "--only", "silent Put", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        harness.run(hostile.main)
    assert ended.value.code == 2
    assert "1 of 1 attacks succeed: silent Put; 7 calls of honest clients failed" in capsys.readouterr().err
    result = json.loads(file.read_text())
    assert (result["breaches"], result["honest_failures"], result["worst_bystander_p99_ratio"]) == (1, 7, 2.0)
    (scenario,) = result["scenarios"]
    assert scenario["breached"] and scenario["name"] == "silent Put" and len(scenario["failures"]) == 5


@pytest.mark.slow
def test_help_names_an_example_that_can_be_run() -> None:
    done = run("benchmarks.checks.hostile", "--help")
    assert done.returncode == 0 and "example: python -m benchmarks.checks.hostile --only" in done.stdout


def test_every_scenario_says_what_it_is_and_where_its_breach_was_seen() -> None:
    results = Path(hostile.__file__).parents[1] / "results"
    before = [json.loads(path.read_text()) for path in sorted(results.glob("hostile*_before.json"))]
    seen = {each["name"] for result in before for each in result["scenarios"] if each["breached"]}
    for name, scenario in SCENARIOS.items():
        assert scenario.__doc__ and scenario.name == name
        if scenario.closed_by:
            assert (Path(hostile.__file__).parents[2] / scenario.closed_by).exists(), name
        else:
            assert name in seen, f"{name} was never seen to succeed"


def test_settings_of_the_people_are_settings(tmp_path: Path) -> None:
    wanted = {**PLAIN, **House(tmp_path, people.QUOTAS).settings, **people.users()}
    made = Settings.load(Path(os.devnull), {name: str(value) for name, value in wanted.items()}, {})
    assert set(made.tenants) == set(people.QUOTAS)


def test_a_block_behind_another_can_have_any_key_in_a_quarter_of_the_namespaces() -> None:
    key = BlockChain(TOKENS, 16, 0x1234567890ABCDEF).key(0)
    for parent in (b"", bytes(range(16))):
        made = {seed: block_with_key(key, seed, parent) for seed in range(7, 15)}
        assert sum(block is not None for block in made.values()) == 2
        assert all(xxh3_digest(parent + block, seed) == key for seed, block in made.items() if block is not None)


def test_a_prompt_of_crowded_keys() -> None:
    chain = BlockChain(crowded_chain(50, seed=9), 16, 9)
    keys = {chain.key(index) for index in range(50)}
    assert len(keys) == 50 and {key[:8] for key in keys} == {bytes(8)}
