"""What a client says about its model, and what the daemon says about a prefix."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from prefixd.client.errors import InvalidArgumentError, ServerError
from prefixd.client.estimates import LoadEstimate
from prefixd.client.rules import Rule
from prefixd.v1 import cache_pb2


def check_salt(salt: object) -> None:
    """Raises `InvalidArgumentError` for a salt that is no bytes: encoded in two ways, a text would be two salts."""
    if not isinstance(salt, bytes):
        raise InvalidArgumentError(
            f"salt is of type {type(salt).__name__}; it must be bytes, of a text `text.encode()`"
        )


class Tier(IntEnum):
    """Where bytes are; the value is the distance."""

    GPU = 0
    CPU = 1
    DISK = 2
    REMOTE = 3


_WIRE_TIERS = {
    Tier.GPU: cache_pb2.TIER_GPU,
    Tier.CPU: cache_pb2.TIER_CPU,
    Tier.DISK: cache_pb2.TIER_DISK,
    Tier.REMOTE: cache_pb2.TIER_REMOTE,
}
_MOST_RUNS = 4096


@dataclass(frozen=True, slots=True)
class PartSpec:
    """The bytes of one block that belong to one (KV group, tensor-parallel rank): `nbytes` of them.

    `rule`: which part of a prefix the group's layers need; None for full attention, which needs all of it.
    """

    group: str
    rank: int
    nbytes: int
    rule: Rule | None = None

    def to_proto(self) -> cache_pb2.Part:
        """The part as the contract has it."""
        rule = None if self.rule is None else self.rule.to_proto()
        return cache_pb2.Part(group=self.group, rank=self.rank, nbytes=self.nbytes, rule=rule)


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """What must be equal for KV to be reusable.

    `name` is the engine's fingerprint of the model: it changes with weights, dtype, quantization and packing.
    Prompts of different `salt` never share a block. `parts` is the order in which a block's bytes are given.

    Raises:
        InvalidArgumentError: the salt is no bytes, but text.
    """

    name: str
    block_tokens: int
    parts: tuple[PartSpec, ...]
    salt: bytes = field(default=b"", repr=False)
    dtype: str = ""
    layout: str = ""

    def __post_init__(self) -> None:
        check_salt(self.salt)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all parts together."""
        return sum(part.nbytes for part in self.parts)

    def to_proto(self) -> cache_pb2.Namespace:
        """The message that RegisterNamespace takes.

        Raises:
            InvalidArgumentError: a number does not fit into it.
        """
        try:
            return cache_pb2.Namespace(
                name=self.name,
                salt=self.salt,
                dtype=self.dtype,
                layout=self.layout,
                block_tokens=self.block_tokens,
                parts=[part.to_proto() for part in self.parts],
            )
        except ValueError as error:
            raise InvalidArgumentError(
                f"namespace {self.name!r}: {error}; tokens, ranks and windows are numbers of 32 bits, bytes of 64"
            ) from error


@dataclass(frozen=True, slots=True)
class TierRun:
    """`blocks` consecutive blocks whose nearest copy is in `tier`."""

    tier: Tier
    blocks: int


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest cached prefix: its length in blocks, where it is, from the start of the prompt, and what loading
    takes."""

    blocks: int
    runs: tuple[TierRun, ...]
    estimate: LoadEstimate = field(default_factory=LoadEstimate)

    def to_found(self) -> list[cache_pb2.TierRun]:
        """The runs as Acquire and Get take them: where the prompt's blocks were when it was asked about."""
        return [cache_pb2.TierRun(tier=_WIRE_TIERS[run.tier], blocks=run.blocks) for run in self.runs[:_MOST_RUNS]]

    def blocks_in(self, tier: Tier) -> int:
        """Blocks of the prefix whose nearest copy is in `tier`."""
        return sum(run.blocks for run in self.runs if run.tier == tier)

    @classmethod
    def from_proto(cls, response: cache_pb2.MatchResponse) -> MatchResult:
        """The result in the client's words. Raises `ServerError` for a tier that this version does not know."""
        try:
            # The contract's tiers count from 1.
            runs = tuple(TierRun(Tier(run.tier - 1), run.blocks) for run in response.runs)
            return cls(response.blocks, runs, LoadEstimate.from_proto(response.estimate))
        except ValueError as error:
            raise ServerError(f"the daemon has blocks in a tier that this client does not know: {error}") from error


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of the blocks given to `store`: the three numbers add up to the blocks offered."""

    committed: int
    duplicates: int
    """Cached already, or committed by another client meanwhile."""
    dropped: int = 0
    """Not kept because the daemon had no room for them."""
    retention_refused: str = ""
    """Why they were stored without the priorities that were wished for; empty if they have them."""
