"""The cached prefix of a waiting request's prompt, as prefixd last reported it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from prefixd_scheduler import Distance, prompt_weight


@dataclass(frozen=True, slots=True)
class SeenPrefix:
    """The cached prefix of a prompt, by tier.

    Attributes:
        tokens: cached tokens from the prompt's start, in whole blocks.
        runs: (tier, tokens) of the stretches that make it up, from the start; their tokens add up to `tokens`.

    Raises:
        ValueError: the sum differs, a run is empty, or one is at `NONE`: an uncached block ends the prefix.
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
        """The farthest tier of the blocks behind the first `local_tokens` tokens, which the engine holds; `GPU` if
        there are none."""
        farthest, end = Distance.GPU, 0
        for tier, tokens in self.runs:
            end += tokens
            if end > local_tokens:
                farthest = max(farthest, tier)
        return farthest

    def weight(self, local_tokens: int, prompt_tokens: int, header_tokens: int = 0) -> float:
        """How near a prompt is, from 4 to 1 (`prefixd_scheduler.prompt_weight`), when the engine itself holds its first
        `local_tokens` tokens: those count as on the GPU, prefixd's beyond them as in their tier. The first
        `header_tokens` do not count."""
        local_tokens = min(local_tokens, prompt_tokens)
        parts, end = [(Distance.GPU, max(0, local_tokens - header_tokens))], 0
        for tier, tokens in self.runs:
            end += tokens
            parts.append((tier, max(0, min(tokens, end - max(local_tokens, header_tokens)))))
        return prompt_weight(parts, max(prompt_tokens, self.tokens) - header_tokens)

    def before(self, distance: Distance, local_tokens: int) -> SeenPrefix:
        """The prefix up to the first run behind `local_tokens` that is at `distance`."""
        kept: list[tuple[Distance, int]] = []
        end = 0
        for tier, tokens in self.runs:
            if tier is distance and end + tokens > local_tokens:
                break
            kept.append((tier, tokens))
            end += tokens
        return SeenPrefix(end, tuple(kept))

    def sources(self, local_tokens: int, tokens: int) -> dict[Distance, int]:
        """The tiers of `tokens` tokens beyond `local_tokens`: tokens by distance. Those beyond the prefix were
        committed or prefetched since, and are in CPU memory."""
        found: dict[Distance, int] = {}
        at, left, end = 0, tokens, local_tokens
        for distance, run in self.runs:
            at += run
            taken = min(left, max(0, at - end))
            if taken:
                found[distance] = found.get(distance, 0) + taken
                left -= taken
                end += taken
        if left:
            found[Distance.CPU] = found.get(Distance.CPU, 0) + left
        return found


NOTHING_SEEN = SeenPrefix(0)
