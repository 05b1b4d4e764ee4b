"""The state of one waiting request's look-up: its last answer, the call under way, its lease and its claim."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.client import AsyncLease, MatchResult, NamespaceSpec
from prefixd.integrations.engine.waiting.computing_once import Claiming
from prefixd.integrations.engine.waiting.seen_prefix import SeenPrefix
from prefixd_scheduler import Distance


@dataclass(slots=True)
class Lookup:
    """One request's look-up: the last answer, the call under way, and the lease."""

    request_id: str
    spec: NamespaceSpec
    tokens: npt.NDArray[np.uint32] = field(repr=False)
    """The first token ids of the prompt, as far as prefixd may find them."""
    seen: SeenPrefix | None = None
    seen_s: float = -float("inf")
    asked_s: float = -float("inf")
    """When the last match was started."""
    asking: Future[SeenPrefix] | None = None
    found: MatchResult | None = None
    """The first answer, by which the daemon has counted the prompt as asked for."""
    leasing: Future[AsyncLease] | None = None
    lease: AsyncLease | None = None
    leased_blocks: int = 0
    """Most blocks of the lease, whether it is there or under way."""
    end_block: int = 0
    """The prefix is loaded up to this block. The lease may end before: of a long prefix it has the first slice."""
    room_again_s: float = -float("inf")
    """When the lease may be asked for again after the daemon had no room."""
    waited_for: Future[Any] | None = None
    """The answer that a step has waited for."""
    counted: bool = False
    """The first match was started, which is the one that the daemon's hit rates count."""
    lease_s: float = 0.0
    """How long the daemon took for the lease, reading from disk included."""
    turn_s: float | None = None
    """When the engine first asked how much it can load."""
    traceparent: str = ""
    """The span of the engine's caller; empty: unknown."""
    leasing_s: float = 0.0
    """When the lease under way was asked for."""
    late_s: float | None = None
    """Longest wait for the lease, from the request's turn on; then blocks on disk or farther away are computed
    instead. None: no limit."""
    far_bytes: int = 0
    """Bytes that the daemon reads from disk, or from a shared store, for the lease under way."""
    distance: Distance = Distance.DISK
    """The farthest tier of these bytes."""
    slow: bool = False
    """A lease took too long and was given up: only blocks in memory are loaded."""
    refused: bool = False
    """Load nothing for this request, unless it is preempted."""
    claiming: Claiming | None = None
    """The claim on what is missing; None before the request's turn, and for a request that is not saved."""
    claims: bool = False
    """The request may claim: it will be saved."""
    failed: bool = False
    """A load failed; never load for this request again, even after a preemption."""
