"""Wishes for how long the blocks of a prompt stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixd.client.errors import InvalidArgumentError
from prefixd.client.messages import message
from prefixd.v1 import cache_pb2


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish for the blocks of a range of a prompt's tokens: a full tier evicts those of lower priority first.

    Examples: `Retention(50, ttl_s=3600)` for all of a prompt, `Retention(50, 0, 1024)` for a system prompt of 1,024
    tokens, `Retention(-10, 1024)` for what follows it and will not be asked for again.

    Attributes:
        priority: from -100, first to go, to 100; blocks without a wish have 0. Those above 0 count against the tenant's
            quota (`retained_bytes`).
        start_token: the range's first token. A block belongs to the range in which its last token lies.
        end_token: the first token behind the range; None: the prompt's end.
        ttl_s: seconds until the priority is 0 again; None: it stays, until a restart of the daemon.
    """

    priority: int
    start_token: int = 0
    end_token: int | None = None
    ttl_s: float | None = None

    def to_proto(self) -> cache_pb2.Retention:
        """The contract's message. Raises `InvalidArgumentError` for a value that does not fit into it."""
        for name, value in (("end_token", self.end_token), ("ttl_s", self.ttl_s)):
            if value == 0:
                raise InvalidArgumentError(f"{name} is 0 in {self}; give more, or None for no end")
        return message(
            cache_pb2.Retention,
            start_token=self.start_token,
            end_token=self.end_token,
            priority=self.priority,
            ttl_s=self.ttl_s,
        )


def retention_to_proto(retention: Sequence[Retention]) -> list[cache_pb2.Retention]:
    """The contract's messages. Raises `InvalidArgumentError`."""
    for wish in retention:
        if not isinstance(wish, Retention):
            raise InvalidArgumentError(f"retention has {wish!r}; each must be a Retention, as Retention(50, ttl_s=60)")
    return [wish.to_proto() for wish in retention]
