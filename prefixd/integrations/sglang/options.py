"""Options of the backend, under "prefixd" in `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from prefixd.integrations.engine.options import Seconds, parse_options

SECTION = "prefixd"


class HiCacheOptions(BaseModel):
    """Settings of the backend; SGLang hands over its own configuration, in which they are one entry."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    address: str | None = None
    """The daemon's unix socket ("unix:/path"); by default where `prefixd serve` listens unless told otherwise."""
    model: str | None = None
    """Identifies the weights: the model's folder, of which a digest is made, or a name of your own, as "llama-3@2f1c".
    By default the folder or the name that SGLang was started with."""
    save: bool = True
    """Whether this engine gives the cache what it computes; false for one that only reads."""
    strict_version: bool = False
    """Whether engines of another version of SGLang have pages of their own, although pages lie in the same way."""
    timeout_s: Seconds = 1.0
    """The longest that a call to the daemon may take; above it the daemon counts as away."""
    slice_s: Annotated[float, Field(gt=0, le=8, allow_inf_nan=False)] = 2.0
    """The longest that one of SGLang's calls goes on. A prefetch that SGLang has given up ends between two calls; one
    that is too slow ends here, and what has come by then is used. SGLang waits 10 s for its threads when it
    detaches."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> HiCacheOptions:
        """The options in SGLang's extra configuration. Raises ConfigError with one line."""
        return parse_options(cls, (extra or {}).get(SECTION) or {}, f'"{SECTION}" in the extra config', SECTION)
