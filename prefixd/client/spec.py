"""Values of the client's calls: the namespace of a model, matches and estimates, priorities, results of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixd.base.rules.rule_messages import to_message
from prefixd.base.rules.rules import Rule
from prefixd.base.tiers import Tier
from prefixd.client.errors import InvalidArgumentError, ServerError
from prefixd.client.kv_axes import PartShape
from prefixd.client.messages import message
from prefixd.v1 import cache_pb2


def check_salt(salt: object) -> None:
    """Raises `InvalidArgumentError` unless the salt is bytes: a text encoded in two ways would be two salts."""
    if not isinstance(salt, bytes):
        raise InvalidArgumentError(
            f"salt is of type {type(salt).__name__}; it must be bytes, of a text `text.encode()`"
        )


_MOST_RUNS = 4096


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part of each block: the `nbytes` bytes of one KV group on one tensor-parallel rank.

    `rule`: which part of a prefix the group's layers need; None for full attention, which needs all of it.
    `shape`: how keys and values lie in the bytes; None: the daemon keeps every bit of the part.
    """

    group: str
    rank: int
    nbytes: int
    rule: Rule | None = None
    shape: PartShape | None = None

    def to_proto(self) -> cache_pb2.Part:
        """Returns the contract's message."""
        shape = None if self.shape is None else self.shape.to_proto()
        return cache_pb2.Part(
            group=self.group, rank=self.rank, nbytes=self.nbytes, rule=to_message(self.rule), shape=shape
        )


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """Everything that must be equal for KV to be reusable.

    `name` is the engine's fingerprint of the model: it changes with weights, dtype, quantization and packing. Prompts
    of different `salt` never share a block. The bytes of a block are in the order of `parts`.

    `codec`: how the daemon's disk and a shared store keep the blocks; "": as its operator has set it. "exact": every
    byte as it is. "lossless": fewer bytes that become the same bytes again. "int8" (8 bits for each number), "k8v4" (8
    for keys, 4 for values): fewer bytes that lose precision, for parts with a `shape`; other parts as with "lossless".

    Raises:
        InvalidArgumentError: the salt is not bytes.
    """

    name: str
    block_tokens: int
    parts: tuple[PartSpec, ...]
    salt: bytes = field(default=b"", repr=False)
    dtype: str = ""
    layout: str = ""
    codec: str = ""

    def __post_init__(self) -> None:
        check_salt(self.salt)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all parts together."""
        return sum(part.nbytes for part in self.parts)

    def to_proto(self) -> cache_pb2.Namespace:
        """Returns the contract's message.

        Raises:
            InvalidArgumentError: a field cannot hold its number.
        """
        try:
            return cache_pb2.Namespace(
                name=self.name,
                salt=self.salt,
                dtype=self.dtype,
                layout=self.layout,
                block_tokens=self.block_tokens,
                parts=[part.to_proto() for part in self.parts],
                codec=self.codec,
            )
        except ValueError as error:
            raise InvalidArgumentError(
                f"namespace {self.name!r}: {error}; tokens, ranks and windows are numbers of 32 bits, bytes of 64"
            ) from error


@dataclass(frozen=True, slots=True)
class TierRun:
    """`blocks` consecutive blocks with their nearest copy in `tier`."""

    tier: Tier
    blocks: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """The time that an engine takes to compute prompt tokens, for the daemon's estimates; 0: not known.

    Attributes:
        token_s: seconds for each token.
        pass_s: seconds for each pass of the model.
        pair_s: seconds for each pair of a token and a token that it attends to.
    """

    token_s: float
    pass_s: float = 0.0
    pair_s: float = 0.0

    def to_proto(self) -> cache_pb2.Prefill:
        """Returns the contract's message."""
        return cache_pb2.Prefill(token_s=self.token_s, pass_s=self.pass_s, pair_s=self.pair_s)


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """The daemon's estimate at the time of the call, by the times of recent loads; `acquire` makes it before it loads.

    Attributes:
        load_s: seconds until all blocks of the answer can be read; None before the first load of that kind.
        compute_s: seconds to compute the prompt instead, behind the caller's own blocks. None without a `Prefill`.
        best_blocks: number of cached blocks, from the prompt's start, with which the first token comes soonest if the
            rest is computed. None without a `Prefill`.
        best_s: seconds to the first token with `best_blocks`.
    """

    load_s: float | None = None
    compute_s: float | None = None
    best_blocks: int | None = None
    best_s: float | None = None

    @classmethod
    def from_proto(cls, message: cache_pb2.LoadEstimate) -> LoadEstimate:
        """Returns the estimate of a message."""
        return cls(**{field.name: value for field, value in message.ListFields()})


@dataclass(frozen=True, slots=True)
class ClaimedByOther:
    """Another session of the tenant computes blocks of the prompt (`AsyncCache.claim`).

    Attributes:
        first_block: the first claimed block, which is the first one that is not cached.
        end_block: the claimed blocks before this one are the same in both prompts.
        prompt_blocks: the length of the other prompt.
        age_s: how long ago the claim was granted.
        left_s: until it expires.
    """

    first_block: int
    end_block: int
    prompt_blocks: int
    age_s: float
    left_s: float

    @classmethod
    def from_proto(cls, response: Any, name: str) -> ClaimedByOther | None:
        """Returns the claim in the field `name` of a response, if there is one."""
        if not response.HasField(name):
            return None
        claim = getattr(response, name)
        return cls(claim.first_block, claim.end_block, claim.prompt_blocks, claim.age_s, claim.left_s)


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """The answer to `claim`.

    Attributes:
        cached_blocks: blocks of the prompt that are cached.
        claim_id: of the claim on all other blocks; empty if there is none: all blocks are cached, another session has
            claimed them (`other`), or this session has, for another request.
        ttl_s: the lifetime of the claim.
        other: the claim of another session.
    """

    cached_blocks: int
    claim_id: str = ""
    ttl_s: float = 0.0
    other: ClaimedByOther | None = None

    @classmethod
    def from_proto(cls, response: cache_pb2.ClaimResponse) -> ClaimResult:
        """Returns the result of a message."""
        other = ClaimedByOther.from_proto(response, "other")
        return cls(response.cached_blocks, response.claim_id, response.ttl_s, other)


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest cached prefix: its length in blocks, the tiers of its blocks from the prompt's start, an estimate
    of loading it, and who computes the block behind it, if another session does."""

    blocks: int
    runs: tuple[TierRun, ...]
    estimate: LoadEstimate = field(default_factory=LoadEstimate)
    claimed: ClaimedByOther | None = None

    def to_found(self) -> list[cache_pb2.TierRun]:
        """Returns the runs as Acquire and Get take them: the tiers of the blocks at the time of the match."""
        return [cache_pb2.TierRun(tier=run.tier.wire, blocks=run.blocks) for run in self.runs[:_MOST_RUNS]]

    def blocks_in(self, tier: Tier) -> int:
        """Number of blocks of the prefix with their nearest copy in `tier`."""
        return sum(run.blocks for run in self.runs if run.tier == tier)

    @classmethod
    def from_proto(cls, response: cache_pb2.MatchResponse) -> MatchResult:
        """Returns the result of a message. Raises `ServerError` for a tier that this version does not know."""
        try:
            runs = tuple(TierRun(Tier.from_wire(run.tier), run.blocks) for run in response.runs)
            claimed = ClaimedByOther.from_proto(response, "claimed")
            return cls(response.blocks, runs, LoadEstimate.from_proto(response.estimate), claimed)
        except ValueError as error:
            raise ServerError(f"the daemon has blocks in a tier that this client does not know: {error}") from error


@dataclass(frozen=True, slots=True)
class StoreResult:
    """The result of `store`, in blocks: the three numbers add up to the blocks that were given."""

    committed: int
    duplicates: int
    """Cached already, or committed by another client meanwhile."""
    dropped: int = 0
    """Not stored because the daemon had no room for them."""
    retention_refused: str = ""
    """Why they were stored without the requested priorities; empty if they have them."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The priority of the blocks of a range of a prompt's tokens: a full tier evicts blocks of lower priority first.

    Examples: `Retention(50, ttl_s=3600)` for all of a prompt, `Retention(50, 0, 1024)` for a system prompt of 1,024
    tokens, `Retention(-10, 1024)` for the tokens behind it, which no other prompt has.

    Attributes:
        priority: from -100 (evicted first) to 100; blocks have 0 by default. Blocks above 0 count against the tenant's
            quota (`retained_bytes`).
        start_token: the range's first token. A block belongs to the range that has its last token.
        end_token: the first token behind the range; None: the prompt's end.
        ttl_s: seconds until the priority is 0 again; None: until a restart of the daemon.
    """

    priority: int
    start_token: int = 0
    end_token: int | None = None
    ttl_s: float | None = None

    def to_proto(self) -> cache_pb2.Retention:
        """Returns the contract's message. Raises `InvalidArgumentError` for a value that a field cannot hold."""
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
    """Returns the contract's messages. Raises `InvalidArgumentError`."""
    for each in retention:
        if not isinstance(each, Retention):
            raise InvalidArgumentError(f"retention has {each!r}; each must be a Retention, as Retention(50, ttl_s=60)")
    return [each.to_proto() for each in retention]
