"""Messages of very many fields, or with a very long one, are refused before they are parsed.

15 MiB of empty fields take half a second to parse, on the event loop, and some hundred MiB of memory; 15 MiB of text or
bytes 30 milliseconds. What is long in an honest message is bytes, and of these together only images are very long.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from prefixd.errors import InvalidArgumentError

LARGE_BYTES = 1 << 16
"""Messages up to here are not looked at: whatever is in them is parsed in a millisecond or two."""
FIELDS = 1 << 14
"""Fields, at all depths: some milliseconds to count. A namespace of 1,024 parts with rules has half of them."""
PACKED_BYTES = 1 << 16
"""Bytes of a list of numbers."""
TEXT_BYTES = 4 << 20
"""Bytes of a text: a prompt of a million tokens."""
BYTES = 8 << 20
"""Of a field of bytes: token ids of a prompt of two million tokens, an image."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SKIPPED = {_FIXED64: 8, _FIXED32: 4}

_Shape = dict[int, Descriptor | int]
"""By number, the fields that are messages (their kinds); the most bytes of each of the others."""


def check_fields(raw: bytes, kind: Descriptor) -> None:
    """Raises InvalidArgumentError for a message of this kind that has too many fields, or too long a one.

    One that is torn or malformed is left to the parser.
    """
    if len(raw) > LARGE_BYTES and _fields(raw, 0, len(raw), kind, FIELDS) < 0:
        raise InvalidArgumentError(
            f"the {kind.name} of {len(raw)} bytes has more than {FIELDS} fields; send fewer, in several calls"
        )


def _fields(raw: bytes, at: int, end: int, kind: Descriptor, left: int) -> int:
    """How many fields are left of `left` behind those from `at` to `end`; negative: not enough."""
    shape = _shape(kind)
    try:
        while at < end:
            left -= 1
            if left < 0:
                return left
            tag = raw[at]
            at += 1
            if tag > 127:
                tag, at = _varint(raw, at - 1)
            wire = tag & 7
            if wire == _VARINT:
                while raw[at] > 127:
                    at += 1
                at += 1
            elif wire == _BYTES:
                length = raw[at]
                at += 1
                if length > 127:
                    length, at = _varint(raw, at - 1)
                inner = shape.get(tag >> 3)
                if isinstance(inner, Descriptor):
                    left = _fields(raw, at, min(at + length, end), inner, left)
                elif inner is not None and inner < length <= end - at:
                    field = f"{kind.name}.{kind.fields_by_number[tag >> 3].name}"
                    raise InvalidArgumentError(f"{field} has {length} bytes; send at most {inner}")
                at += length
            else:
                at += _SKIPPED.get(wire, 0)
    except IndexError:  # it is torn
        pass
    return left


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it."""
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift > 63:
            return value, at


_shapes: dict[str, _Shape] = {}


def _shape(kind: Descriptor) -> _Shape:
    """What to look at in a message of this kind."""
    known = _shapes.get(kind.full_name)
    if known is None:
        known = _shapes[kind.full_name] = {}
        for field in kind.fields:
            if field.message_type is not None:
                known[field.number] = field.message_type
            elif field.type == FieldDescriptor.TYPE_STRING:
                known[field.number] = TEXT_BYTES
            else:
                known[field.number] = BYTES if field.type == FieldDescriptor.TYPE_BYTES else PACKED_BYTES
    return known
