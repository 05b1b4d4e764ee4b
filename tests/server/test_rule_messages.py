"""A part's rule between the contract and the cache: each kind there and back, and a kind of a newer client."""

from __future__ import annotations

import pytest

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache import (
    ChunkedWindowSpec,
    CrossAttentionSpec,
    RecurrentStateSpec,
    RuleSpec,
    SlidingWindowSpec,
    VisionEmbeddingSpec,
)
from prefixd.client import ChunkedWindow, CrossAttention, PartSpec, RecurrentState, Rule, SlidingWindow, VisionEmbedding
from prefixd.server.rule_messages import rule_message, rule_spec
from prefixd.v1 import cache_pb2 as pb


@pytest.mark.parametrize(
    ("rule", "spec"),
    [
        (None, None),
        (SlidingWindow(9), SlidingWindowSpec(9)),
        (ChunkedWindow(8), ChunkedWindowSpec(8)),
        (RecurrentState(), RecurrentStateSpec()),
        (RecurrentState(64), RecurrentStateSpec(64)),
        (CrossAttention(), CrossAttentionSpec(1)),
        (CrossAttention(2), CrossAttentionSpec(2)),
        (VisionEmbedding(), VisionEmbeddingSpec()),
    ],
    ids=str,
)
def test_every_rule_of_the_client_is_one_of_the_cache(rule: Rule | None, spec: RuleSpec | None) -> None:
    part = PartSpec("kv", 0, 64, rule).to_proto()
    sent = pb.Part.FromString(part.SerializeToString())
    assert rule_spec(sent) == spec
    again = pb.Part(group="kv", rank=0, nbytes=64, rule=rule_message(spec))
    assert again == part


def test_every_kind_of_the_contract_is_known() -> None:
    for kind in pb.Rule.DESCRIPTOR.oneofs_by_name["kind"].fields:
        part = pb.Part(rule=pb.Rule(**{kind.name: {}}))
        assert (rule_spec(part) is None) == (kind.name == "full_attention")


def test_a_kind_of_a_newer_client_is_refused() -> None:
    """It arrives as a field that is not known here; taken as full attention, prefixes would never match."""
    newer = pb.Rule.FromString(b"\x7a\x02\x08\x05")  # field 15, a message
    assert newer.WhichOneof("kind") is None
    with pytest.raises(InvalidArgumentError, match="part 'kv'/3 has a rule of a kind that this daemon does not know"):
        rule_spec(pb.Part(group="kv", rank=3, nbytes=64, rule=newer))


def test_a_rule_without_a_kind_is_full_attention() -> None:
    assert rule_spec(pb.Part(rule=pb.Rule())) is None
    assert rule_spec(pb.Part(rule=pb.Rule(full_attention=pb.FullAttention()))) is None
