"""What loading a cached prefix takes against computing it."""

from __future__ import annotations

from dataclasses import dataclass

from prefixd.v1 import cache_pb2


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
