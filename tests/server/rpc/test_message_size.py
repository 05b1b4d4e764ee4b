"""Messages that are long to parse are refused before they are parsed."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from prefixd.base.errors import InvalidArgumentError
from prefixd.server.rpc.message_size import (
    BYTES,
    DATA_BYTES,
    FIELDS,
    LARGE_BYTES,
    PACKED_BYTES,
    TEXT_BYTES,
    check_fields,
)
from prefixd.v1 import cache_pb2 as pb
from prefixd.v1 import inference_pb2 as inference


def check(kind: Any, raw: bytes) -> None:
    check_fields(raw, kind.DESCRIPTOR)


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, or a message."""
    length, size = b"", len(content)
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


HONEST: list[Message] = [
    pb.MatchRequest(session_id="s", token_ids=bytes(8 << 20)),
    pb.AcquireRequest(token_ids=bytes(1 << 20), parts=range(1024)),
    pb.PutRequest(data=bytes(1 << 20)),
    pb.RenewRequest(lease_ids=[f"{number}-0123456789abcdef" for number in range(4096)]),
    pb.RegisterNamespaceRequest(
        namespace=pb.Namespace(
            name="n" * 1000,
            parts=[
                pb.Part(
                    group=f"{number}" * 50,
                    rank=number,
                    nbytes=1 << 40,
                    rule=pb.Rule(sliding_window=pb.SlidingWindow(tokens=1 << 20)),
                )
                for number in range(1024)
            ],
        )
    ),
    inference.GenerateRequest(text="\u00e9" * (2 << 20), images=[bytes(6 << 20)] * 2),
]


def test_fields_that_are_not_known_are_few_bytes() -> None:
    half = field(15, bytes(40_000))
    check(pb.PutRequest, half + field(1, bytes(100)))
    with pytest.raises(InvalidArgumentError, match=r"PutRequest of 80\d+ bytes has more than 65536 in fields"):
        check(pb.PutRequest, half + half)
    with pytest.raises(InvalidArgumentError, match="MatchRequest of"):
        check(pb.MatchRequest, field(15, bytes(15 << 20)))


@pytest.mark.parametrize("message", HONEST, ids=lambda message: type(message).__name__)
def test_what_is_long_for_bytes_or_text_is_taken(message: Message) -> None:
    raw = message.SerializeToString()
    assert len(raw) > LARGE_BYTES
    check(type(message), raw)


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (pb.RetainRequest, field(4, b"") * 40_000),
        (pb.RenewRequest, field(2, b"") * 40_000),
        (pb.RegisterNamespaceRequest, field(1, field(6, b"") * 40_000)),
        (pb.PutRequest, field(1, field(7, b"") * 40_000)),
        (inference.GenerateRequest, field(2, field(12, b"x") * 40_000) + field(3, field(12, b"x") * 40_000)),
        (pb.MatchRequest, b"\xf8\x07\x00" * 40_000),  # fields that nobody knows
        (pb.MatchRequest, b"\x09" + bytes(8) + b"\x0d" + bytes(4) + b"\xf8\x07\x80\x00" * 40_000),
    ],
)
def test_very_many_fields_are_not(kind: Any, raw: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{len(raw)} bytes has more than {FIELDS} fields"):
        check(kind, raw)


def test_numbers_of_a_fixed_size_are_passed_over() -> None:
    for number in (b"\x09" + bytes(8), b"\x0d" + bytes(4)):
        check(pb.MatchRequest, field(2, bytes(1 << 17)) + number * (FIELDS // 2))


def test_so_many_fields_are_taken_and_one_more_is_not() -> None:
    ids = field(2, bytes(3))
    check(pb.RenewRequest, ids * FIELDS)
    with pytest.raises(InvalidArgumentError):
        check(pb.RenewRequest, ids * (FIELDS + 1))


def test_a_long_list_of_numbers_is_not_taken() -> None:
    check(pb.AcquireRequest, field(3, bytes(1 << 20)) + field(7, bytes(PACKED_BYTES)))
    wrong = rf"AcquireRequest\.parts has {PACKED_BYTES + 1} bytes; send at most {PACKED_BYTES}"
    with pytest.raises(InvalidArgumentError, match=wrong):
        check(pb.AcquireRequest, field(7, bytes(PACKED_BYTES + 1)))
    with pytest.raises(InvalidArgumentError, match=r"PutHeader\.parts"):
        check(pb.PutRequest, field(1, field(5, bytes(PACKED_BYTES + 1))))


def test_a_very_long_text_is_not_taken() -> None:
    check(inference.GenerateRequest, field(2, bytes(TEXT_BYTES)))
    wrong = rf"GenerateRequest\.text has {TEXT_BYTES + 1} bytes; send at most {TEXT_BYTES}"
    with pytest.raises(InvalidArgumentError, match=wrong):
        check(inference.GenerateRequest, field(2, bytes(TEXT_BYTES + 1)))


def test_what_is_told_in_parts_counts_together() -> None:
    part = field(7, bytes(PACKED_BYTES // 2))
    check(pb.AcquireRequest, part * 2)
    with pytest.raises(InvalidArgumentError, match=rf"AcquireRequest\.parts has {PACKED_BYTES // 2 * 3} bytes"):
        check(pb.AcquireRequest, part * 3)
    with pytest.raises(InvalidArgumentError, match=r"RenewRequest\.lease_ids has"):
        check(pb.RenewRequest, field(2, bytes(TEXT_BYTES // 2)) * 3)
    check(inference.GenerateRequest, field(10, bytes(BYTES // 2)) * 3)  # images are files, each for itself


def test_a_number_that_does_not_end_is_not_looked_at_for_long() -> None:
    check(pb.MatchRequest, b"\x08" + b"\x80" * (16 << 20))


def test_a_piece_of_a_stream_is_small() -> None:
    check(pb.PutRequest, field(2, bytes(DATA_BYTES)))
    with pytest.raises(InvalidArgumentError, match=r"PutRequest\.data has 1048577 bytes; send at most 1048576"):
        check(pb.PutRequest, field(2, bytes(DATA_BYTES + 1)))


@pytest.mark.parametrize("kind", [pb.MatchRequest, pb.AcquireRequest, pb.ReserveRequest])
def test_very_long_bytes_are_not_taken(kind: Any) -> None:
    number = kind.DESCRIPTOR.fields_by_name["token_ids"].number
    check(kind, field(number, bytes(BYTES)))
    with pytest.raises(InvalidArgumentError, match=rf"token_ids has {BYTES + 1} bytes; send at most {BYTES}"):
        check(kind, field(number, bytes(BYTES + 1)))


@pytest.mark.parametrize("end", [b"\x12", b"\x12\xff", b"\x12\xff\xff\xff\xff\x7f", b"\x08\xff", b"\xff" * 40, b"\x0f"])
def test_what_is_torn_is_left_to_the_parser(end: bytes) -> None:
    check(pb.MatchRequest, field(2, bytes(1 << 17)) + end)
    check(pb.PutRequest, field(1, field(3, bytes(1 << 17)) + end))


def test_what_is_small_is_not_looked_at() -> None:
    check(pb.RenewRequest, field(2, b"") * (LARGE_BYTES // 2))
