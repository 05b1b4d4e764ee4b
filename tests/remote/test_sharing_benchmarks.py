"""The benchmarks of shared stores in short, and proof that they see what they look for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import remote
from benchmarks.checks import bit_rot
from benchmarks.checks.damaged_store import forged, remote_rot
from benchmarks.checks.damaged_store.forgery import KINDS
from benchmarks.checks.damaged_store.object_damage import Flip
from benchmarks.common.block_bytes import BlockBytes
from benchmarks.sharing import first_token_by_rate as first_token
from benchmarks.sharing import second_host, store_down
from benchmarks.sharing.first_token_by_rate import Plan, Point
from benchmarks.workloads.trace_requests import made_up, requests_of
from prefixd.client import Client
from tests.remote.valkey_server import valkey_binary


@pytest.fixture(autouse=True)
def _server() -> None:
    valkey_binary()  # skips where there is none


@pytest.fixture(autouse=True)
def _patient_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an answer comes while a prompt waits for it is not for a test to judge."""
    sharing, patient = second_host.sharing, {"remote.lookup_s": 10.0, "remote.timeout_s": 10.0}
    monkeypatch.setattr(second_host, "sharing", lambda *chosen: sharing(*chosen) | patient)


def options(*words: str) -> argparse.Namespace:
    return remote.main.parser().parse_args(words)


def test_every_suite_runs() -> None:
    small = ("--requests", "8", "--bytes-per-token", "64", "--rates", "1", "--tokens", "32", "--repeats", "1")
    less = ("--copied-bytes", "64MiB", "--sessions", "1", "--rounds", "5", "--trace-bytes", "4MiB")
    result, missed = remote.run(options(*small, *less))
    assert set(remote.SUITES) <= set(result) and all(result[name]["bounds"] for name in remote.SUITES)
    trace = result["trace"]
    assert trace["hit_rate"] == trace["achievable_hit_rate"] > 0 and trace["wrong_bytes"] == 0
    assert trace["hit_blocks_by_tier"]["remote"] > 0
    assert 1 <= result["copies"]["bytes_copied_per_byte"] <= 2
    assert [each["tokens"] for each in result["first_token"]["points"]] == [32]
    assert result["store_down"]["closed_store_p50_ratio"] > 0 and result["store_down"]["calls"] == 10
    # How long anything takes is not for a test to judge.
    assert all(each.startswith(("first_token", "store_down")) for each in missed)


def test_a_host_that_finds_less_or_wrong_bytes_is_told() -> None:
    sound = {"hit_rate": 0.9, "achievable_hit_rate": 0.9, "wrong_bytes": 0, "integrity_violations": 0}
    assert not second_host.violations(sound)
    assert "hit_rate is 0.8, less than 0.9" in second_host.violations({**sound, "hit_rate": 0.8})[0]
    assert "wrong_bytes is 7" in second_host.violations({**sound, "wrong_bytes": 7})[0]


def test_a_host_that_has_other_bytes_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, stored = BlockBytes.content, second_host.wait_until_shared

    def spoilt(self: BlockBytes, first_block: int = 0) -> np.ndarray:
        return right(self, first_block) ^ np.uint8(1)

    def then_others(client: Client, blocks: int) -> None:
        stored(client, blocks)
        monkeypatch.setattr(BlockBytes, "content", spoilt)

    monkeypatch.setattr(second_host, "wait_until_shared", then_others)
    (request,) = made_up(1, seed=0)
    result = second_host.measure([request], 64, tmp_path, lambda: None)
    assert result["wrong_bytes"] > 0


def test_made_up_requests_share_prefixes_and_stay_within_the_limit() -> None:
    requests = requests_of(None, 50, 100)
    blocks = {request.hash_ids[: end + 1] for request in requests for end in range(len(request.hash_ids))}
    assert len(blocks) <= 100 < sum(len(request.hash_ids) for request in made_up(50, seed=1))
    assert sum(len(request.hash_ids) for request in requests) > len(blocks)


def test_suites_that_are_not_run_keep_their_results(tmp_path: Path) -> None:
    file = tmp_path / "remote.json"
    assert remote.earlier(file) == {}
    file.write_text('{"benchmark": "remote", "copies": {"bytes": 7}, "circumstances": {}}')
    assert remote.earlier(file) == {"copies": {"bytes": 7}}
    file.write_text("[]")
    assert remote.earlier(file) == {}


def test_the_worst_point_counts() -> None:
    def point(auto: float) -> Point:
        times = {"auto": auto, "always": 100.0, "recompute": 80.0}
        return Point(1.0, 64, times, times, times, 0.5)

    result = first_token.summary([point(60), point(88)])
    assert result["worst_ratio"] == 1.1 and not first_token.violations(result)
    assert "worst_ratio is 1.11" in first_token.violations(first_token.summary([point(88.8)]))[0]
    assert Plan(repeats=2).repeats_of(64) == 4 and Plan(repeats=2).repeats_of(1024) == 2


def test_what_a_dead_store_costs_is_compared_round_by_round() -> None:
    rng = np.random.default_rng(0)
    noise = 1 + rng.random(200)
    times = {
        arm: {call: noise * (1.1 if arm == "frozen" else 1.0) for call in store_down.CALLS} for arm in store_down.ARMS
    }
    result = store_down.summary([times, times], {"closed": [0.1], "frozen": [0.2]})
    assert (result["closed_time_ratio"], result["frozen_time_ratio"], result["worst_ratio"]) == (1.0, 1.1, 1.1)
    assert len(store_down.violations(result)) == 3 and result["frozen_first_call_ms"] == 200


def test_every_changed_object_is_found_and_nothing_wrong_is_served() -> None:
    findings = remote_rot.run(12, seed=1, numbers=6)
    assert not findings.broken, findings.result()
    assert findings.flips.total() == findings.detected.total() == 12 and findings.recomputed >= 12


def test_what_was_not_changed_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = remote_rot.draw

    def unchanged(*arguments: object) -> list[Flip]:
        return [Flip(flip.kind, flip.blocks, ()) for flip in draw(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(remote_rot, "draw", unchanged)
    findings = remote_rot.run(2, seed=1, numbers=2)
    assert (findings.flips.total(), findings.detected.total()) == (2, 0) and "undetected is 2" in findings.broken


def test_no_forged_block_is_served() -> None:
    findings = forged.run(4 * len(KINDS), seed=1, blocks=len(KINDS))
    assert not findings.broken, findings.result()
    assert set(findings.forged) == set(KINDS) and findings.refused == 4 * len(KINDS)


def test_an_object_that_is_served_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forged.Attack, "_forged", lambda attack, number, victim: ("right", victim.data))
    findings = forged.run(2, seed=1, blocks=1)
    assert (findings.forged.total(), findings.served, findings.refused) == (2, 2, 0)


def test_the_command_takes_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    words = ["bit_rot", "--tier", "remote", "--flips", "2", "--forged", "2", "--json", str(file)]
    monkeypatch.setattr(forged, "run", partial(forged.run, blocks=2))
    monkeypatch.setattr(remote_rot, "run", partial(remote_rot.run, numbers=2))
    monkeypatch.setattr("sys.argv", words)
    bit_rot.main()
    assert '"tier": "remote"' in file.read_text() and '"forged_served": 0' in file.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--suites", "trace,nothing"), "'nothing' is no suite"),
        (("--tokens", "65"), "65 tokens are not whole blocks"),
        (("--rates", "0"), "'0' is not from"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(
    words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(*words)
    assert message in capsys.readouterr().err
