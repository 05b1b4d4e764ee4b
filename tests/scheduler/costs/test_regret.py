from __future__ import annotations

import pytest

from prefixd_scheduler import Regret


def test_time_lost_is_against_the_best_other_choice_and_never_made_up_for() -> None:
    regret = Regret()
    assert regret.judge(3.0, 5.0, 2.0) == 1.0
    assert regret.judge(1.0, 4.0) == 0.0
    assert regret.judge(1.0, None, 0.75) == 0.25
    assert (regret.judged, regret.spent_s, regret.lost_s) == (3, 5.0, 1.25)


@pytest.mark.parametrize("others_s", [(), (None,), (None, None)])
def test_what_cannot_be_compared_is_not_judged(others_s: tuple[None, ...]) -> None:
    regret = Regret()
    assert regret.judge(3.0, *others_s) == 0.0
    assert regret == Regret()
