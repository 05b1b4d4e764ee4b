"""The settings that the connectors of all engines have, and their parsing."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefixd.base.codec_names import LOSSY, CodecName
from prefixd.base.errors import ConfigError
from prefixd.client import PartShape

DEFAULT_BLOCK_TOKENS = 32

Seconds = Annotated[float, Field(gt=0, le=600, allow_inf_nan=False)]


class LinkOptions(BaseModel):
    """Settings of everything that connects an engine to the daemon."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    address: str | None = None
    """The daemon's unix socket ("unix:/path"); by default the one of `prefixd serve` with default settings."""
    save: bool = True
    """Whether this engine gives the cache what it computes; false for one that only reads."""
    timeout_s: Seconds = 1.0
    """The longest that a call to the daemon may take; above it the daemon counts as away."""
    codec: CodecName | None = None
    """How the daemon's disk and a shared store keep this engine's blocks: "exact", "lossless", or with less precision
    "int8" or "k8v4" (where the connector knows how keys and values lie in the bytes; elsewhere "lossless"). Engines
    with different codecs share no blocks. None: as the daemon's operator has set it."""


class EngineOptions(LinkOptions):
    """Settings of every engine's connector that gives prefixd token ids; each connector adds its own."""

    block_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a prefixd block: what is found, moved and kept as a whole. A multiple of the engine's block size; by
    default the least that is at least 32."""
    resume_every: Annotated[int, Field(ge=0)] = 8
    """For layers with a sliding window or a state, the ends of prefixes are saved at the ends of prompts and answers,
    where prompts branch, and inside prompts at every `resume_every`-th window (with states: block), where later
    prompts may branch. 1: at every block; 0: not inside prompts."""
    recompute_if_slower: bool = True
    """Whether a prefix is computed although it is cached, when loading has turned out to be slower."""
    compute_once_s: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] | None = None
    """Of several engines with one daemon, one computes a prefix that they need at the same time, if that takes at least
    so many seconds; the others wait for it, where that pays, and load it. None: each computes for itself."""
    strict_version: bool = False
    """Whether engines of another version have namespaces of their own, although they pack pages in the same way."""
    prefetch: Annotated[int, Field(ge=0, le=65536)] | Literal["auto"] = "auto"
    """How many waiting requests get their prefixes prefetched from disk. auto: as many as begin while a prefix is
    loaded, by recent times of both, 64 at most; 0: none."""


def codec_for(codec: CodecName | None, shapes: Iterable[PartShape | None], log: logging.Logger) -> str:
    """The codec of a namespace whose parts have these shapes, by the option `codec`; "": none is asked for.

    The daemon refuses a lossy codec where no shape is known; a warning then says that blocks are stored losslessly.
    """
    if codec in LOSSY and all(shape is None for shape in shapes):
        log.warning(
            "prefixd: codec = %s: how keys and values lie in this engine's pages is not known, so their precision "
            "stays as it is, and the daemon stores them with the codec lossless",
            codec,
        )
        return "lossless"
    return codec or ""


Options = TypeVar("Options", bound=BaseModel)


def parse_options(kind: type[Options], given: Any, place: str, whole: str) -> Options:
    """Validates the options that an engine hands over.

    Args:
        given: the options by name; may be anything, since it is the user's.
        place: where the user wrote them, for the error text: "kv_connector_extra_config".
        whole: the name of all options together, for an error of no single option.

    Raises:
        ConfigError: one line with the first wrong option, its value and what is allowed.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or whole
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{place} has no option {name!r}; there are {', '.join(kind.model_fields)}") from None
        raise ConfigError(f"{place}: {name} = {first['input']!r}: {first['msg']}") from None
