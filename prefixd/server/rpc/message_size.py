"""Refuses messages with very many fields, or with a very long field, before they are parsed."""

from __future__ import annotations

from contextlib import suppress

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from prefixd.base.errors import InvalidArgumentError

LARGE_BYTES = 1 << 16
"""Messages of up to this size are not checked: any of them is parsed within two milliseconds."""
FIELDS = 1 << 14
"""Most fields of a message, at all depths. Counting them takes some milliseconds. The largest honest message, a
namespace of 1,024 parts with rules, has half as many."""
PACKED_BYTES = 1 << 16
"""Most bytes of a list of numbers."""
TEXT_BYTES = 4 << 20
"""Most bytes of a text: enough for a prompt of a million tokens."""
BYTES = 8 << 20
"""Most bytes of a bytes field: enough for the token ids of two million tokens, or for an image."""
DATA_BYTES = 1 << 20
"""Most bytes of a piece of a stream (fields named `data`)."""
UNKNOWN_BYTES = 1 << 16
"""Most bytes of all fields that this version does not know."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SKIPPED = {_FIXED64: 8, _FIXED32: 4}

_Shape = dict[int, Descriptor | int]
"""By field number: the descriptor of a message field, or the most bytes of any other field."""


def check_fields(raw: bytes, kind: Descriptor) -> None:
    """Raises InvalidArgumentError if a message has too many fields or a field that is too long.

    Parsing 15 MiB of empty fields takes half a second on the event loop and some hundred MiB of memory; parsing 15 MiB
    of text or bytes takes 30 milliseconds. In an honest message only bytes fields are long, and only the
    images are long in sum.

    Fields of one message type and number count together, at all depths, because the parser makes one list of them. A
    truncated or malformed message is left to the parser.
    """
    if len(raw) > LARGE_BYTES:
        with suppress(IndexError):  # it is truncated
            _Count(len(raw)).count(raw, 0, len(raw), kind)


class _Count:
    """Counts the fields of one message.

    Args:
        nbytes: size of the message.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._left = FIELDS
        self._unknown = 0
        self._bytes: dict[tuple[str, int], int] = {}

    def count(self, raw: bytes, at: int, end: int, kind: Descriptor) -> None:
        """Counts the fields in `raw[at:end]`, a message of this kind. Raises IndexError if it is truncated or
        malformed."""
        shape = _shape(kind)
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise InvalidArgumentError(
                    f"the {kind.name} of {self._nbytes} bytes has more than {FIELDS} fields; send fewer, in several "
                    "calls"
                )
            tag = raw[at]
            at += 1
            if tag > 127:
                tag, at = _varint(raw, at - 1)
            wire = tag & 7
            if wire == _VARINT:
                if raw[at] > 127:
                    _, at = _varint(raw, at)
                else:
                    at += 1
            elif wire == _BYTES:
                length = raw[at]
                at += 1
                if length > 127:
                    length, at = _varint(raw, at - 1)
                inner = shape.get(tag >> 3)
                if isinstance(inner, Descriptor):
                    self.count(raw, at, min(at + length, end), inner)
                elif inner is None:
                    self._add_unknown(kind, length)
                elif length <= end - at:
                    self._add(kind, tag >> 3, length, inner)
                at += length
            else:
                at += _SKIPPED.get(wire, 0)

    def _add_unknown(self, kind: Descriptor, nbytes: int) -> None:
        self._unknown += nbytes
        if self._unknown > UNKNOWN_BYTES:
            raise InvalidArgumentError(
                f"the {kind.name} of {self._nbytes} bytes has more than {UNKNOWN_BYTES} in fields that this version "
                "does not know; leave them out"
            )

    def _add(self, kind: Descriptor, number: int, nbytes: int, most: int) -> None:
        total = self._bytes[kind.full_name, number] = self._bytes.get((kind.full_name, number), 0) + nbytes
        field = kind.fields_by_number[number]
        if total > most and not (field.type == FieldDescriptor.TYPE_BYTES and field.is_repeated and nbytes <= most):
            raise InvalidArgumentError(f"{kind.name}.{field.name} has {total} bytes; send at most {most}")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Returns the varint at an offset, and the offset after it. Raises IndexError if it has more than ten bytes."""
    value = shift = 0
    while shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
    raise IndexError


_shapes: dict[str, _Shape] = {}


def _shape(kind: Descriptor) -> _Shape:
    """Returns the shape of a message of this kind, from a cache."""
    known = _shapes.get(kind.full_name)
    if known is None:
        known = _shapes[kind.full_name] = {}
        for field in kind.fields:
            if field.message_type is not None:
                known[field.number] = field.message_type
            elif field.type == FieldDescriptor.TYPE_STRING:
                known[field.number] = TEXT_BYTES
            elif field.type == FieldDescriptor.TYPE_BYTES:
                known[field.number] = DATA_BYTES if field.name == "data" else BYTES
            else:
                known[field.number] = PACKED_BYTES
    return known
