"""Converts rules in tokens to the cache's rules in blocks."""

from __future__ import annotations

from prefixd.base.rules import rules
from prefixd.cache.rules.chunked_window import ChunkedWindow
from prefixd.cache.rules.cross_attention import CrossAttention
from prefixd.cache.rules.full_attention import FullAttention
from prefixd.cache.rules.recurrent_state import RecurrentState
from prefixd.cache.rules.rule import GroupRule
from prefixd.cache.rules.sliding_window import SlidingWindow
from prefixd.cache.rules.vision_embedding import VisionEmbedding


def in_blocks(rule: rules.Rule | None, block_tokens: int) -> GroupRule:
    """The rule in blocks of `block_tokens` tokens; None is full attention."""
    match rule:
        case None:
            return FullAttention()
        case rules.SlidingWindow():
            return SlidingWindow(rule.blocks(block_tokens))
        case rules.ChunkedWindow():
            return ChunkedWindow(rule.tokens, block_tokens)
        case rules.RecurrentState():
            return RecurrentState(rule.checkpoint_tokens // block_tokens)
        case rules.CrossAttention():
            return CrossAttention(rule.image_blocks)
        case rules.VisionEmbedding():
            return VisionEmbedding()
    raise TypeError(f"{rule!r} has no rule in blocks; add it here")
