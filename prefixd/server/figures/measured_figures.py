"""The daemon's histograms and counts by label, as messages of `Admin.Stats`."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence

import prefixd
from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.observability.histogram import Histogram, LabelledCounter, Series, quantile
from prefixd.observability.measurements import Timings, Traffic
from prefixd.v1 import admin_pb2 as pb

_SERIES_WORK = 20  # pieces of work, see `Pacer`


async def timings_figures(timings: Timings) -> pb.Timings:
    """Returns all histograms. Each is an attribute of `timings` with the name of its field."""
    found, pacer = pb.Timings(), Pacer()
    for field in found.DESCRIPTOR.fields:
        histogram: Histogram = getattr(timings, field.name)
        message: pb.Histogram = getattr(found, field.name)
        message.bounds.extend(histogram.bounds)
        for values, series in list(histogram):
            _add_series(message, histogram, values, series)
            await pacer.worked(_SERIES_WORK)
    return found


async def traffic_figures(traffic: Traffic) -> pb.TrafficStats:
    """Returns the counts by tenant and model. Each is an attribute of `traffic` with the name of its field."""
    found = pb.TrafficStats()
    for field in found.DESCRIPTOR.fields:
        counter: LabelledCounter = getattr(traffic, field.name)
        getattr(found, field.name).extend(labelled_counts(counter.labels, counter))
        await give_way()
    return found


def labelled_counts(labels: Sequence[str], counts: Iterable[tuple[Sequence[str], int]]) -> list[pb.LabelledCount]:
    """Returns a message for each combination of values of `labels`."""
    return [pb.LabelledCount(labels=dict(zip(labels, values, strict=True)), count=count) for values, count in counts]


def quantiles(bounds: Sequence[float], counts: Sequence[int]) -> pb.Quantiles | None:
    """Estimates the quantiles of values in buckets; None without values."""
    p50, p95, p99 = (quantile(bounds, counts, share) for share in (0.5, 0.95, 0.99))
    if p50 is None or p95 is None or p99 is None:
        return None
    return pb.Quantiles(count=sum(counts), p50=p50, p95=p95, p99=p99)


def build_info() -> pb.BuildInfo:
    """Returns what runs here."""
    return pb.BuildInfo(
        version=prefixd.__version__,
        python=platform.python_version(),
        platform=f"{platform.system().lower()}-{platform.machine()}",
    )


def _add_series(message: pb.Histogram, histogram: Histogram, values: Sequence[str], series: Series) -> None:
    message.series.add(
        labels=dict(zip(histogram.labels, values, strict=True)),
        counts=series.counts,
        sum=series.total,
        exemplars=[
            pb.Exemplar(bucket=bucket, value=value, trace_id=trace_id)
            for bucket, (value, trace_id) in sorted(series.exemplars.items())
        ],
    )
