"""What can be said in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from prefixd.errors import ConfigError
from prefixd.integrations.engine.options import EngineOptions


class ConnectorOptions(EngineOptions):
    """Settings of the connector and of the scheduler; vLLM hands them over as they stand in its own configuration.

    Of `prefetch` requests FastestPrefixFirstScheduler gets the leases as well.
    """

    load: Literal["async", "layerwise"] = "async"
    """async: a request waits outside the batch until its prefix is there. layerwise: it joins the batch at once, and
    each layer waits for its own part of the prefix (models with one KV cache group)."""
    policy: Literal["fcfs", "fpf", "relaxed-fpf"] = "relaxed-fpf"
    """Order of the waiting queue under FastestPrefixFirstScheduler."""
    look_ahead: Annotated[int, Field(ge=1, le=65536)] = 256
    """Waiting requests, from the oldest on, that FastestPrefixFirstScheduler puts in order."""

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
