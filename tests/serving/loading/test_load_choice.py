"""A decision about a load is judged by what the other choices would have taken."""

from __future__ import annotations

import pytest

from prefixd.serving.loading.load_choice import LoadChoice, LoadCounters
from prefixd_scheduler import CostModel, Distance, Stretch

TOKENS, BLOCK = 110, 10
LOAD_S, COMPUTE_S, REST_S = 2.0, 10.0, 1.0  # of the 100 cached tokens, and of the 10 behind them


@pytest.fixture
def cost() -> CostModel:
    """A token takes 0.1 s, a byte 0.002 s."""
    model = CostModel()
    model.observe_compute(100, COMPUTE_S)
    model.observe_load(Distance.DISK, 1000, LOAD_S)
    return model


def judged(
    cost: CostModel, took_s: float, *, ahead_s: float = 0.0, backlog_s: float = 0.0, **done: bool
) -> LoadCounters:
    choice, counters = LoadChoice((Stretch(Distance.DISK, 100, 1000),), 5.0), LoadCounters()
    choice.note_turn(5.0 + ahead_s, backlog_s)
    choice.note_turn(99.0, 99.0)
    done = {"cut": False, "beside": False} | done
    counters.judge(choice, cost, 5.0 + ahead_s + took_s, TOKENS, BLOCK, **done)
    assert counters.decided == counters.regret.judged == 1
    assert counters.regret.spent_s == pytest.approx(took_s)
    return counters


@pytest.mark.parametrize(
    ("took_s", "done", "lost_s"),
    [
        (LOAD_S + REST_S, {}, 0.0),  # loaded, as fast as estimated
        (15.0, {}, 15.0 - COMPUTE_S - REST_S),  # loaded, and computing would have been faster
        (COMPUTE_S + REST_S, {"cut": True}, COMPUTE_S - LOAD_S),
        (4.0, {"beside": True}, 1.0),
    ],
)
def test_time_is_lost_against_what_was_not_done(
    cost: CostModel, took_s: float, done: dict[str, bool], lost_s: float
) -> None:
    counters = judged(cost, took_s, **done)
    assert counters.regret.lost_s == pytest.approx(lost_s)
    assert (counters.cut, counters.beside) == (int("cut" in done), int("beside" in done))


def test_a_load_that_was_not_made_would_have_begun_when_it_was_decided(cost: CostModel) -> None:
    assert judged(cost, 11.0, cut=True, ahead_s=1.5).regret.lost_s == pytest.approx(11.0 - (LOAD_S - 1.5 + REST_S))
    assert judged(cost, 11.0, cut=True, ahead_s=50.0).regret.lost_s == pytest.approx(11.0 - REST_S)


def test_what_others_compute_first_is_lost_by_no_choice(cost: CostModel) -> None:
    assert judged(cost, 21.0, backlog_s=10.0).regret.lost_s == 0.0


def test_without_observations_nothing_is_judged() -> None:
    choice, counters = LoadChoice((Stretch(Distance.DISK, 100, 1000),), 5.0), LoadCounters()
    counters.judge(choice, CostModel(), 9.0, TOKENS, BLOCK, cut=False, beside=False)
    assert (counters.decided, counters.regret.judged) == (1, 0)
