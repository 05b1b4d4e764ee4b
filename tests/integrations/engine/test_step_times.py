"""How long a step took is known, also when the next one was scheduled before it ended."""

from __future__ import annotations

from prefixd.integrations.engine.step_times import StepTimes


def test_one_step_after_the_other() -> None:
    steps = StepTimes()
    first = steps.begin(100, 1.0)
    assert steps.ended(first, 1.5) == (100, 0.5)
    assert steps.ended(steps.begin(200, 2.0), 3.0) == (200, 1.0), "the pause between them is nobody's"


def test_steps_that_overlap_have_their_own_tokens_and_begin_when_the_one_before_has_ended() -> None:
    """A long prompt between steps of a few tokens would otherwise seem to take as long as they."""
    steps = StepTimes()
    short = steps.begin(4, 1.0)
    long = steps.begin(2048, 1.001)
    assert steps.ended(short, 1.01) == (4, 1.01 - 1.0)
    last = steps.begin(4, 1.011)
    assert steps.ended(long, 1.5) == (2048, 1.5 - 1.01)
    assert steps.ended(last, 1.51) == (4, 1.51 - 1.5)


def test_a_step_that_computes_nothing_may_report_or_not() -> None:
    steps = StepTimes()
    steps.begin(0, 0.5)
    reports = steps.begin(0, 1.0)
    computes = steps.begin(64, 1.1)
    assert steps.ended(reports, 1.2) == (0, 0.0)
    assert steps.ended(computes, 2.0) == (64, 2.0 - 1.2)


def test_a_step_whose_report_never_came_is_forgotten() -> None:
    steps = StepTimes()
    for at in range(1000):
        last = steps.begin(1, float(at))
    assert steps.ended(last, 1000.0) == (1, 1.0)
    assert not steps._under_way
