"""The timing leak's verdict: at chance with the protection, nearly always right without."""

from __future__ import annotations

import pytest

from benchmarks.checks.timing_leak import Seen, guess, verdict

WAYS = ("answer", "clock", "daemon_clock")
ALL_RIGHT = dict.fromkeys(WAYS, 1000)


def right(**by: int) -> dict[str, int]:
    return {**dict.fromkeys(WAYS, 500), **by}


def test_a_tenant_that_guesses_at_chance_learns_nothing() -> None:
    result, missed = verdict(right(answer=546, clock=453), {**ALL_RIGHT, "clock": 980}, 1000)
    assert missed == []
    assert result["with"] == {"right": 453, "probes": 1000, "within": True, "by": right(answer=546, clock=453)}
    assert result["without"]["right"] == 980


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [452, 548])
def test_each_way_to_tell_has_to_be_within_three_deviations(way: str, count: int) -> None:
    result, missed = verdict(right(**{way: count}), ALL_RIGHT, 1000)
    assert not result["with"]["within"]
    assert len(missed) == 1 and f"{count} of 1000 guesses by {way} are right" in missed[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_tell_that_finds_nothing_where_all_is_common_proves_nothing(way: str) -> None:
    assert verdict(right(), {**ALL_RIGHT, way: 950}, 1000)[1] == []
    (missed,) = verdict(right(), {**ALL_RIGHT, way: 949}, 1000)[1]
    assert f"only 949 of 1000 guesses by {way}" in missed


def test_the_faster_half_of_a_round_is_taken_for_the_cached_prompts() -> None:
    seen = [Seen(True, (2.0, 0.3)), Seen(False, (1.0, 0.2)), Seen(False, (9.0, 0.1)), Seen(False, (3.0, 0.4))]
    assert guess(seen, 2) == {
        "answer": [True, False, False, False],
        "clock": [True, True, False, False],
        "daemon_clock": [False, True, True, False],
    }
