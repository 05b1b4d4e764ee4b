"""The figures of `Admin.Stats` as Prometheus metrics, as the options of their fields say (`metric.proto`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import metric_pb2

METRIC: Any = metric_pb2.metric
"""Option of a field that is one figure."""
METRICS: Any = metric_pb2.metrics
"""Option of a field that is a message with figures."""

_PREFIX = "prefixd_"
_Labels = dict[str, str]


def metrics_page(stats: pb.StatsResponse, accept: str) -> tuple[bytes, str]:
    """Returns the metrics of these figures and of this process, and their content type, in the format that the header
    `Accept` asks for: OpenMetrics, which has exemplars, or Prometheus' text. A thread may call it."""
    encode, content_type = _choose_encoder(accept)
    registry = CollectorRegistry()
    registry.register(MetricsCollector(stats))
    ProcessCollector(registry=registry)
    return encode(registry), content_type


def _choose_encoder(accept: str) -> tuple[Any, str]:
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # the library fails for a version such as `1.0*`
        return choose_encoder("")


class MetricsCollector(Collector):
    """Collects metrics from figures that do not change any more, so that a thread may do it."""

    def __init__(self, stats: pb.StatsResponse) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        _add_message(families, self._stats, _PREFIX, {})
        yield from families.values()


def _add_message(families: dict[str, Metric], message: Message, prefix: str, labels: _Labels) -> None:
    for field in message.DESCRIPTOR.fields:
        options = field.GetOptions()
        if options.HasExtension(METRIC):
            _add_figure(families, message, field, options.Extensions[METRIC], prefix, labels)
        elif options.HasExtension(METRICS):
            part = options.Extensions[METRICS]
            if not field.is_repeated:
                if message.HasField(field.name):
                    _add_message(families, getattr(message, field.name), prefix + part.prefix, labels)
                continue
            each = getattr(message, field.name)
            for one in each if len(each) > 1 or not part.several else ():
                named = labels | {part.label: _label_of(one, one.DESCRIPTOR.fields_by_name[part.by])}
                _add_message(families, one, prefix + part.prefix, named)


def _add_figure(
    families: dict[str, Metric],
    message: Message,
    field: Any,
    metric: metric_pb2.Metric,
    prefix: str,
    labels: _Labels,
) -> None:
    value: Any = getattr(message, field.name)
    chosen = "" if field.enum_type is None else field.enum_type.values_by_number[value].name
    if (field.has_presence and not message.HasField(field.name)) or (chosen and chosen == metric.absent):
        return
    name = prefix + (metric.name or field.name)
    family: Any = families.get(name)
    own = [each.name for each in value.DESCRIPTOR.fields] if metric.info else [*metric.labels]
    if family is None:
        names = [*labels, *own, *([metric.label] if metric.label else [])]
        family = families[name] = _family_type(field, metric)(name, metric.help, labels=names)
    outer = list(labels.values())
    if metric.info:
        family.add_metric([*outer, *(str(getattr(value, each)) for each in own)], 1)
    elif metric.labels and field.is_repeated:
        for one in value:
            amount = one.value if isinstance(one, pb.LabelledValue) else one.count
            family.add_metric([*outer, *(one.labels.get(each, "") for each in own)], amount)
    elif metric.labels:
        for series in value.series:
            buckets = _buckets(value.bounds, series)
            family.add_metric([*outer, *(series.labels.get(each, "") for each in own)], buckets, series.sum)
    elif metric.label:
        for key in dict.fromkeys([*metric.keys, *value]):
            family.add_metric([*outer, key], value.get(key, 0))
    elif field.is_repeated:
        family.add_metric(outer, len(value))
    elif chosen:
        family.add_metric(outer, chosen == metric.value)
    else:
        family.add_metric(outer, bool(value) if isinstance(value, str) else value)


def _family_type(field: Any, metric: metric_pb2.Metric) -> Any:
    if metric.labels and not field.is_repeated:
        return HistogramMetricFamily
    return CounterMetricFamily if metric.counter else GaugeMetricFamily


def _buckets(bounds: Sequence[float], series: pb.HistogramSeries) -> list[Any]:
    """Returns for each bucket its bound as text, the values up to it, and the exemplar if it has one."""
    exemplars = {each.bucket: Exemplar({"trace_id": each.trace_id}, each.value) for each in series.exemplars}
    below = itertools.accumulate(series.counts)
    return [
        ("+Inf" if math.isinf(bound) else repr(bound), count, exemplars.get(at))
        for at, (bound, count) in enumerate(zip([*bounds, math.inf], below, strict=True))
    ]


def _label_of(message: Message, field: Any) -> str:
    """Returns a field's value as a label: `gpu` for TIER_GPU."""
    value = getattr(message, field.name)
    if field.enum_type is None:
        return str(value)
    name: str = field.enum_type.values_by_number[value].name
    return name.removeprefix(f"{field.enum_type.name.upper()}_").lower()
