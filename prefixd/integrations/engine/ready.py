"""How soon a waiting request of an engine could have its first token."""

from __future__ import annotations

from collections.abc import Callable

from prefixd.integrations.engine.seen import SeenPrefix
from prefixd_scheduler import CostModel, Distance

_ASSUMED_TOKENS_PER_S = 10_000
"""Computed by an engine whose steps were not observed yet: the order hardly depends on it."""


def time_to_ready(
    cost: CostModel, prompt_tokens: int, local_tokens: int, seen: SeenPrefix, nbytes: Callable[[int], int]
) -> float:
    """Estimated seconds of loading and computing until the first token, for putting requests in order.

    It is the best of: compute all that the engine lacks; or load as far as one of the tiers of the cached prefix goes,
    and compute the rest. That is what `prefixd_scheduler.plan_load` chooses from for an engine, which does not do both
    at once; but asking for a place in the order is no decision to load, so it counts for no probe.

    Args:
        cost: what was learned. Computing that was not observed is assumed at 10,000 tokens a second, a load that was
            not observed takes no time: a cache is there to be loaded from.
        prompt_tokens: of the whole prompt, of which at least one is computed.
        local_tokens: those from the first on that the engine's own cache holds.
        seen: what prefixd holds of the prompt.
        nbytes: (tokens) -> bytes of so many tokens of a prefix.
    """

    def computed_s(begin: int) -> float:
        begin = min(begin, prompt_tokens - 1)
        known = cost.compute_s(prompt_tokens - begin, begin)
        return (prompt_tokens - begin) / _ASSUMED_TOKENS_PER_S if known is None else known

    best_s = computed_s(local_tokens)
    tokens: dict[Distance, int] = {}
    end = 0
    for distance, count in seen.runs:
        end += count
        if end > local_tokens:
            tokens[distance] = tokens.get(distance, 0) + min(count, end - local_tokens)
            loaded_s = sum(cost.load_s(nbytes(some), tier) or 0.0 for tier, some in tokens.items())
            best_s = min(best_s, loaded_s + computed_s(end))
    return best_s
