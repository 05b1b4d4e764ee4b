"""Jobs that the connector's scheduler half sends to its workers, and the outcomes that they report."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixd.client import MatchResult, NamespaceSpec, Retention


@dataclass(frozen=True, slots=True)
class Namespaced:
    """The prefix of a prompt in one namespace."""

    spec: NamespaceSpec
    tokens: bytes = field(repr=False)
    """Token ids as little-endian uint32, from the prompt's start to the end of the job's last block."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load prefixd blocks into the engine's blocks."""

    request_id: str
    prefix: Namespaced
    first_block: int
    blocks: int
    block_ids: tuple[tuple[int, ...], ...]
    """The engine's block ids, by group, for all blocks of the job in order; `NO_BLOCK` where it wants no bytes."""
    waits: bool
    """True: the next step computes on the bytes, layer by layer. False: the request waits outside the batch."""
    found: MatchResult | None = None
    """The match that counted the prompt as asked for; the daemon counts the loaded part as found. None: counted."""
    traceparent: str = ""
    """The span of the engine's caller; empty: unknown."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Save the engine's blocks. They stay pinned until the workers have acknowledged the job."""

    id: int
    prefix: Namespaced
    first_block: int
    blocks: int
    groups: tuple[int, ...]
    """Indexes in `Geometry.groups` of the saved groups: the engine may have freed the blocks of a window group."""
    block_ids: tuple[tuple[int, ...], ...]
    """The engine's block ids, by group of `groups`, for all blocks of the job in order."""
    retention: tuple[Retention, ...] = ()
    """Priorities of the prompt's blocks."""
    request_id: str = ""
    """The engine's request."""
    traceparent: str = ""
    """The span of the engine's caller; empty: unknown."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The result of a load on one rank; of several ranks the bytes add up and the worst time and failure count."""

    nbytes: int
    elapsed_s: float
    failed_blocks: int


@dataclass(slots=True)
class Outcomes:
    """Jobs that ended since the last report."""

    loads: dict[str, tuple[int, LoadOutcome]] = field(default_factory=dict)
    """By request id: how many ranks have ended the load, and its outcome."""
    saves: dict[int, int] = field(default_factory=dict)
    """By job id: how many ranks have ended the save."""

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves)

    def merge(self, other: Outcomes) -> None:
        """Adds the outcomes of another rank, or later ones of the same rank."""
        for request_id, (ranks, outcome) in other.loads.items():
            mine = self.loads.get(request_id)
            if mine is not None:
                ranks += mine[0]
                outcome = LoadOutcome(
                    mine[1].nbytes + outcome.nbytes,
                    max(mine[1].elapsed_s, outcome.elapsed_s),
                    max(mine[1].failed_blocks, outcome.failed_blocks),
                )
            self.loads[request_id] = (ranks, outcome)
        for job, ranks in other.saves.items():
            self.saves[job] = self.saves.get(job, 0) + ranks
