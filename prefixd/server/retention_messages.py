"""Wishes for the blocks of a prompt, between the contract and the cache."""

from __future__ import annotations

from collections.abc import Sequence

from prefixd.cache.retention import Retention, check_ranges, check_retention
from prefixd.v1 import cache_pb2 as pb


def retention_wishes(messages: Sequence[pb.Retention]) -> list[Retention]:
    """The wishes that a caller sends. Raises InvalidArgumentError where one cannot be."""
    check_ranges(len(messages))  # before any is read
    wishes = [Retention(each.start_token, each.end_token, each.priority, each.ttl_s) for each in messages]
    check_retention(wishes)
    return wishes
