"""What can be said in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefixd.errors import ConfigError

DEFAULT_BLOCK_TOKENS = 64

Seconds = Annotated[float, Field(gt=0, le=600, allow_inf_nan=False)]


class ConnectorOptions(BaseModel):
    """Settings of the connector and of the scheduler; vLLM hands them over as they stand in its own configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    address: str | None = None
    """The daemon's unix socket ("unix:/path"); by default where `prefixd serve` listens unless told otherwise."""
    block_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a prefixd block: what is found, moved and kept as a whole. A multiple of vLLM's block size; by default
    the least that is at least 64."""
    save: bool = True
    """Whether this engine gives the cache what it computes; false for one that only reads."""
    load: Literal["async", "layerwise"] = "async"
    """async: a request waits outside the batch until its prefix is there. layerwise: it joins the batch at once, and
    each layer waits for its own part of the prefix (models with one KV cache group)."""
    recompute_if_slower: bool = True
    """Whether a prefix is computed although it is cached, when loading has turned out to be slower."""
    timeout_s: Seconds = 1.0
    """The longest that a call to the daemon may take; above it the daemon counts as away."""
    policy: Literal["fcfs", "fpf", "relaxed-fpf"] = "relaxed-fpf"
    """Order of the waiting queue under FastestPrefixFirstScheduler."""
    look_ahead: Annotated[int, Field(ge=1, le=65536)] = 256
    """Waiting requests, from the oldest on, that FastestPrefixFirstScheduler puts in order."""
    prefetch: Annotated[int, Field(ge=0, le=65536)] = 16
    """Waiting requests whose prefixes are brought up from disk ahead of their turn; FastestPrefixFirstScheduler has so
    many leased as well."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> ConnectorOptions:
        """The options in vLLM's `kv_connector_extra_config`. Raises ConfigError with one line."""
        try:
            return cls.model_validate(dict(extra or {}))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"]) or "the configuration"
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                raise ConfigError(f"kv_connector_extra_config has no option {name!r}; there are {known}") from error
            raise ConfigError(f"kv_connector_extra_config: {name} = {first['input']!r}: {first['msg']}") from error
