"""What can be said beside "type" and "module_path" in vLLM's `secondary_tiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from prefixd.base.errors import ConfigError
from prefixd.integrations.engine.options import Seconds


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
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                raise ConfigError(f"PrefixdTier in secondary_tiers has no option {name!r}; there are {known}") from None
            raise ConfigError(f"PrefixdTier in secondary_tiers: {name} = {first['input']!r}: {first['msg']}") from None
