"""Translates the rule of a part between the contract (proto) and the cache."""

from __future__ import annotations

from collections.abc import Sequence

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache import (
    ChunkedWindowSpec,
    CrossAttentionSpec,
    RecurrentStateSpec,
    RuleSpec,
    SlidingWindowSpec,
    VisionEmbeddingSpec,
)
from prefixd.cache.placement.retention import Retention, check_ranges, check_retention
from prefixd.v1 import cache_pb2 as pb


def rule_spec(part: pb.Part) -> RuleSpec | None:
    """Returns the rule that a part asks for; None for full attention.

    Raises:
        InvalidArgumentError: this version does not know the kind of rule.
    """
    rule = part.rule
    match rule.WhichOneof("kind"):
        case "sliding_window":
            return SlidingWindowSpec(rule.sliding_window.tokens)
        case "chunked_window":
            return ChunkedWindowSpec(rule.chunked_window.tokens)
        case "recurrent_state":
            return RecurrentStateSpec(rule.recurrent_state.checkpoint_tokens)
        case "cross_attention":
            return CrossAttentionSpec(rule.cross_attention.image_blocks or 1)
        case "vision_embedding":
            return VisionEmbeddingSpec()
        case _ if rule.ByteSize() and not rule.HasField("full_attention"):  # a field that this contract does not have
            raise InvalidArgumentError(
                f"part {part.group!r}/{part.rank} has a rule of a kind that this daemon does not know; update the "
                "daemon, or register the part without a rule: all its bytes are then kept and needed"
            )
        case _:
            return None


def rule_message(spec: RuleSpec | None) -> pb.Rule | None:
    """Returns the rule as a message of the contract; None for full attention."""
    match spec:
        case SlidingWindowSpec():
            return pb.Rule(sliding_window=pb.SlidingWindow(tokens=spec.tokens))
        case ChunkedWindowSpec():
            return pb.Rule(chunked_window=pb.ChunkedWindow(tokens=spec.tokens))
        case RecurrentStateSpec():
            return pb.Rule(recurrent_state=pb.RecurrentState(checkpoint_tokens=spec.checkpoint_tokens))
        case CrossAttentionSpec():
            return pb.Rule(cross_attention=pb.CrossAttention(image_blocks=spec.image_blocks))
        case VisionEmbeddingSpec():
            return pb.Rule(vision_embedding=pb.VisionEmbedding())
        case None:
            return None


def retention_requests(messages: Sequence[pb.Retention]) -> list[Retention]:
    """Returns the retention requests that a caller sends. Raises InvalidArgumentError if one is invalid."""
    check_ranges(len(messages))  # before any message is read
    requests = [Retention(each.start_token, each.end_token, each.priority, each.ttl_s) for each in messages]
    check_retention(requests)
    return requests
