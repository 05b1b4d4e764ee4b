"""What the scheduler's half of the connector asks of the workers' half, and what it is told back."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixd.client import MatchResult, Retention


@dataclass(frozen=True, slots=True)
class Namespaced:
    """The prefix of a prompt in one namespace."""

    name: str
    salt: bytes
    tokens: bytes = field(repr=False)
    """Token ids as little-endian uint32, from the prompt's start to the end of the last block that is meant."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Bring prefixd blocks into the engine's blocks."""

    request_id: str
    prefix: Namespaced
    first_block: int
    blocks: int
    block_ids: tuple[tuple[int, ...], ...]
    """The engine's blocks, by group, all blocks of the job one after the other; `NO_BLOCK` where it wants no bytes."""
    waits: bool
    """Whether the step that begins with it computes on the bytes (layer-wise), or the request waits outside."""
    found: MatchResult | None = None
    """The answer that counted the prompt as asked for: what of it is loaded counts as found. None: it has been."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Give the engine's blocks to the cache. They stay what they are until the job is acknowledged."""

    id: int
    prefix: Namespaced
    first_block: int
    blocks: int
    groups: tuple[int, ...]
    """Places in the geometry of the groups whose bytes the engine has: of a window group it may have none any more."""
    block_ids: tuple[tuple[int, ...], ...]
    """The engine's blocks, by group of `groups`, all blocks of the job one after the other."""
    retention: tuple[Retention, ...] = ()
    """Priorities of the prompt's blocks."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How a load went, on one rank or on the worst of several."""

    nbytes: int
    elapsed_s: float
    failed_blocks: int


@dataclass(slots=True)
class Outcomes:
    """What one rank has ended since it was last asked; of several ranks, how many have."""

    loads: dict[str, tuple[int, LoadOutcome]] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves)

    def merge(self, other: Outcomes) -> None:
        """Adds what another rank, or the same one later, has ended."""
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
