"""Options of prefixd that a request carries in vLLM's `kv_transfer_params`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from prefixd.client import Retention

_MOST_RANGES = 64
_Token = Annotated[int, Field(ge=0, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """One request's options.

    Attributes:
        read_only: save none of its blocks.
        retention: priorities of its prompt's blocks.
    """

    read_only: bool = False
    retention: tuple[Retention, ...] = ()


NO_REQUEST_OPTIONS = RequestOptions()


class _Range(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    priority: Annotated[int, Field(ge=-100, le=100)]
    start: _Token = 0
    end: _Token | None = None
    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"end is {self.end}; it must be above start, which is {self.start}")
        return self


_RANGES = TypeAdapter(list[_Range])


def read_request_options(params: object, prompt_tokens: int) -> tuple[RequestOptions, list[str]]:
    """Reads `kv_transfer_params["prefixd"]`; returns the valid options and one line about each wrong one.

    Example: `{"prefixd": {"read_only": True, "retention": [{"end": 1024, "priority": 50, "ttl_s": 3600}]}}`.

    Args:
        params: as the client sent them; None for none.
        prompt_tokens: the end of ranges that have none or a later one.
    """
    if not isinstance(params, Mapping) or "prefixd" not in params:
        return NO_REQUEST_OPTIONS, []
    asked = params["prefixd"]
    if not isinstance(asked, Mapping):
        return NO_REQUEST_OPTIONS, [
            f"prefixd is {reprlib.repr(asked)}; it must be an object with read_only or retention"
        ]
    wrong = [
        f"prefixd has {reprlib.repr(name)}; there are read_only and retention"
        for name in list(asked)[:3]
        if name not in ("read_only", "retention")
    ]
    read_only = asked.get("read_only", False)
    if not isinstance(read_only, bool):
        wrong.append(f"read_only is {reprlib.repr(read_only)}; it must be true or false")
        read_only = False
    retention, refusal = _read_retention(asked.get("retention", []), prompt_tokens)
    return RequestOptions(read_only, retention), [*wrong, *refusal]


def traceparent_of(request: Any) -> str:
    """Returns the header `traceparent` of a request of vLLM, which its server keeps with `--otlp-traces-endpoint`;
    empty without one."""
    headers = getattr(request, "trace_headers", None)
    value = headers.get("traceparent", "") if isinstance(headers, Mapping) else ""
    return value if isinstance(value, str) else ""


def _read_retention(asked: Any, prompt_tokens: int) -> tuple[tuple[Retention, ...], list[str]]:
    if isinstance(asked, list) and len(asked) > _MOST_RANGES:
        return (), [f"retention has {len(asked)} ranges; send at most {_MOST_RANGES}"]
    try:
        ranges = _RANGES.validate_python(asked)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f".{part if part in _Range.model_fields else reprlib.repr(part)}" for part in first["loc"])
        return (), [f"retention{place} is {reprlib.repr(first['input'])}: {first['msg']}"]
    return tuple(
        Retention(each.priority, each.start, min(each.end or prompt_tokens, prompt_tokens), each.ttl_s)
        for each in ranges
        if each.start < prompt_tokens
    ), []
