"""Rules are values, and msgpack has them as earlier versions wrote them."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from prefixd.base.rules.rules import (
    ChunkedWindow,
    CrossAttention,
    RecurrentState,
    Rule,
    SlidingWindow,
    VisionEmbedding,
    from_fields,
    to_fields,
)

WRITTEN = [
    (SlidingWindow(9), {"type": "sliding_window", "tokens": 9}),
    (ChunkedWindow(8), {"type": "chunked_window", "tokens": 8}),
    (RecurrentState(), {"type": "recurrent_state"}),
    (RecurrentState(64), {"type": "recurrent_state", "checkpoint_tokens": 64}),
    (CrossAttention(), {"type": "cross_attention"}),
    (CrossAttention(2), {"type": "cross_attention", "image_blocks": 2}),
    (VisionEmbedding(), {"type": "vision_embedding"}),
]


@pytest.mark.parametrize(("rule", "fields"), WRITTEN, ids=str)
def test_a_rule_in_msgpack(rule: Rule, fields: dict[str, object]) -> None:
    """The order counts, too: ids of namespaces are digests of it."""
    packed = msgspec.msgpack.encode(rule, enc_hook=to_fields)
    assert packed == msgspec.msgpack.encode(fields)
    assert msgspec.msgpack.decode(packed, type=Rule, dec_hook=from_fields) == rule


def test_a_number_of_a_newer_version_is_passed_over() -> None:
    assert from_fields(Rule, {"type": "sliding_window", "tokens": 9, "newer": 1}) == SlidingWindow(9)


@pytest.mark.parametrize(
    "fields",
    [{"type": "newer"}, {"tokens": 9}, {"type": "sliding_window"}, {"type": "sliding_window", "tokens": "9"}, [9], 9],
    ids=str,
)
def test_what_is_no_rule_cannot_be_decoded(fields: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Rule, dec_hook=from_fields)


def test_rules_are_values() -> None:
    rules = [rule for rule, _ in WRITTEN]
    assert len(set(rules)) == len(rules) and SlidingWindow(8) != ChunkedWindow(8)
    assert SlidingWindow(tokens=9) == SlidingWindow(9) == pickle.loads(pickle.dumps(SlidingWindow(9)))
    assert repr(SlidingWindow(9)) == "SlidingWindow(tokens=9)"
    with pytest.raises(AttributeError, match="cannot be changed"):
        SlidingWindow(9).tokens = 8
