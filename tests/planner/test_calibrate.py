"""What prefill costs is found again from how long prompts took, even where the measurement is not quite right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.planner.machine.calibrate import fitted_prefill

TOKENS = (48, 496, 1008)
costs = st.floats(0, 1, allow_subnormal=False)


def prefill_s(begun_s: float, token_s: float, attended_s: float) -> list[float]:
    return [begun_s + token_s * tokens + attended_s * tokens * tokens / 2 for tokens in TOKENS]


@given(begun=costs, token=st.floats(0.1, 1), attended=costs)
def test_costs_are_found_again(begun: float, token: float, attended: float) -> None:
    said = begun * 1e-2, token * 1e-3, attended * 1e-6
    assert fitted_prefill(TOKENS, prefill_s(*said)) == pytest.approx(said, rel=1e-6, abs=1e-12)


@given(seconds=st.tuples(*[st.floats(1e-3, 10)] * 3))
def test_no_cost_is_below_zero(seconds: tuple[float, float, float]) -> None:
    begun_s, token_s, attended_s = fitted_prefill(TOKENS, seconds)
    assert begun_s >= 0 and token_s > 0 and attended_s >= 0


def test_prompts_that_get_cheaper_with_length_attend_for_nothing() -> None:
    # Measured 2% too fast at the end: attention would cost less than nothing, and the other two terms take it over.
    short, middle, long = prefill_s(1e-3, 1e-3, 0.0)
    begun_s, token_s, attended_s = fitted_prefill(TOKENS, [short, middle, long * 0.98])
    assert attended_s == 0 and begun_s > 1e-3 and token_s == pytest.approx(1e-3, rel=0.03)
