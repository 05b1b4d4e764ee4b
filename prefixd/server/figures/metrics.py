"""The figures of `Admin.Stats` as Prometheus metrics, as the options of their fields say (`metric.proto`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import metric_pb2

METRIC: Any = metric_pb2.metric
"""Option of a field that is one figure."""
METRICS: Any = metric_pb2.metrics
"""Option of a field that is a message with figures."""

_PREFIX = "prefixd_"
_Labels = dict[str, str]


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
    if family is None:
        make = CounterMetricFamily if metric.counter else GaugeMetricFamily
        names = [*labels, metric.label] if metric.label else list(labels)
        family = families[name] = make(name, metric.help, labels=names)
    if metric.label:
        for key in dict.fromkeys([*metric.keys, *value]):
            family.add_metric([*labels.values(), key], value.get(key, 0))
    elif field.is_repeated:
        family.add_metric(list(labels.values()), len(value))
    elif chosen:
        family.add_metric(list(labels.values()), chosen == metric.value)
    else:
        family.add_metric(list(labels.values()), bool(value) if isinstance(value, str) else value)


def _label_of(message: Message, field: Any) -> str:
    """Returns a field's value as a label: `gpu` for TIER_GPU."""
    value = getattr(message, field.name)
    if field.enum_type is None:
        return str(value)
    name: str = field.enum_type.values_by_number[value].name
    return name.removeprefix(f"{field.enum_type.name.upper()}_").lower()
