"""What a client says about its model, and what the daemon says about a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixd.base.rules.rule_messages import to_message
from prefixd.base.rules.rules import Rule
from prefixd.base.tiers import Tier
from prefixd.client.errors import InvalidArgumentError, ServerError
from prefixd.client.messages import message
from prefixd.v1 import cache_pb2


def check_salt(salt: object) -> None:
    """Raises `InvalidArgumentError` for a salt that is no bytes: encoded in two ways, a text would be two salts."""
    if not isinstance(salt, bytes):
        raise InvalidArgumentError(
            f"salt is of type {type(salt).__name__}; it must be bytes, of a text `text.encode()`"
        )


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
        return cache_pb2.Part(group=self.group, rank=self.rank, nbytes=self.nbytes, rule=to_message(self.rule))


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
class Prefill:
    """What computing prompt tokens takes on an engine, for the daemon's estimates. 0 for what is not known.

    Attributes:
        token_s: seconds for each token.
        pass_s: for each pass of the model.
        pair_s: for each pair of a token and one that it attends to.
    """

    token_s: float
    pass_s: float = 0.0
    pair_s: float = 0.0

    def to_proto(self) -> cache_pb2.Prefill:
        """The contract's message."""
        return cache_pb2.Prefill(token_s=self.token_s, pass_s=self.pass_s, pair_s=self.pair_s)


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """The daemon's estimate, as of the call, by what the last loads have taken; of `acquire`: before it loaded.

    Attributes:
        load_s: seconds until all blocks of the answer can be read; None while nothing like it has been loaded.
        compute_s: seconds to compute the prompt instead, behind what the caller has. None without a `Prefill`.
        best_blocks: the fastest is to use so many cached blocks, counted from the prompt's start, and to compute the
            rest. None without a `Prefill`.
        best_s: seconds to the first token that way.
    """

    load_s: float | None = None
    compute_s: float | None = None
    best_blocks: int | None = None
    best_s: float | None = None

    @classmethod
    def from_proto(cls, message: cache_pb2.LoadEstimate) -> LoadEstimate:
        """The estimate in the client's words."""
        return cls(**{field.name: value for field, value in message.ListFields()})


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest cached prefix: its length in blocks, where it is, from the start of the prompt, and what loading
    takes."""

    blocks: int
    runs: tuple[TierRun, ...]
    estimate: LoadEstimate = field(default_factory=LoadEstimate)

    def to_found(self) -> list[cache_pb2.TierRun]:
        """The runs as Acquire and Get take them: where the prompt's blocks were when it was asked about."""
        return [cache_pb2.TierRun(tier=run.tier.wire, blocks=run.blocks) for run in self.runs[:_MOST_RUNS]]

    def blocks_in(self, tier: Tier) -> int:
        """Blocks of the prefix whose nearest copy is in `tier`."""
        return sum(run.blocks for run in self.runs if run.tier == tier)

    @classmethod
    def from_proto(cls, response: cache_pb2.MatchResponse) -> MatchResult:
        """The result in the client's words. Raises `ServerError` for a tier that this version does not know."""
        try:
            runs = tuple(TierRun(Tier.from_wire(run.tier), run.blocks) for run in response.runs)
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
