"""What `prefixd stats` and `prefixd stats --last` print of traffic, of the cache's tenants and of the disk."""

from __future__ import annotations

import pytest

from prefixd.base.tiers import Tier
from prefixd.cli.output.tables.answer_tables import print_stats
from prefixd.cli.output.tables.figures import figure_rows, short_seconds
from prefixd.cli.output.tables.period_tables import bars, print_period, wear_line
from prefixd.server.figures.measured_figures import labelled_counts
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import cache_pb2

WHO = ("tenant", "model")


def test_the_last_hour_is_told_tier_by_tier(capsys: pytest.CaptureFixture[str]) -> None:
    total = pb.PeriodFigures(
        asked_tokens=1000,
        hit_tokens=[100, 500, 200, 0],
        loaded_bytes=[0, 0, 3 << 20, 0],
        evicted_blocks=[7, 0, 0, 0],
        requests=12,
        lookups=30,
        generated_tokens=340,
        written_bytes=5 << 20,
        first_token_s=pb.Quantiles(count=12, p50=0.02, p95=0.4, p99=1.5),
    )
    points = [pb.PeriodFigures(asked_tokens=10, hit_tokens=[0, found, 0, 0]) for found in (0, 5, 10)]
    period = pb.Period(seconds=3600, total=total, step_s=60, points=points)
    print_period(pb.StatsResponse(period=period, tiers=[pb.TierStats(tier=Tier(level).wire) for level in (0, 2)]))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "1:00:00" in lines[0]
    assert "prompt tokens: 1,000 asked for, 800 found in the cache (80%)" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("gpu", "cpu", "disk", "remote"))}
    assert rows["gpu"] == ["100", "10.0%", "0", "B", "7"]
    assert rows.keys() == {"gpu", "disk"}, "the tiers of this daemon"
    assert rows["disk"] == ["200", "20.0%", "3.0", "MiB", "0"]
    assert "hit rate, 0:01:00 a bar:  ▄█" in lines
    assert "first token: p50 20 ms, p95 400 ms, p99 1.5 s of 12 requests" in lines
    assert "12 requests ended, 340 tokens generated" in lines


def test_a_daemon_that_drains_says_for_how_long_it_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    print_stats(pb.StatsResponse(version="1", uptime_s=61, draining=True))
    assert capsys.readouterr().out.startswith("prefixd 1: up for 0:01:01, draining\n")


def test_namespaces_of_the_daemons_own_model_have_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    own = pb.NamespaceStats(namespace=cache_pb2.Namespace(name="f9e4b371"), worker=True, blocks=3)
    print_stats(pb.StatsResponse(namespaces=[own], models=[pb.ModelStats(name="llama", namespace="f9e4b371")]))
    assert "f9e4b371 (llama)" in capsys.readouterr().out


def test_nothing_happened(capsys: pytest.CaptureFixture[str]) -> None:
    print_period(pb.StatsResponse(period=pb.Period(seconds=4)))
    assert "0 asked for, 0 found in the cache\n" in capsys.readouterr().out


def test_who_fills_the_cache_is_told_the_largest_first(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = ("blue", "qwen"), ("red", "llama")
    stats = pb.StatsResponse(
        cached=pb.FillStats(
            bytes=labelled_counts(WHO, [(small, 1 << 20), (large, 3 << 20)]),
            blocks=labelled_counts(WHO, [(small, 10), (large, 30)]),
        ),
        traffic=pb.TrafficStats(
            asked_tokens=labelled_counts(WHO, [(large, 1000)]),
            hit_tokens=labelled_counts((*WHO, "tier"), [((*large, "cpu"), 200), ((*large, "disk"), 300)]),
            requests=labelled_counts((*WHO, "outcome"), [((*large, "stop"), 1200), ((*large, "failed"), 3)]),
        ),
        sessions=[pb.SessionStats(client_name="vllm", stored_bytes=2 << 20)],
    )
    print_stats(stats)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    rows = [line.split() for line in lines if line.startswith(("blue", "red"))]
    assert rows[0] == ["red", "llama", "3.0", "MiB", "75%", "-", "1,000", "50%", "-"]
    assert rows[1][:5] == ["blue", "qwen", "1.0", "MiB", "25%"]
    assert "requests ended: 1,200 stop, 3 failed" in lines
    assert any(line.startswith("vllm") and "2.0 MiB" in line for line in lines)


def test_the_wear_of_the_disk() -> None:
    wear = pb.DiskWear(path="/disk", recent_bytes_per_s=(1 << 30) / 86400, mean_bytes_per_s=0)
    assert wear_line(wear) == ("disk: 1.0 GiB a day written at the rate of the last hour, 0 B a day since the start")
    wear.endurance_bytes, wear.used_ratio, wear.left_s = 1_200_000_000_000_000, 0.123, 365.25 * 86400 * 4
    assert wear_line(wear).endswith("; 12.3% of its endurance of 1,200 TB used, 4.0 years left")


def test_histograms_are_told_by_their_quantiles() -> None:
    stats = pb.StatsResponse()
    histogram = stats.timings.lookup_s
    histogram.bounds.extend([0.001, 0.01])
    for tenant in ("blue", "red"):
        histogram.series.add(labels={"tenant": tenant}, counts=[10, 0, 0], sum=0.005)
    histogram.series.add(labels={"tenant": "of a newer daemon"}, counts=[1])
    rows = {place: value for place, value, _ in figure_rows(stats)}
    assert rows["timings.lookup_s"] == "p50 500 us, p95 950 us, p99 990 us of 20"
    assert "timings.load_s" not in rows


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00085, "850 us"), (0.0123, "12.3 ms"), (3.4, "3.4 s"), (125, "0:02:05")]
)
def test_short_times(seconds: float, text: str) -> None:
    assert short_seconds(seconds) == text


def test_bars() -> None:
    assert bars([0.0, 0.5, 1.0]) == " ▄█"
