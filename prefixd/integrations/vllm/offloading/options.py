"""Options of the tier, beside "type" and "module_path" in vLLM's `secondary_tiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixd.integrations.engine.options import LinkOptions, parse_options


class TierOptions(LinkOptions):
    """Settings of the tier: those of the connection, and no others."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TierOptions:
        """The options of a tier's entry. Raises ConfigError with one line."""
        return parse_options(cls, dict(given), "PrefixdTier in secondary_tiers", "")
