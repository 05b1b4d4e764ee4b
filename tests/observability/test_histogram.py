"""Histograms and counters by labels are right and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.observability.histogram import (
    MOST_OF_A_TENANT,
    MOST_SERIES,
    OTHERS,
    Histogram,
    LabelledCounter,
    bounds,
    quantile,
)


def test_bounds() -> None:
    assert bounds(0.1, 2.5) == (0.1, 0.25, 0.5, 1.0, 2.5)


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=50))
def test_buckets_are_those_of_prometheus(values: list[float]) -> None:
    histogram = Histogram(bounds(0.01, 10.0))
    for value in values:
        histogram.observe(value)
    ((_, series),) = histogram
    below = 0
    for bound, count in zip(histogram.bounds, series.counts, strict=False):
        below += count
        assert below == sum(value <= bound for value in values)
    assert sum(series.counts) == len(values)
    assert series.total == pytest.approx(sum(values))


@given(st.lists(st.floats(0.001, 9.0), min_size=1, max_size=50), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    histogram = Histogram(bounds(0.01, 10.0))
    for value in values:
        histogram.observe(value)
    estimate = quantile(histogram.bounds, histogram.counts, share)
    at = next(at for at in range(1, len(values) + 1) if at >= share * len(values))
    true = sorted(values)[at - 1]
    upper = next(bound for bound in histogram.bounds if true <= bound)
    lower = max((bound for bound in histogram.bounds if bound < true), default=0.0)
    assert estimate is not None and lower <= estimate <= upper + 1e-9


def test_quantiles_at_the_ends() -> None:
    assert quantile((1.0, 2.0), [0, 0, 0], 0.5) is None
    assert quantile((1.0, 2.0), [0, 0, 4], 0.5) == 2.0
    assert quantile((0.0, 1.0), [4, 0, 0], 0.5) == 0.0


def test_values_count_several_times_and_show_their_last_trace() -> None:
    histogram = Histogram((1.0, 2.0), ("tier",))
    histogram.observe(0.5, "cpu", times=3, trace_id="a")
    histogram.observe(0.7, "cpu", trace_id="b")
    histogram.observe(5.0, "disk")
    found = dict(histogram)
    assert (found["cpu",].counts, found["cpu",].exemplars) == ([4, 0, 0], {0: (0.7, "b")})
    assert (found["disk",].counts, found["disk",].exemplars) == ([0, 0, 1], {})
    with pytest.raises(ValueError, match="give each one value"):
        histogram.observe(1.0, "cpu", "more")


def test_no_tenant_uses_up_the_series_of_others() -> None:
    counter = LabelledCounter(("tenant", "model", "tier"))
    for number in range(10 * MOST_SERIES):
        counter.add(1, "flooder", f"model-{number}", "cpu")
    counter.add(5, "other", "model", "cpu")
    found = dict(counter)
    assert found["other", "model", "cpu"] == 5
    assert len(found) == MOST_OF_A_TENANT + 2
    assert found["flooder", OTHERS, "cpu"] == 10 * MOST_SERIES - MOST_OF_A_TENANT
    assert counter.total == 10 * MOST_SERIES + 5


def test_tenants_together_hide_no_other_tenant() -> None:
    counter = LabelledCounter(("tenant", "model", "tier"))
    for flooder in range(2 * MOST_SERIES // MOST_OF_A_TENANT):
        for number in range(MOST_OF_A_TENANT):
            counter.add(1, f"flooder-{flooder}", f"model-{number}", "cpu")
    counter.add(5, "other", "model", "cpu")
    found = dict(counter)
    assert found["other", OTHERS, "cpu"] == 5
    assert len(found) == MOST_SERIES + MOST_SERIES // MOST_OF_A_TENANT + 1


def test_series_are_bounded_with_many_tenants() -> None:
    histogram = Histogram((1.0,), ("tenant", "model", "outcome"))
    for number in range(3 * MOST_SERIES):
        histogram.observe(0.5, f"tenant-{number}", "model", "stop")
    assert len(list(histogram)) == 2 * MOST_SERIES + 1
    assert dict(histogram)[OTHERS, OTHERS, "stop"].counts == [MOST_SERIES, 0]
    assert histogram.counts == [3 * MOST_SERIES, 0]
    histogram.observe(0.5, f"tenant-{2 * MOST_SERIES - 1}", "another model", "stop")
    assert dict(histogram)[f"tenant-{2 * MOST_SERIES - 1}", OTHERS, "stop"].counts == [2, 0]
