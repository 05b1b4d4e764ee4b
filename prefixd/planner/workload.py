"""What is asked of a planned daemon: requests with their arrival, or with the request whose answer they wait for."""

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
"""From here on tokens are a request's own: of a trace's last block, which is not full, and of what is generated."""
_LONGEST_S = 1e9  # a day of idle time takes a turn of the loop


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request.

    Attributes:
        arrival_s: seconds after the start; with `after`, after that request's end.
        prompt: its token ids; asked for when it arrives, so that a long trace is never in memory as tokens.
        prompt_tokens: how many these are.
        output_tokens: how many it generates.
        output: what it generates, where later requests ask for that again; None: tokens that nobody asks for.
        after: the place of the request in the workload that has to have ended before; None: it waits for nobody.
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
        name: for people.
        requests: at least one.
        outstanding: how many are sent before the first of them has ended; None: each at its arrival.
        block_tokens: tokens of a block that suit it; None: any.
        assumptions: what it takes for granted, a line each.
    """

    name: str
    requests: Sequence[PlannedRequest]
    outstanding: int | None = None
    block_tokens: int | None = None
    assumptions: tuple[str, ...] = ()


def trace_requests(file: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace in Mooncake's format.

    Raises:
        ConfigError: there is no such file, it can be read only once, a line is malformed, no request is in it, or they
            are not in the order of their arrival.
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
    """A trace's requests, `speed` times as fast as it was recorded. Raises ConfigError when that takes decades."""
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
        "nobody asks for generated tokens again: the trace does not say what was generated; they take room all the "
        "same",
    ]
    return Workload(name, requests, block_tokens=HASH_TOKENS, assumptions=tuple(assumptions))


def achievable_rate(found: Sequence[TraceRequest], refused: Collection[int] = ()) -> float:
    """The share of the prompt tokens that a cache without limits would have, in whole blocks of the trace.

    Args:
        found: the requests.
        refused: places of those that are not answered, and count in nothing.
    """
    count = PrefixCount()
    answered = [request for place, request in enumerate(found) if place not in refused]
    hits = sum(count.hits_of(request.hash_ids) for request in answered)
    return HASH_TOKENS * hits / max(1, sum(request.input_length for request in answered))


def own_tokens(number: int, first: int, count: int) -> list[int]:
    """Tokens that no other request has, or that are alike by so rare a chance that it makes no difference."""
    start = _OWN_TOKENS + (number * 0x9E3779B1 + first) % (_OWN_TOKENS - count)
    return list(range(start, start + count))


def _prompt(number: int, request: TraceRequest) -> TokenIds:
    """Its full blocks' tokens, and tokens of its own behind them."""
    shared = tokens_of(request.hash_ids)
    rest = max(1, request.input_length) - len(shared)
    return np.concatenate([shared, np.array(own_tokens(number, 0, rest), np.uint32)])
