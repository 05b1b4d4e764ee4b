"""The record of one request: when it came, what the cache had for it, where its time went, how it ended.

A record is written by the code that serves the request, in a few dozen steps of constant time: none a token and none a
block. It is read when the request has ended (`RequestLog.ended`: metrics, spans, log lines) and by `prefixd why`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from prefixd.base.tiers import Tier
from prefixd.observability.missing_blocks import MissingBlocks
from prefixd.observability.trace_context import TraceContext

MOST_STAGES = 48
MOST_NOTES = 16
LONGEST_REASON = 400
UNKNOWN_MODEL = "(unknown)"
"""The model of requests that name one which is not there: such a name is the caller's fantasy, of any length."""

Value: TypeAlias = str | int | float | bool
"""Of an attribute."""
_NOTHING_FOUND = (0,) * len(Tier)


class Kind(StrEnum):
    """What was asked for."""

    GENERATE = "generate"
    """A prompt ran on a worker of this daemon: one record a call of Generate, for all its sequences."""
    LOOKUP = "lookup"
    """An engine asked for a cached prefix: one record a call of Acquire or Get."""
    STORE = "store"
    """An engine stored blocks: one record a call of Reserve, Commit or Put."""


class StageName(StrEnum):
    """What a stretch of a request's time was spent on. Stages may overlap: LOAD lies within QUEUE."""

    RECEIVE = "receive"
    """The call's message arrived, perhaps behind other messages."""
    MODEL = "model"
    """The model was loading, or its worker started again."""
    TOKENIZE = "tokenize"
    """Text became token ids, or ids were checked. `tokens`."""
    IMAGES = "images"
    """Image files were decoded. `images`."""
    STORE_LOOKUP = "store_lookup"
    """The shared store was asked what it has of the prompt."""
    QUEUE = "queue"
    """From entering the queue to the hand-over to the worker; again after each interruption. `resumed` (how often)."""
    LOAD = "load"
    """Cached blocks were brought up. `tier` (the farthest that they came from), `blocks`, `bytes`, `urgency` (`demand`
    if the request waited for it from the start, else `prefetch`), `outcome` (`complete`; `given_up`: computing was
    faster; `failed`; `withdrawn`: nobody waits for it any more; of engines `cut`: fewer blocks than were found),
    `arrived_blocks`; of a failed load `block_key`, the block that did not come. `beside`: it went on while the request
    computed the front of its prefix."""
    PREFILL = "prefill"
    """From the hand-over to the first token of a run. `computed_tokens` (those of the prompt that were not found)."""
    DECODE = "decode"
    """From the first token to the end of the run."""
    MATCH = "match"
    """The cached prefix was looked for (LOOKUP, STORE)."""
    RESERVE = "reserve"
    """Room was made for blocks, which may wait for the disk. `blocks`."""
    COMMIT = "commit"
    """Filled blocks were entered. `blocks`, `durable`."""
    SEND = "send"
    """Bytes went over the network to the client (Get). `blocks`."""
    FILL = "fill"
    """Bytes came over the network from the client (Put). `blocks`."""


class Wait(StrEnum):
    """Why a request that waits in the queue is not handed over."""

    BEHIND = "behind"
    """Other requests are before it in the policy's order."""
    PLACES = "places"
    """As many requests run as may (`worker.max_running`)."""
    TENANT = "tenant"
    """The free places are kept for other tenants, or its tenant's quota of the GPU tier is used up."""
    MEMORY = "memory"
    """The GPU tier has too few frames."""
    LOAD = "load"
    """Its prefix is on its way to the GPU tier."""
    OTHER = "other"
    """Another request computes the same prefix, which it will use."""
    PREEMPTED = "preempted"
    """It gave its memory to others and runs again when a run has ended."""
    WORKER = "worker"
    """There is no worker: it starts, or starts again."""


@dataclass(slots=True, eq=False)
class Stage:
    """A stretch of a request's time.

    Attributes:
        name: on what.
        start_s: on the clock of `RequestRecord.arrival_s`.
        end_s: None while it lasts.
        attributes: as `StageName` documents them.
    """

    name: StageName
    start_s: float
    end_s: float | None = None
    attributes: dict[str, Value] = field(default_factory=dict)

    def end(self, now_s: float, **attributes: Value) -> None:
        """Ends it; the first call counts."""
        if self.end_s is None:
            self.end_s = now_s
            self.attributes.update(attributes)


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Cached blocks that were found and not loaded, because computing them was estimated to be faster.

    Attributes:
        at_s: when it was decided.
        blocks: blocks that are computed again.
        tier: the farthest tier that has them: `disk`.
        load_s: estimated seconds to load them; None: not known yet.
        compute_s: estimated seconds to compute them; None: not known yet.
        by_setting: `scheduler.load` is `never`, so that nothing was estimated.
    """

    at_s: float
    blocks: int
    tier: str
    load_s: float | None
    compute_s: float | None
    by_setting: bool = False


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. Times are seconds of the daemon's clock (`elapsed_s`), on which `arrival_s + x` is x seconds later.

    Attributes:
        id: of GENERATE `GenerateRequest.request_id`, or chosen: no other request of the tenant that runs has it. The
            calls that an engine makes for one of its requests share `client_id`; without one, a number is chosen.
        kind: what was asked for.
        tenant: the tenant's name.
        model: the model's name, or `UNKNOWN_MODEL`; for engines, the name of the namespace.
        method: `Generate`, `Acquire`, `Get`, `Reserve`, `Commit` or `Put`.
        arrival_s: when the call arrived.
        arrival_unix_s: the same moment as seconds since 1970, for people and spans.
        client_id: the caller's own id, from its header `prefixd-request-id`; empty without.
        trace: the caller's span; None without a valid header `traceparent`.
        sequences: how many sequences it asked for.
        prompt_tokens: of its prompt; 0 until it is tokenized.
        output_tokens: generated so far by sequences that have ended; of all of them at the end.
        found_tokens: by tier (`Tier`), prompt tokens in the cache when it arrived, by the nearest tier that had them.
        hit_tokens: by tier, the prompt tokens that it used from the cache, by the tier where they lay when it arrived
            (if they came later: where they lay at its turn). None if it never ran.
        blocks: blocks that an engine leased, reserved or committed.
        altered_blocks: blocks of its prefix of which it got bytes that a lossy codec has altered (`disk.codec`).
        handed_over_s: when the worker got it first; None before.
        first_token_s: its first token; None before.
        ended_s: None while it runs.
        outcome: empty while it runs, then `stop`, `length`, `cancelled`, `ok` (engines' calls), `refused` (by a limit,
            or for a wrong parameter: nothing ran) or `failed`.
        status: of `refused` and `failed`, the name of the gRPC status: `RESOURCE_EXHAUSTED`.
        reason: of `refused` and `failed`, the error's text.
        stages: where its time went, in the order of their starts; at most `MOST_STAGES`.
        left_out: number of stages that were not kept.
        waits: seconds in the queue before its first token, by what it waited for.
        later_waits: the same after its first token: it had been interrupted.
        missing: what its prompt lacked of the cache when it came; None if nothing.
        degraded: the parts of the daemon that were degraded when it came (`Troubles`).
        uncached: it ran without the cache, which is off, has no room for its namespace, or had damaged blocks.
        decisions: why cached blocks were not loaded; at most `MOST_NOTES`.
        preempted: how often it gave its memory to others.
        preempted_for: for whom, the first times; at most `MOST_NOTES`.
        restarts: how often its worker died or had no memory for it.
    """

    id: str = ""
    kind: Kind = Kind.GENERATE
    tenant: str = ""
    model: str = ""
    method: str = "Generate"
    arrival_s: float = 0.0
    arrival_unix_s: float = 0.0
    client_id: str = ""
    trace: TraceContext | None = None
    sequences: int = 1
    prompt_tokens: int = 0
    output_tokens: int = 0
    found_tokens: Sequence[int] = _NOTHING_FOUND
    hit_tokens: Sequence[int] | None = None
    blocks: int = 0
    altered_blocks: int = 0
    handed_over_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""
    status: str = ""
    reason: str = ""
    stages: list[Stage] = field(default_factory=list)
    left_out: int = 0
    waits: dict[Wait, float] = field(default_factory=dict)
    later_waits: dict[Wait, float] = field(default_factory=dict)
    missing: MissingBlocks | None = None
    degraded: tuple[str, ...] = ()
    uncached: bool = False
    decisions: tuple[LoadDecision, ...] = ()
    preempted: int = 0
    preempted_for: tuple[str, ...] = ()
    restarts: int = 0
    _waits_for: Wait | None = None
    _waits_since_s: float = 0.0
    _on_end: Callable[[RequestRecord], None] | None = None

    # -- stages ---------------------------------------------------------------------------------------------------

    def begin(self, name: StageName, now_s: float, **attributes: Value) -> Stage:
        """Begins a stage. Beyond `MOST_STAGES` it is counted and not kept."""
        stage = Stage(name, now_s, None, attributes)
        if len(self.stages) < MOST_STAGES:
            self.stages.append(stage)
        else:
            self.left_out += 1
        return stage

    def note(self, name: StageName, start_s: float, end_s: float, **attributes: Value) -> Stage:
        """Adds a stage that is over."""
        stage = self.begin(name, start_s, **attributes)
        stage.end_s = end_s
        return stage

    @contextmanager
    def timed(self, name: StageName, clock: Callable[[], float], **attributes: Value) -> Iterator[Stage]:
        """A context whose time is a stage."""
        stage = self.begin(name, clock(), **attributes)
        try:
            yield stage
        finally:
            stage.end(clock())

    def seconds(self, name: StageName) -> float:
        """Seconds of all ended stages of this name together."""
        return sum(
            stage.end_s - stage.start_s for stage in self.stages if stage.name is name and stage.end_s is not None
        )

    # -- waiting --------------------------------------------------------------------------------------------------

    def note_preempted_for(self, whom: str) -> None:
        """Notes for whom it gives its memory up."""
        if len(self.preempted_for) < MOST_NOTES:
            self.preempted_for += (whom,)

    def note_decision(self, decision: LoadDecision) -> None:
        """Adds a decision; beyond `MOST_NOTES` the oldest is forgotten."""
        self.decisions = (*self.decisions, decision)[-MOST_NOTES:]

    def wait_for(self, reason: Wait | None, now_s: float) -> None:
        """From now on the request waits for this; None: for nothing, since it runs."""
        before = self._waits_for
        if reason is before:
            return
        if before is not None:
            waits = self.waits if self.first_token_s is None else self.later_waits
            waits[before] = waits.get(before, 0.0) + now_s - self._waits_since_s
        self._waits_for, self._waits_since_s = reason, now_s

    def waits_until(self, now_s: float) -> dict[Wait, float]:
        """Seconds by what it waited for before its first token, with the present wait up to now."""
        if self._waits_for is None or self.first_token_s is not None:
            return self.waits
        lasts = self.waits.get(self._waits_for, 0.0) + now_s - self._waits_since_s
        return {**self.waits, self._waits_for: lasts}

    # -- the end --------------------------------------------------------------------------------------------------

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival to the first token; None without one."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float | None:
        """Seconds from the arrival to the first hand-over; None if it never ran."""
        return None if self.handed_over_s is None else self.handed_over_s - self.arrival_s

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache."""
        return 0 if self.hit_tokens is None else sum(self.hit_tokens)

    def end(self, outcome: str, now_s: float, *, status: str = "", reason: str = "") -> None:
        """The request has ended; the first call counts. The log's listeners are told."""
        if self.ended_s is not None:
            return
        self.wait_for(None, now_s)
        for stage in self.stages:
            stage.end(now_s)
        self.outcome, self.status, self.reason = outcome, status, reason[:LONGEST_REASON]
        self.ended_s = now_s
        if self._on_end is not None:
            self._on_end(self)
            self._on_end = None
