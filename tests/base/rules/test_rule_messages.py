"""A part's rule in the contract: each kind there and back, and a kind of a newer client."""

from __future__ import annotations

import pytest

from prefixd.base.errors import InvalidArgumentError
from prefixd.base.rules.rule_messages import from_message, to_message
from prefixd.base.rules.rules import ChunkedWindow, CrossAttention, RecurrentState, Rule, SlidingWindow, VisionEmbedding
from prefixd.client import PartSpec
from prefixd.v1 import cache_pb2 as pb


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (None, None),
        (SlidingWindow(9), pb.Rule(sliding_window=pb.SlidingWindow(tokens=9))),
        (ChunkedWindow(8), pb.Rule(chunked_window=pb.ChunkedWindow(tokens=8))),
        (RecurrentState(), pb.Rule(recurrent_state=pb.RecurrentState())),
        (RecurrentState(64), pb.Rule(recurrent_state=pb.RecurrentState(checkpoint_tokens=64))),
        (CrossAttention(), pb.Rule(cross_attention=pb.CrossAttention(image_blocks=1))),
        (CrossAttention(2), pb.Rule(cross_attention=pb.CrossAttention(image_blocks=2))),
        (VisionEmbedding(), pb.Rule(vision_embedding=pb.VisionEmbedding())),
    ],
    ids=str,
)
def test_every_rule_of_the_client_comes_back_from_the_contract(rule: Rule | None, message: pb.Rule | None) -> None:
    part = PartSpec("kv", 0, 64, rule).to_proto()
    assert part == pb.Part(group="kv", rank=0, nbytes=64, rule=message)
    assert from_message(pb.Part.FromString(part.SerializeToString())) == rule
    assert pb.Part(group="kv", rank=0, nbytes=64, rule=to_message(rule)) == part


def test_every_kind_of_the_contract_is_known() -> None:
    for kind in pb.Rule.DESCRIPTOR.oneofs_by_name["kind"].fields:
        part = pb.Part(rule=pb.Rule(**{kind.name: {}}))
        assert (from_message(part) is None) == (kind.name == "full_attention")


def test_images_are_in_one_block_if_a_client_does_not_say() -> None:
    assert from_message(pb.Part(rule=pb.Rule(cross_attention=pb.CrossAttention()))) == CrossAttention(1)


def test_a_kind_of_a_newer_client_is_refused() -> None:
    """It arrives as a field that is not known here; taken as full attention, prefixes would never match."""
    newer = pb.Rule.FromString(b"\x7a\x02\x08\x05")  # field 15, a message
    assert newer.WhichOneof("kind") is None
    with pytest.raises(InvalidArgumentError, match="part 'kv'/3 has a rule of a kind that this daemon does not know"):
        from_message(pb.Part(group="kv", rank=3, nbytes=64, rule=newer))


def test_a_rule_without_a_kind_is_full_attention() -> None:
    assert from_message(pb.Part(rule=pb.Rule())) is None
    assert from_message(pb.Part(rule=pb.Rule(full_attention=pb.FullAttention()))) is None
