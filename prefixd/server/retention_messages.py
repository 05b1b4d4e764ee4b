"""Reads a caller's retention requests from the contract's messages."""

from __future__ import annotations

from collections.abc import Sequence

from prefixd.cache.placement.retention import Retention, check_ranges, check_retention
from prefixd.v1 import cache_pb2 as pb


def retention_requests(messages: Sequence[pb.Retention]) -> list[Retention]:
    """Returns the retention requests that a caller sends. Raises InvalidArgumentError if one is invalid."""
    check_ranges(len(messages))  # before any message is read
    requests = [Retention(each.start_token, each.end_token, each.priority, each.ttl_s) for each in messages]
    check_retention(requests)
    return requests
