"""The metrics page has every figure, under a name that Prometheus' conventions allow."""

from __future__ import annotations

import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from prefixd.observability.measurements import Measurements
from prefixd.server.figures.measured_figures import timings_figures, traffic_figures
from prefixd.server.figures.metrics import metrics_page
from prefixd.v1 import admin_pb2 as pb
from tests.server.figures.filled_stats import filled_stats

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def test_both_formats_have_the_same_metrics() -> None:
    stats = filled_stats()
    text, content_type = metrics_page(stats, "")
    assert content_type.startswith("text/plain")
    plain = {family.name: family for family in text_string_to_metric_families(text.decode())}
    modern, content_type = metrics_page(stats, OPEN_METRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert {family.name for family in open_metrics(modern.decode())} == plain.keys()
    assert plain["prefixd_time_to_first_token_seconds"].type == "histogram"
    assert plain["prefixd_traffic_hit_tokens"].type == "counter"
    assert plain["prefixd_build_info"].samples[0].labels.keys() == {"version", "python", "platform"}
    assert plain["process_resident_memory_bytes"].samples[0].value > 0


@pytest.mark.parametrize("accept", ["text/plain; version=1.0.0*/*", "text/plain; version=a.b"])
def test_a_scraper_with_a_wrong_version_gets_a_page(accept: str) -> None:
    page, content_type = metrics_page(filled_stats(), f"{accept}, text/plain")
    assert content_type.startswith("text/plain") and b"\nprefixd_draining " in page


def test_names_follow_the_conventions() -> None:
    """As far as `promtool check metrics` says; `make test-operator` runs it."""
    text, _ = metrics_page(filled_stats(), "")
    families = [each for each in text_string_to_metric_families(text.decode()) if each.name.startswith("prefixd_")]
    assert len(families) > 80
    for family in families:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name), family.name
        assert family.documentation, family.name
        words = set(family.name.split("_"))
        assert not words & {
            "ms",
            "us",
            "millis",
            "milliseconds",
            "kb",
            "mb",
            "days",
            "hours",
            "minutes",
            "percent",
        }
        if family.type != "counter":
            assert not family.name.endswith(("_total", "_count", "_sum", "_bucket")), family.name


async def test_histograms_are_cumulative_and_show_traces_in_open_metrics() -> None:
    measurements = Measurements()
    timings = measurements.timings
    timings.first_token_s.observe(0.02, "blue", "qwen", trace_id="ab" * 16)
    timings.first_token_s.observe(0.2, "blue", "qwen")
    timings.first_token_s.observe(1000.0, "blue", "qwen")
    measurements.traffic.find(("blue", "qwen"), [0, 32, 0, 0])
    stats = pb.StatsResponse(
        timings=await timings_figures(timings), traffic=await traffic_figures(measurements.traffic)
    )
    page, _ = metrics_page(stats, OPEN_METRICS)
    families = {family.name: family for family in open_metrics(page.decode())}
    samples = families["prefixd_time_to_first_token_seconds"].samples
    buckets = {sample.labels["le"]: sample for sample in samples if sample.name.endswith("_bucket")}
    assert [buckets[bound].value for bound in ("0.01", "0.025", "0.1", "0.25", "100.0", "+Inf")] == [0, 1, 1, 2, 2, 3]
    exemplar = buckets["0.025"].exemplar
    assert exemplar is not None and (exemplar.labels, exemplar.value) == ({"trace_id": "ab" * 16}, 0.02)
    assert buckets["0.25"].exemplar is None
    assert next(sample.value for sample in samples if sample.name.endswith("_count")) == 3
    (hits,) = families["prefixd_traffic_hit_tokens"].samples
    assert (hits.labels, hits.value) == ({"tenant": "blue", "model": "qwen", "tier": "cpu"}, 32)
