"""Protobuf messages as JSON types."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.message import Message


def to_plain(message: Message) -> dict[str, Any]:
    """Converts a message to JSON types: every field, bytes as hex, enum values in lower case without their prefix.
    A number that JSON does not have (NaN, infinity) becomes None: no parser would read the rest of the document."""
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            plain[field.name] = {key: _finite(item) for key, item in value.items()}
        elif field.is_repeated:
            plain[field.name] = [_plain_value(field, item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            plain[field.name] = None
        else:
            plain[field.name] = _plain_value(field, value)
    return plain


def _plain_value(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return to_plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        names = field.enum_type.values_by_number
        prefix = f"{_to_upper_snake(field.enum_type.name)}_"
        return names[value].name.removeprefix(prefix).lower() if value in names else value
    return _finite(value)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _to_upper_snake(name: str) -> str:
    return "".join(f"_{letter}" if letter.isupper() and index else letter for index, letter in enumerate(name)).upper()
