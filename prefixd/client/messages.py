"""Makes messages and token ids of the contract from a caller's values; an error names the value that does not fit."""

from __future__ import annotations

import operator
import reprlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from prefixd.client.errors import InvalidArgumentError

M = TypeVar("M", bound=Message)
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[Any]
_LIMIT = 1 << 32
_ARRAY_IS_WIRE_FORMAT = sys.byteorder == "little" and array("I").itemsize == 4

# Raised by protobuf for a value that a field cannot hold; UnicodeError is a ValueError.
_REFUSALS = (TypeError, ValueError, OverflowError)
_INTEGER = "an integer from {} to {}"
_POSSIBLE = {
    FieldDescriptor.TYPE_INT32: _INTEGER.format(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: _INTEGER.format(0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: _INTEGER.format(0, (1 << 64) - 1),
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "a string that UTF-8 can encode",
    FieldDescriptor.TYPE_BYTES: "bytes",
}


def message(kind: type[M], **fields: object) -> M:
    """Returns a message of this kind with these fields; None leaves a field unset.

    Raises:
        InvalidArgumentError: a field cannot hold its value; it names the field, the value and the possible values.
    """
    try:
        return kind(**fields)
    except _REFUSALS as error:
        for name, value in fields.items():
            if not _fits(kind, name, value):
                raise InvalidArgumentError(_refusal(kind, name, value)) from error
        raise


def as_count(name: str, value: object) -> int:
    """Returns a number of blocks, of any integer type. Raises InvalidArgumentError."""
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if not 0 <= count < _LIMIT:
        raise InvalidArgumentError(
            f"{name} is {reprlib.repr(value)}; it must be {_POSSIBLE[FieldDescriptor.TYPE_UINT32]}"
        )
    return count


def _fits(kind: type[Message], name: str, value: object) -> bool:
    try:
        kind(**{name: value})
    except _REFUSALS:
        return False
    return True


def _refusal(kind: type[Message], name: str, value: object) -> str:
    field = kind.DESCRIPTOR.fields_by_name[name]
    possible = _POSSIBLE.get(field.type, f"a {field.message_type.name}" if field.message_type else "another value")
    if field.default_value == []:  # a repeated field
        if not isinstance(value, Iterable):
            return f"{name} is {reprlib.repr(value)}; it must be a sequence, each element {possible}"
        wrong = next((element for element in value if not _fits(kind, name, [element])), value)
        return f"{name} has {reprlib.repr(wrong)}; each element must be {possible}"
    if field.type == FieldDescriptor.TYPE_BYTES:  # a salt is a secret
        return f"{name} is of type {type(value).__name__}; it must be bytes"
    return f"{name} is {reprlib.repr(value)}; it must be {possible}"


def token_bytes(tokens: TokenIds) -> bytes:
    """Returns token ids as little-endian uint32, 4 bytes each.

    Raises `InvalidArgumentError` for anything but a flat sequence of integers in [0, 2**32).
    """
    if _ARRAY_IS_WIRE_FORMAT and isinstance(tokens, list | tuple):
        try:
            # Twice as fast as numpy for a list of Python integers.
            return array("I", tokens).tobytes()
        except (TypeError, OverflowError) as error:
            raise InvalidArgumentError(f"token ids must be integers from 0 to {_LIMIT - 1}: {error}") from error
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"token ids must be a flat sequence of integers: {error}") from error
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"token ids must be a flat sequence of integers, not {ids.ndim} dimensions of {ids.dtype}"
        )
    if ids.dtype != np.uint32:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= _LIMIT:
            wrong = low if low < 0 else high
            raise InvalidArgumentError(f"token id {wrong} is outside 0 to {_LIMIT - 1}")
    return ids.astype("<u4", copy=False).tobytes()
