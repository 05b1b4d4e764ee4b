"""Decides how much of a waiting request's cached prefix an engine loads, and estimates the time to its first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefixd.integrations.engine.waiting.seen_prefix import SeenPrefix
from prefixd_scheduler import CostModel, Distance, LoadPlan, PrefillCost, Stretch, plan_load

_ASSUMED = PrefillCost(pass_s=0.0, token_s=1e-4)
"""Assumed until steps of the engine were observed; the order hardly depends on it."""


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
    """`prefixd_scheduler.plan_load` for an engine that loads a request's prefix before it computes the rest.

    Args:
        cost: learned costs of loading and computing.
        prompt_tokens: of the whole prompt.
        local_tokens: from the first one on, tokens that the engine's own cache holds.
        seen: the prefix that prefixd holds.
        nbytes: (tokens) -> bytes of that many tokens of a prefix.
        block_tokens: length of a block.
        whole: the engine can only use all of the cached prefix, no part of it (windows, states).
        to_carry_out: as for `plan_load`.
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
    """The cached prefix by tier; the engine's own part is a stretch in the GPU."""
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
    """Estimated seconds of loading and computing until the first token, for ordering requests.

    Before the first observation computing counts as 10,000 tokens a second and loading from a tier as free, so that
    cached prefixes go first. At least one token of the prompt is computed.
    """
    if cost.compute_s(1) is None:
        cost = cost.computing_as(_ASSUMED)
    prompt_tokens = max(prompt_tokens, local_tokens + 1, seen.tokens + 1)
    plan = plan_prefix(cost, prompt_tokens, local_tokens, seen, nbytes, 1)
    if plan.first_token_s is not None:
        return plan.first_token_s
    known = max(local_tokens, seen.tokens)
    return cost.compute_s(prompt_tokens - known, known) or 0.0
