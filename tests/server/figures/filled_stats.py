"""A `StatsResponse` in which every field is set, so that a page made of it has every metric."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import metric_pb2

_KNOWN = {
    "tier": ("gpu", "cpu", "disk", "remote"),
    "urgency": ("demand", "prefetch"),
    "outcome": ("stop", "length", "cancelled", "refused", "failed"),
    "step": ("fill", "write"),
    "end": ("released", "expired", "session"),
}


def filled_stats() -> pb.StatsResponse:
    """Returns figures with a value in every field, two messages in every list and every tier."""
    stats = pb.StatsResponse()
    _fill(stats)
    return stats


def _fill(message: Message) -> None:
    for field in message.DESCRIPTOR.fields:
        value: Any = getattr(message, field.name)
        metric = field.GetOptions().Extensions[metric_pb2.metric]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key in metric.keys or ("one", "two"):
                value[key] = 7
        elif metric.labels and field.is_repeated:
            for labels in _combinations(list(metric.labels)):
                amount = "value" if field.message_type is pb.LabelledValue.DESCRIPTOR else "count"
                value.add(labels=labels, **{amount: 9})
        elif metric.labels:
            value.bounds.extend([0.1, 1.0])
            for labels in _combinations(list(metric.labels)):
                value.series.add(labels=labels, counts=[3, 2, 1], sum=4.5)
        elif field.message_type is not None and field.is_repeated:
            for number in range(1, 5 if field.name == "tiers" else 3):
                one = value.add()
                _fill(one)
                for name in ("tier", "name", "part"):
                    if (by := one.DESCRIPTOR.fields_by_name.get(name)) is not None:
                        setattr(one, name, number if by.enum_type is not None else f"{name}-{number}")
        elif field.message_type is not None:
            value.SetInParent()
            _fill(value)
        elif field.is_repeated:
            value.extend([1, 2])
        elif field.enum_type is not None:
            setattr(message, field.name, 3)
        elif field.type == field.TYPE_BYTES:
            setattr(message, field.name, b"7")
        else:
            setattr(message, field.name, "text" if field.type == field.TYPE_STRING else 1)


def _combinations(names: list[str]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [{}]
    for name in names:
        found = [{**labels, name: value} for labels in found for value in _KNOWN.get(name, ("one",))]
    return found
