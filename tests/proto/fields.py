"""What the contracts promise, a line each: fields with number, label and type, values of enums, and calls.

`python tests/proto/fields.py` adds to `fields.txt` what is new in the contracts. Lines that are there stay: a
field that is taken out has its number reserved instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from prefixd.v1 import admin_pb2, cache_pb2, inference_pb2

SNAPSHOT = Path(__file__).with_name("fields.txt")
FILES: tuple[Any, ...] = (admin_pb2, cache_pb2, inference_pb2)

_TYPES = descriptor_pb2.FieldDescriptorProto.Type


def lines() -> set[str]:
    """The contracts of today."""
    found: set[str] = set()
    for file in FILES:
        for message in file.DESCRIPTOR.message_types_by_name.values():
            found.update(_message(message))
        for enum in file.DESCRIPTOR.enum_types_by_name.values():
            found.update(_enum(enum))
        for service in file.DESCRIPTOR.services_by_name.values():
            found.update(_service(service))
    return found


def retired() -> set[tuple[str, int]]:
    """Fields that were taken out as they should be: the message, and a number that nothing gets again."""
    numbers: set[tuple[str, int]] = set()
    for file in FILES:
        for message in file.DESCRIPTOR.message_types_by_name.values():
            declared = descriptor_pb2.DescriptorProto()
            message.CopyToProto(declared)
            for reserved in declared.reserved_range:
                numbers.update((message.full_name, number) for number in range(reserved.start, reserved.end))
    return numbers


def _message(message: Any) -> Iterator[str]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        type_name = kind.full_name if kind is not None else _TYPES.Name(field.type).removeprefix("TYPE_").lower()
        label = (
            "repeated "
            if field.is_repeated
            else "optional "
            if field.has_presence and field.message_type is None
            else ""
        )
        yield f"field {message.full_name} {field.number} {field.name}: {label}{type_name}"
    for nested in message.nested_types:
        yield from _message(nested)
    for enum in message.enum_types:
        yield from _enum(enum)


def _enum(enum: Any) -> Iterator[str]:
    for value in enum.values:
        yield f"value {enum.full_name} {value.number} {value.name}"


def _service(service: Any) -> Iterator[str]:
    for method in service.methods:
        asked, told = (
            f"{'stream ' if streams else ''}{kind.full_name}"
            for streams, kind in (
                (method.client_streaming, method.input_type),
                (method.server_streaming, method.output_type),
            )
        )
        yield f"call {method.full_name}({asked}): {told}"


if __name__ == "__main__":
    there = set(SNAPSHOT.read_text().splitlines()) if SNAPSHOT.exists() else set()
    SNAPSHOT.write_text("".join(f"{line}\n" for line in sorted(there | lines())))
