"""Options of the tier, beside "type" and "module_path" in vLLM's `secondary_tiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from prefixd.integrations.engine.options import Seconds, parse_options


class TierOptions(BaseModel):
    """Settings of the tier."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    address: str | None = None
    """The daemon's unix socket ("unix:/path"); by default where `prefixd serve` listens unless told otherwise."""
    save: bool = True
    """Whether this engine gives the cache what it computes; false for one that only reads."""
    timeout_s: Seconds = 1.0
    """The longest that a call to the daemon may take; above it the daemon counts as away."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TierOptions:
        """The options of a tier's entry. Raises ConfigError with one line."""
        return parse_options(cls, dict(given), "PrefixdTier in secondary_tiers", "")
