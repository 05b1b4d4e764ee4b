"""How much of a waiting request's cached prefix an engine loads, and how soon its first token can be there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefixd.integrations.engine.waiting.seen_prefix import SeenPrefix
from prefixd_scheduler import CostModel, Distance, LoadPlan, PrefillCost, Stretch, plan_load

_ASSUMED = PrefillCost(pass_s=0.0, token_s=1e-4)
"""Computing on an engine whose steps were not observed yet: the order hardly depends on it."""


def plan_prefix(
    cost: CostModel,
    prompt_tokens: int,
    local_tokens: int,
    seen: SeenPrefix,
    nbytes: Callable[[int], int],
    block_tokens: int,
    *,
    whole: bool = False,
    to_carry_out: bool = False,
) -> LoadPlan:
    """What `prefixd_scheduler.plan_load` says for an engine, which does not load and compute at once.

    Args:
        cost: what was learned.
        prompt_tokens: of the whole prompt.
        local_tokens: those from the first on that the engine's own cache holds.
        seen: what prefixd holds of the prompt.
        nbytes: (tokens) -> bytes of so many tokens of a prefix.
        block_tokens: length of a block.
        whole: no beginning of the cached prefix can be used, only all of it (windows, states).
        to_carry_out: see `plan_load`.
    """
    usable = None
    if whole:

        def usable(tokens: int) -> int:
            return tokens if tokens >= seen.tokens else local_tokens

    parts = stretches(seen, local_tokens, nbytes)
    return plan_load(
        cost, parts, prompt_tokens, block_tokens, both_at_once=False, usable=usable, to_carry_out=to_carry_out
    )


def stretches(seen: SeenPrefix, local_tokens: int, nbytes: Callable[[int], int]) -> Sequence[Stretch]:
    """The cached prefix by tier, the engine's own part at hand."""
    found = [Stretch(Distance.GPU, local_tokens, 0)] if local_tokens else []
    end = 0
    for distance, count in seen.runs:
        end += count
        if end > local_tokens:
            tokens = min(count, end - local_tokens)
            found.append(Stretch(distance, tokens, nbytes(tokens)))
    return found


def time_to_ready(
    cost: CostModel, prompt_tokens: int, local_tokens: int, seen: SeenPrefix, nbytes: Callable[[int], int]
) -> float:
    """Estimated seconds of loading and computing until the first token, for putting requests in order.

    Computing that was not observed is assumed at 10,000 tokens a second, and what is loaded from a tier that was not
    observed counts as at hand: a cache is there to be loaded from. Of the prompt at least one token is computed.
    """
    if cost.compute_s(1) is None:
        cost = cost.computing_as(_ASSUMED)
    prompt_tokens = max(prompt_tokens, local_tokens + 1, seen.tokens + 1)
    plan = plan_prefix(cost, prompt_tokens, local_tokens, seen, nbytes, 1)
    if plan.first_token_s is not None:
        return plan.first_token_s
    known = max(local_tokens, seen.tokens)
    return cost.compute_s(prompt_tokens - known, known) or 0.0
