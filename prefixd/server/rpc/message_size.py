"""Messages of very many fields, or with a very long one, are refused before they are parsed."""

from __future__ import annotations

from contextlib import suppress

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from prefixd.base.errors import InvalidArgumentError

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
DATA_BYTES = 1 << 20
"""Of a piece of a stream."""
UNKNOWN_BYTES = 1 << 16
"""Of all fields that this version does not know."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SKIPPED = {_FIXED64: 8, _FIXED32: 4}

_Shape = dict[int, Descriptor | int]
"""By number, the fields that are messages (their kinds); the most bytes of each of the others."""


def check_fields(raw: bytes, kind: Descriptor) -> None:
    """Raises InvalidArgumentError for a message of this kind that has too many fields, or too much in one of them.

    15 MiB of empty fields take half a second to parse, on the event loop, and some hundred MiB of memory; 15 MiB of
    text or bytes 30 milliseconds. What is long in an honest message is bytes, and of these together only images are
    very long.

    Several fields of one kind and number count together, at all depths: what is parsed at last is one list of them.
    One that is torn or malformed is left to the parser.
    """
    if len(raw) > LARGE_BYTES:
        with suppress(IndexError):  # it is torn
            _Count(len(raw)).count(raw, 0, len(raw), kind)


class _Count:
    """What has been found of one message of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._left = FIELDS
        self._unknown = 0
        self._bytes: dict[tuple[str, int], int] = {}

    def count(self, raw: bytes, at: int, end: int, kind: Descriptor) -> None:
        """Counts the fields of a message of this kind. Raises IndexError where it is torn or malformed."""
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
    """The number at a place, and the place behind it. Raises IndexError for one that is too long to be any."""
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
    """What to look at in a message of this kind."""
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
