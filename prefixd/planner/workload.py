"""Workloads of a planned daemon: requests with a time of arrival, or with a request that must end before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import ConfigError
from prefixd.workloads.mooncake import HASH_TOKENS, PrefixCount, TraceRequest, read_trace, tokens_of

TokenIds = npt.NDArray[np.uint32]
_OWN_TOKENS = 1 << 31
"""The first of the token ids that belong to one request: in a trace's last, partial block, and in generated output."""
_LONGEST_S = 1e9  # each day of idle time takes a turn of the loop


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request.

    Attributes:
        arrival_s: seconds after the start; with `after`, after that request's end.
        prompt: returns its token ids; called at its arrival, so that a long trace is never in memory as tokens.
        prompt_tokens: length of the prompt.
        output_tokens: length of the output.
        output: its generated tokens, if later prompts contain them; None: tokens that no other prompt has.
        after: index in the workload of the request that must end before; None: none.
    """

    arrival_s: float
    prompt: Callable[[], TokenIds]
    prompt_tokens: int
    output_tokens: int
    output: tuple[int, ...] | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, in the order of their arrival.

    Attributes:
        name: for output.
        requests: at least one.
        outstanding: how many requests are under way at a time; None: each is sent at its arrival.
        block_tokens: length of a block that suits the workload; None: any.
        assumptions: one line each.
    """

    name: str
    requests: Sequence[PlannedRequest]
    outstanding: int | None = None
    block_tokens: int | None = None
    assumptions: tuple[str, ...] = ()


def trace_requests(file: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace in Mooncake's format.

    Raises:
        ConfigError: there is no such file, it can be read only once, a line is malformed, it has no request, or its
            requests are not in the order of arrival.
    """
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is no regular file, and a plan reads its trace more than once; save it to a file")
    found = list(read_trace(file, limit))
    if not found:
        raise ConfigError(f"{file} has no request; give a trace with a JSON object a line")
    for number, (before, request) in enumerate(pairwise(found), 2):
        if request.timestamp_ms < before.timestamp_ms:
            raise ConfigError(
                f"{file}: request {number} has timestamp {request.timestamp_ms}, less than the {before.timestamp_ms} "
                "of the one before it; sort the trace by timestamp"
            )
    return found


def of_trace(name: str, found: Sequence[TraceRequest], *, speed: float = 1.0) -> Workload:
    """A trace's requests, `speed` times as fast as recorded. Raises ConfigError for a trace that takes decades."""
    first_ms = found[0].timestamp_ms
    if (span_s := (found[-1].timestamp_ms - first_ms) / 1000 / speed) > _LONGEST_S:
        raise ConfigError(
            f"the last request of {name} comes {span_s:,.0f} s after the first, and at most {_LONGEST_S:,.0f} s are "
            "planned; its timestamps have to be in ms; or raise --speed"
        )
    requests = [
        PlannedRequest(
            (request.timestamp_ms - first_ms) / 1000 / speed,
            partial(_prompt, number, request),
            max(1, request.input_length),
            max(1, request.output_length),
        )
        for number, request in enumerate(found)
    ]
    assumptions = [
        f"{len(requests):,} requests of {name}, arriving in {requests[-1].arrival_s:,.0f} s"
        + ("" if speed == 1 else f" ({speed:g} times as fast as recorded)"),
        "no prompt contains generated tokens of earlier requests, which the trace does not have; they take room all "
        "the same",
    ]
    return Workload(name, requests, block_tokens=HASH_TOKENS, assumptions=tuple(assumptions))


def achievable_rate(found: Sequence[TraceRequest], refused: Collection[int] = ()) -> float:
    """The share of the prompt tokens that a cache without limits would have, in whole blocks of the trace.

    Args:
        found: the requests.
        refused: indexes of refused requests, which do not count.
    """
    count = PrefixCount()
    answered = [request for place, request in enumerate(found) if place not in refused]
    hits = sum(count.hits_of(request.hash_ids) for request in answered)
    return HASH_TOKENS * hits / max(1, sum(request.input_length for request in answered))


def own_tokens(number: int, first: int, count: int) -> list[int]:
    """Token ids of one request; another request has the same ones only by a negligible chance."""
    start = _OWN_TOKENS + (number * 0x9E3779B1 + first) % (_OWN_TOKENS - count)
    return list(range(start, start + count))


def _prompt(number: int, request: TraceRequest) -> TokenIds:
    """The tokens of the request's full blocks, followed by tokens of its own."""
    shared = tokens_of(request.hash_ids)
    rest = max(1, request.input_length) - len(shared)
    return np.concatenate([shared, np.array(own_tokens(number, 0, rest), np.uint32)])
