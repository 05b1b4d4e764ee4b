"""Options of the backend, under "prefixd" in `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from prefixd.integrations.engine.options import LinkOptions, parse_options

SECTION = "prefixd"


class HiCacheOptions(LinkOptions):
    """Settings of the backend; SGLang hands over its own configuration, in which they are one entry."""

    model: str | None = None
    """Identifies the weights: the model's folder, of which a digest is made, or a name of your own, as "llama-3@2f1c".
    By default the folder or the name that SGLang was started with."""
    strict_version: bool = False
    """Whether engines of another version of SGLang have pages of their own, although pages lie in the same way."""
    slice_s: Annotated[float, Field(gt=0, le=8, allow_inf_nan=False)] = 2.0
    """The longest that one of SGLang's calls goes on. A prefetch that SGLang has given up ends between two calls; one
    that is too slow ends here, and what has come by then is used. SGLang waits 10 s for its threads when it
    detaches."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> HiCacheOptions:
        """The options in SGLang's extra configuration. Raises ConfigError with one line."""
        return parse_options(cls, (extra or {}).get(SECTION) or {}, f'"{SECTION}" in the extra config', SECTION)
