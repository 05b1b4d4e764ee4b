"""The figures of `Admin.Stats` as a table; the options of their fields describe them (`metric.proto`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message
from rich.table import Table
from rich.text import Text

from prefixd.base.sizes import as_size
from prefixd.cli.output.tables.grid import duration, table
from prefixd.observability.histogram import quantile
from prefixd.v1 import admin_pb2, metric_pb2

METRIC: Any = metric_pb2.metric
"""Option of a field that is a figure."""
METRICS: Any = metric_pb2.metrics
"""Option of a field that is a message with figures."""

_SHOWN_APART = {
    "tiers",
    "tenants",
    "troubles",
    "cached",
    "disk_wear",
    "traffic",
}  # have a table, lines or a command of their own


def figure_table(stats: admin_pb2.StatsResponse) -> Table:
    """Returns a row for each figure that is not 0: its place in `--json`, its value and its description."""
    made = table("figure", "value", "description", right=("value",), fold=("description",))
    for place, value, help_text in figure_rows(stats):
        made.add_row(Text(place), Text(value), Text(help_text, style="dim"))
    return made


def figure_rows(message: Message, within: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields place, value and help of the figures of a message and of messages in it: `scrub.passes`, `2`, `times ...`.

    `within`: prefix of the places, such as "scrub.".
    """
    for field in message.DESCRIPTOR.fields:
        options, place, value = field.GetOptions(), within + field.name, getattr(message, field.name)
        if options.HasExtension(METRIC) and field.enum_type is None:
            metric = options.Extensions[METRIC]
            if metric.info:
                continue
            if metric.labels and field.is_repeated:
                for one in value:
                    place_of_one = ".".join([place, *(one.labels.get(each, "") for each in metric.labels)])
                    amount = one.value if isinstance(one, admin_pb2.LabelledValue) else one.count
                    yield place_of_one, figure(field.name, amount), metric.help
            elif metric.labels:
                if (times := quantile_text(value)) is not None:
                    yield place, times, metric.help
            elif metric.label:
                for key, number in sorted(value.items()):
                    yield f"{place}.{key}", figure(field.name, number), metric.help
            elif field.is_repeated:
                if value:
                    yield place, f"{len(value):,}", metric.help
            elif value:
                yield place, figure(field.name, value), metric.help
        elif options.HasExtension(METRICS) and field.is_repeated and field.name not in _SHOWN_APART:
            part = options.Extensions[METRICS]
            for one in value if len(value) > 1 or not part.several else ():
                yield from figure_rows(one, f"{place}.{getattr(one, part.by)}.")
        elif (
            options.HasExtension(METRICS)
            and not field.is_repeated
            and field.name not in _SHOWN_APART
            and message.HasField(field.name)
        ):
            yield from figure_rows(value, place + ".")


def quantile_text(histogram: admin_pb2.Histogram) -> str | None:
    """Returns the quantiles of a histogram of seconds, all labels together: `p50 12 ms, p95 40 ms, p99 81 ms of 1,200`.

    None without values.
    """
    whole = [series.counts for series in histogram.series if len(series.counts) == len(histogram.bounds) + 1]
    counts = [sum(column) for column in zip(*whole, strict=True)]
    return quantiles_text([quantile(histogram.bounds, counts, share) for share in (0.5, 0.95, 0.99)], sum(counts))


def quantiles_text(values: Sequence[float | None], count: int) -> str | None:
    """Returns the quantiles 50, 95 and 99% in seconds as text; None without values."""
    if not count:
        return None
    named = zip(("p50", "p95", "p99"), values, strict=True)
    return ", ".join(f"{name} {short_seconds(value or 0.0)}" for name, value in named) + f" of {count:,}"


def short_seconds(value: float) -> str:
    """Returns `850 us`, `12 ms`, `3.4 s` or `0:02:05`."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 60 else duration(value)


def figure(name: str, value: float | str) -> str:
    """Formats a figure in the unit at the end of its field's name: `3.0 GiB`, `0.0042 s`, `5,000`; a text as it is."""
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return as_size(int(value))
    if name.endswith("_s"):
        return f"{value:.3g} s" if value < 60 else duration(value)
    return f"{value:,}"
