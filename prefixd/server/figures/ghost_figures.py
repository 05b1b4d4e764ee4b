"""What the ghosts estimate, as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prefixd.base.errors import NotFoundError, PreconditionError
from prefixd.base.tiers import Tier
from prefixd.cache import TieredCache
from prefixd.cache.ghosts.ghosts import Ghosts, TierEstimate
from prefixd.serving.models.model_host import ModelHost
from prefixd.v1 import admin_pb2 as pb

_PROMPT = 4096  # tokens of the prompt whose computing time tells a token's


class GhostFigures:
    """The figures of a daemon's ghosts.

    Args:
        cache: knows how long engines compute.
        ghosts: None with cache.ghosts = false.
        models: the daemon's own models.
    """

    def __init__(self, cache: TieredCache, ghosts: Ghosts | None, models: Mapping[str, ModelHost]) -> None:
        self._cache = cache
        self._ghosts = ghosts
        self._models = models

    def take(self, tenant: str | None = None) -> pb.GhostStats | None:
        """Returns the figures, of all prompts or of a tenant's; None with cache.ghosts = false."""
        ghosts = self._ghosts
        if ghosts is None:
            return None
        asked, found = ghosts.asked_tokens(tenant), ghosts.estimates(tenant)
        tiers = [_tier(each, asked, self._token_s() if each is found[-1] else None) for each in found]
        return pb.GhostStats(
            watched_s=ghosts.watched_s,
            asked_tokens=asked,
            tiers=tiers,
            skipped_prompts=ghosts.skipped_prompts,
            busy_s=ghosts.busy_s,
        )

    def answer(self, tenant: str) -> pb.WhatIfResponse:
        """Returns the answer to `WhatIf`.

        Raises:
            NotFoundError: there is no such tenant.
            PreconditionError: there are no ghosts.
        """
        if tenant and self._cache.tenants.get(tenant) is None:
            raise NotFoundError(
                f"there is no tenant {tenant[:100]!r}; `prefixd tenants list` shows those that there are"
            )
        found = self.take(tenant or None)
        if found is None:
            raise PreconditionError("the daemon estimates nothing, since cache.ghosts = false; set it to true")
        if not found.tiers:
            raise PreconditionError("the daemon has neither a CPU nor a disk tier; set cpu.bytes or disk.bytes above 0")
        return pb.WhatIfResponse(ghosts=found, token_s=self._token_s())

    def _token_s(self) -> float | None:
        """Seconds to compute a token: of the first own model that has computed, else what engines said last."""
        costs: list[Callable[[int], float | None]] = [
            host.dispatcher.context.cost.compute_s for host in self._models.values()
        ]
        for compute_s in costs:
            if (seconds := compute_s(_PROMPT)) is not None:
                return seconds / _PROMPT
        return self._cache.prompts.token_s


def _tier(found: TierEstimate, asked_tokens: float, token_s: float | None) -> pb.GhostTier:
    saved = found.tokens_per_byte(asked_tokens) if found.sure else None
    return pb.GhostTier(
        tier=Tier(found.level).wire,
        nbytes=found.nbytes,
        policy=found.policy,
        sampled_share=found.rate,
        references=found.references,
        sure=found.sure,
        measured_hit_rate=found.hit_rate,
        sizes=[
            pb.GhostSize(
                factor=size.factor, nbytes=size.nbytes, hit_rate=size.hit_rate, margin=size.margin, filled=size.filled
            )
            for size in found.sizes
        ],
        policy_hit_rates=found.policies if found.sure else {},
        hit_rates={f"{size.factor:g}": size.hit_rate for size in found.sizes} if found.sure else {},
        tokens_per_byte=saved,
        seconds_per_byte=None if saved is None or token_s is None else saved * token_s,
    )
