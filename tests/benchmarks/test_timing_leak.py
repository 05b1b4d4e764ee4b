"""The timing leak's verdict: at chance with the protection, nearly always right without."""

from __future__ import annotations

import pytest

from benchmarks.timing_leak import Seen, best_threshold, guess, verdict

WAYS = ("all", "answer", "clock", "daemon_clock")


def right(**by: int) -> dict[str, int]:
    return {**dict.fromkeys(WAYS, 500), **by}


def test_a_tenant_that_guesses_at_chance_learns_nothing() -> None:
    result, missed = verdict(right(all=547, clock=453), right(all=1000), 1000)
    assert missed == []
    assert result["with"] == {"right": 547, "probes": 1000, "within": True, "by": right(all=547, clock=453)}
    assert result["without"]["right"] == 1000


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [452, 548])
def test_each_way_to_tell_has_to_be_within_three_deviations(way: str, count: int) -> None:
    result, missed = verdict(right(**{way: count}), right(all=1000), 1000)
    assert not result["with"]["within"]
    assert len(missed) == 1 and f"{count} of 1000 guesses by {way} are right" in missed[0]


def test_a_probe_that_finds_nothing_where_all_is_common_proves_nothing() -> None:
    assert verdict(right(), right(all=950), 1000)[1] == []
    assert "only 949 of 1000" in verdict(right(), right(all=949), 1000)[1][0]


def test_the_threshold_tells_best_between_what_is_known() -> None:
    assert best_threshold([1, 2, 9], [3, 4, 5]) == 2.5
    assert best_threshold([1, 2], [4, 8, 9]) == 3, "in the widest gap of those that tell as well"
    assert best_threshold([5], [1]) in (0.5, 3, 5.5)
    assert best_threshold([1], [1]) in (0.5, 1.5)


def test_a_hit_or_a_fast_answer_is_taken_for_a_cached_prompt() -> None:
    assert guess(Seen(True, (9.0, 9.0)), (1.0, 1.0)) == {
        "all": True,
        "answer": True,
        "clock": False,
        "daemon_clock": False,
    }
    assert guess(Seen(False, (0.5, 0.5)), (1.0, 1.0))["all"]
    assert not guess(Seen(False, (0.5, 1.0)), (1.0, 1.0))["all"]
