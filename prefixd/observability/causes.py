"""Names the main cause of a late first token, from a request's record and what was found out about it. Pure.

The time until the first token is divided among what it was spent on; the largest share is the main one. If it was
spent on computing, the cause is why there was so much to compute: the reason why the tokens were not loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prefixd.base.tiers import Tier
from prefixd.observability.eviction_journal import Reason, Removal
from prefixd.observability.explanations import Findings
from prefixd.observability.request_record import Kind, RequestRecord, StageName, Wait


class Cause(StrEnum):
    """A main cause."""

    RECEIVED = "received_slowly"
    MODEL = "model_loading"
    TOKENIZED = "tokenizing"
    IMAGES = "images"
    STORE_LOOKUP = "store_lookup"
    BEHIND = "behind_others"
    PLACES = "no_place"
    TENANT = "tenant_limit"
    MEMORY = "no_memory"
    OTHER = "computed_by_other"
    PREEMPTED = "preempted"
    WORKER = "no_worker"
    LOAD = "slow_load"
    RESERVE = "slow_store"
    SENT = "slow_client"
    NEW = "never_seen"
    DIFFERS = "differs"
    EVICTED = "evicted"
    OPERATOR = "evicted_by_operator"
    DAMAGED = "damaged"
    NAMESPACE = "other_namespace"
    NOT_LOADED = "computing_faster"
    LOAD_FAILED = "load_failed"
    UNCACHED = "cache_not_used"
    DEGRADED = "tier_degraded"
    REST = "all_cached"
    SHORT = "prompt_too_short"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The main cause.

    Attributes:
        cause: its name.
        sentence: one sentence for a person.
        seconds: time that it took.
        total_s: time until the first token, or until the end without one.
    """

    cause: Cause
    sentence: str
    seconds: float
    total_s: float


_STAGES = {
    StageName.RECEIVE: (Cause.RECEIVED, "the call's message arrived"),
    StageName.MODEL: (Cause.MODEL, "the model was loading"),
    StageName.TOKENIZE: (Cause.TOKENIZED, "its text was tokenized"),
    StageName.IMAGES: (Cause.IMAGES, "its images were decoded"),
    StageName.STORE_LOOKUP: (Cause.STORE_LOOKUP, "the shared store was asked for the prompt"),
    StageName.RESERVE: (Cause.RESERVE, "it waited for room"),
    StageName.COMMIT: (Cause.RESERVE, "its blocks were entered"),
    StageName.FILL: (Cause.SENT, "its bytes came from the client"),
    StageName.SEND: (Cause.SENT, "its bytes went to the client"),
}
_WAITS = {
    Wait.BEHIND: (Cause.BEHIND, "other requests were before it in the queue"),
    Wait.PLACES: (Cause.PLACES, "as many requests ran as may (worker.max_running)"),
    Wait.TENANT: (Cause.TENANT, "its tenant's limit, or places kept for other tenants, held it back"),
    Wait.MEMORY: (Cause.MEMORY, "the GPU tier had no room for it"),
    Wait.OTHER: (Cause.OTHER, "another request computed the same prefix"),
    Wait.PREEMPTED: (Cause.PREEMPTED, "it had given its memory to others"),
    Wait.WORKER: (Cause.WORKER, "there was no worker"),
}


def judge(record: RequestRecord, findings: Findings, now_s: float) -> Verdict:
    """Names the main cause. `now_s`: for a request that runs still."""
    end_s = record.first_token_s or record.ended_s or now_s
    total_s = end_s - record.arrival_s
    if record.outcome in ("refused", "failed") and record.first_token_s is None:
        cause = Cause.REFUSED if record.outcome == "refused" else Cause.FAILED
        return Verdict(cause, f"The request was {record.outcome}: {record.reason}.", total_s, total_s)
    shares: dict[tuple[Cause, str], float] = {}
    for stage in record.stages:
        if (known := _STAGES.get(stage.name)) is not None and stage.start_s < end_s:
            shares[known] = shares.get(known, 0.0) + min(stage.end_s or end_s, end_s) - stage.start_s
    for wait, seconds in record.waits_until(now_s).items():
        if wait in _WAITS:
            shares[_WAITS[wait]] = min(seconds, total_s)
    if (load_s := _loading_s(record, end_s, now_s)) > 0:
        shares[Cause.LOAD, _load_text(record)] = load_s
    if (prefill_s := _prefill_s(record, end_s)) > 0 or not shares:
        shares[_why_computed(record, findings)] = prefill_s
    (cause, text), seconds = max(shares.items(), key=lambda share: share[1])
    return Verdict(cause, _sentence(record, text, seconds, total_s), seconds, total_s)


def _sentence(record: RequestRecord, text: str, seconds: float, total_s: float) -> str:
    what = "first token" if record.kind is Kind.GENERATE else "answer"
    if record.first_token_s is None and record.ended_s is None:
        return f"It has waited for {_seconds(total_s)}, {_seconds(seconds)} of it because {text}."
    if record.first_token_s is None and record.kind is Kind.GENERATE:
        return f"It ended after {_seconds(total_s)} without a token; {_seconds(seconds)} of that because {text}."
    share = seconds / total_s if total_s > 0 else 0.0
    return f"The {what} came after {_seconds(total_s)}, {share:.0%} of that because {text}."


# -- loading ------------------------------------------------------------------------------------------------------


def _loading_s(record: RequestRecord, end_s: float, now_s: float) -> float:
    """Seconds in which the request waited for blocks on their way; of an engine's call, all seconds of its load."""
    if record.kind is Kind.GENERATE:
        return record.waits_until(now_s).get(Wait.LOAD, 0.0)
    loads = (stage for stage in record.stages if stage.name is StageName.LOAD)
    return sum(min(stage.end_s or end_s, end_s) - stage.start_s for stage in loads)


def _load_text(record: RequestRecord) -> str:
    loads = [stage for stage in record.stages if stage.name is StageName.LOAD]
    if not loads:
        return "its cached blocks were on their way"
    nbytes = sum(int(stage.attributes.get("bytes", 0)) for stage in loads)
    tiers = sorted({str(stage.attributes.get("tier", "")) for stage in loads})
    return f"{nbytes:,} bytes of cached blocks were loaded from {' and '.join(tiers)}"


def _prefill_s(record: RequestRecord, end_s: float) -> float:
    stages = (stage for stage in record.stages if stage.name is StageName.PREFILL and stage.start_s < end_s)
    return sum(min(stage.end_s or end_s, end_s) - stage.start_s for stage in stages)


# -- computing ----------------------------------------------------------------------------------------------------


def _why_computed(record: RequestRecord, findings: Findings) -> tuple[Cause, str]:
    """Why so much of the prompt was computed."""
    tokens, found = record.prompt_tokens, sum(record.found_tokens)
    computed = max(tokens - record.cached_tokens, 0)
    there = f"{computed:,} of its {tokens:,} tokens were not cached: "
    if record.uncached:
        return Cause.UNCACHED, f"all {tokens:,} tokens were computed: the cache was not used for it"
    missing = record.missing
    if found - record.cached_tokens > tokens - found:
        return _why_not_loaded(record, findings, found - record.cached_tokens)
    if missing is None and not found and tokens and record.kind is not Kind.STORE:
        return Cause.SHORT, (
            f"none of its {tokens:,} tokens can be cached: the cache has whole blocks, and it is no longer than one"
        )
    if missing is None:
        behind = "1 token" if computed == 1 else f"{computed:,} tokens"
        verb = "is" if computed == 1 else "are"
        return Cause.REST, f"{behind} behind the last whole cached block {verb} always computed"
    if findings.evicted:
        return _eviction(findings.evicted[0].removal, there, record.arrival_s)
    if findings.elsewhere is not None:
        other = findings.elsewhere
        return Cause.NAMESPACE, (
            f"{there}the prompt is cached for another {' and '.join(other.differs)} (namespace {other.name} of tenant "
            f"{other.tenant}), and those share no blocks"
        )
    if (differs := findings.difference) is not None and (missing.found or 2 * differs.equal >= differs.compared):
        return Cause.DIFFERS, (
            f"{there}token {differs.token:,} is {differs.actual}, and {differs.expected} in the nearest cached prefix"
        )
    if any("tier" in part for part in record.degraded):
        return Cause.DEGRADED, f"{there}the {' and the '.join(record.degraded)} was degraded"
    if missing.found:
        return Cause.NEW, f"{there}nothing behind its first {missing.found * missing.block_tokens:,} tokens was cached"
    return Cause.NEW, f"{there}no prompt with this beginning was cached"


def _eviction(removal: Removal, there: str, arrival_s: float) -> tuple[Cause, str]:
    """The cause and the text for missing blocks that left the cache."""
    cause, when = removal.cause, f"{_seconds(max(arrival_s - removal.at_s, 0.0))} before it came"
    tier = Tier(removal.tier).label
    if cause.reason is Reason.OPERATOR:
        return Cause.OPERATOR, f"{there}an operator evicted them {when} (prefixd evict)"
    if cause.reason in (Reason.DAMAGED, Reason.REFUSED):
        return Cause.DAMAGED, f"{there}their bytes were found damaged in the {tier} tier {when}, and dropped"
    whom = f" for tenant {cause.tenant}" if cause.tenant else ""
    by = f", by {cause.by}" if cause.by else ""
    why = {
        Reason.ROOM: f"they were evicted from the {tier} tier{whom}, which needed room{by}",
        Reason.QUOTA: f"they were evicted from the {tier} tier because tenant {cause.tenant} was at its most{by}",
        Reason.NAMESPACES: "their namespace was forgotten, as the memory of namespaces was full",
        Reason.RESIZE: f"they left the {tier} tier as the GPU tier shrank{by}",
        Reason.PREEMPTION: "a preempted request gave their memory away",
        Reason.SHARED: "the shared store does not have them any more",
    }
    return Cause.EVICTED, f"{there}{why.get(cause.reason, f'they left the {tier} tier{by}')} {when}"


def _why_not_loaded(record: RequestRecord, findings: Findings, tokens: int) -> tuple[Cause, str]:
    """Why blocks that were found were not loaded."""
    there = f"{tokens:,} cached tokens were computed again: "
    failed = any(
        stage.name is StageName.LOAD and stage.attributes.get("outcome") == "failed" for stage in record.stages
    )
    if (removal := findings.failed_load) is not None and removal.cause.reason is Reason.DAMAGED:
        found_in = Tier(removal.tier).label
        return Cause.DAMAGED, f"{there}their bytes were found damaged in the {found_in} tier when they were loaded"
    for stage in record.stages:
        if stage.name is StageName.LOAD and stage.attributes.get("outcome") == "given_up":
            tier, arrived = stage.attributes.get("tier"), stage.attributes.get("arrived_blocks", 0)
            return Cause.NOT_LOADED, (
                f"{there}their load from {tier} was given up after {arrived} blocks, as computing the rest was faster"
            )
    if failed:
        return Cause.LOAD_FAILED, f"{there}their load failed; the daemon's log says why"
    if record.decisions:
        last = record.decisions[-1]
        if last.by_setting:
            return Cause.NOT_LOADED, f"{there}scheduler.load = never"
        if last.load_s is not None and last.compute_s is not None:
            return Cause.NOT_LOADED, (
                f"{there}loading them from {last.tier} was expected to take {_seconds(last.load_s)}, and computing "
                f"{_seconds(last.compute_s)}"
            )
        return Cause.NOT_LOADED, f"{there}computing them was expected to be faster than loading from {last.tier}"
    return Cause.EVICTED, f"{there}they left the cache while it waited"


def _seconds(value: float) -> str:
    """0.00042: `0.4 ms`; 12.3: `12.3 s`."""
    if value < 0.1:
        return f"{value * 1000:.1f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:,.1f} s"
