"""What prefixd said last about a waiting request's prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from prefixd_scheduler import Distance


@dataclass(frozen=True, slots=True)
class SeenPrefix:
    """The cached prefix of a prompt, by tier.

    Attributes:
        tokens: cached tokens from the prompt's start, in whole blocks.
        runs: (tier, tokens) of the stretches that make it up, from the start; their tokens add up to `tokens`.

    Raises:
        ValueError: they do not, a run is empty, or one is at `NONE`: what is not cached ends the prefix.
    """

    tokens: int
    runs: tuple[tuple[Distance, int], ...] = ()

    def __post_init__(self) -> None:
        if any(tier is Distance.NONE or tokens < 1 for tier, tokens in self.runs):
            raise ValueError(f"the runs {self.runs} contain an empty one or one that is cached nowhere; leave it out")
        if sum(tokens for _, tokens in self.runs) != self.tokens:
            raise ValueError(f"the runs {self.runs} do not add up to {self.tokens} tokens")

    @classmethod
    def of(cls, tiers: Iterable[Distance], block_tokens: int) -> SeenPrefix:
        """From the tier of each cached block in order, blocks of `block_tokens` tokens."""
        runs = tuple((tier, sum(block_tokens for _ in run)) for tier, run in groupby(tiers))
        return cls(sum(tokens for _, tokens in runs), runs)

    def distance(self, local_tokens: int) -> Distance:
        """How far the request is from running, when the engine itself holds its first `local_tokens` tokens.

        Returns:
            The farthest tier of the blocks beyond those, for they would have to be loaded; `GPU` where there are
            none, and `NONE` where nothing is cached anywhere.
        """
        if self.tokens <= local_tokens:
            return Distance.GPU if local_tokens else Distance.NONE
        farthest, end = Distance.GPU, 0
        for tier, tokens in self.runs:
            end += tokens
            if end > local_tokens:
                farthest = max(farthest, tier)
        return farthest

    def before(self, distance: Distance, local_tokens: int) -> SeenPrefix:
        """The part that ends where the first block comes that is so far away, of those beyond `local_tokens`."""
        kept: list[tuple[Distance, int]] = []
        end = 0
        for tier, tokens in self.runs:
            if tier is distance and end + tokens > local_tokens:
                break
            kept.append((tier, tokens))
            end += tokens
        return SeenPrefix(end, tuple(kept))


NOTHING_SEEN = SeenPrefix(0)
