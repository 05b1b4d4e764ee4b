"""KV groups and their rules: which part of a prefix the layers of a group need (Jenga, section 5).

A model's layers form groups that share one shape and one rule. `rule.py` has the questions that a rule answers, each
rule has a file of its own, and `group.py` combines the answers of all groups. A prefix of `n` blocks can be used when
every group allows the length `n`. Example, `x` where the bytes are there:

    block                      0 1 2 3 4 5
    full attention             x x x x x .     allows 0..5
    window of 2 blocks         . . x x . x     allows 0, 4
    state                      . x . x . .     allows 0, 2, 4
    longest prefix for all     4
"""

from prefixd.cache.rules.chunked_window import ChunkedWindow
from prefixd.cache.rules.cross_attention import CrossAttention
from prefixd.cache.rules.full_attention import FullAttention
from prefixd.cache.rules.group import (
    MAX_GROUPS,
    GroupMask,
    KvGroup,
    expired_groups,
    kv_groups,
    longest_prefix,
    longest_stored,
    needed_bytes,
    needed_groups,
    possible_lengths,
)
from prefixd.cache.rules.recurrent_state import RecurrentState
from prefixd.cache.rules.rule import Bools, GroupRule, Int64s
from prefixd.cache.rules.sliding_window import SlidingWindow
from prefixd.cache.rules.vision_embedding import VisionEmbedding

__all__ = [
    "MAX_GROUPS",
    "Bools",
    "ChunkedWindow",
    "CrossAttention",
    "FullAttention",
    "GroupMask",
    "GroupRule",
    "Int64s",
    "KvGroup",
    "RecurrentState",
    "SlidingWindow",
    "VisionEmbedding",
    "expired_groups",
    "kv_groups",
    "longest_prefix",
    "longest_stored",
    "needed_bytes",
    "needed_groups",
    "possible_lengths",
]
