"""Prints why requests took their time: a sentence, a waterfall of the stages, and what was missing in the cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from prefixd.base.sizes import as_size
from prefixd.cli.output.tables.grid import console, duration, table, tier_name
from prefixd.cli.output.terminal import cleaned
from prefixd.v1 import admin_pb2 as pb

_BAR = 28
_HIDDEN = ("receive", "model", "store_lookup")
_HIDDEN_S = 0.0005
"""These stages are left out if they took no time to speak of: most requests do not wait there."""
_NARROW = 76  # columns of a terminal, below which the bars are left out
_WAITS = {
    "behind": "behind other requests",
    "places": "all places taken (worker.max_running)",
    "tenant": "limit of its tenant, or places kept for others",
    "memory": "no room in the GPU tier",
    "load": "its blocks on their way",
    "other": "another request computes the same prefix",
    "preempted": "gave its memory to others",
    "worker": "no worker",
}
_REASONS = {
    "room": "room was needed",
    "quota": "its tenant was at its most",
    "operator": "prefixd evict",
    "namespaces": "the memory of namespaces was full",
    "damaged": "damaged bytes",
    "refused": "logits were not finite with it",
    "preemption": "a request was preempted",
    "resize": "the GPU tier shrank",
    "shared": "the shared store dropped it",
    "other": "other",
}


def print_requests(requests: Sequence[pb.RequestInfo]) -> None:
    """Prints each request with its waterfall."""
    for number, request in enumerate(requests):
        if number:
            print()
        print_request(cleaned(request))


def print_request_list(requests: Sequence[pb.RequestInfo]) -> None:
    """Prints a line for each request: how late its first token was, and the main cause."""
    if not requests:
        print(
            "no request is remembered: none came since the daemon's start, or server.request_records is 0; engines' "
            "calls are listed with --calls"
        )
        return
    numbers = ("first token", "cached", "of")
    made = table("request", "tenant", *numbers, "outcome", "why", right=numbers)
    for request in map(cleaned, requests):
        has_token = request.HasField("first_token_s")
        late_s = request.first_token_s if has_token else request.ended_s  # engines' calls have no token
        known = has_token or (request.HasField("ended_s") and request.kind != "generate")
        made.add_row(
            Text(request.id),
            Text(request.tenant),
            _seconds(late_s) if known else "-",
            f"{sum(each.tokens for each in request.used):,}",
            f"{request.prompt_tokens:,}",
            request.outcome or "runs",
            request.cause.replace("_", " "),
        )
    console().print(made)


def print_request(request: pb.RequestInfo) -> None:
    """Prints one request."""
    out = console()
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(request.arrived_unix_s))
    names = f" ({request.client_id})" if request.client_id and request.client_id != request.id else ""
    title = f"{request.method} {request.id}{names}"
    out.print(Text(title, style="bold"))
    where = f"tenant {request.tenant}" + (f", {request.model}" if request.model else "")
    out.print(Text(f"{where}, {at}, {duration(request.age_s)} ago, {request.outcome or 'it still runs'}", style="dim"))
    out.print(Text(request.sentence))
    if request.trace_id:
        out.print(Text(f"trace {request.trace_id}", style="dim"))
    out.print()
    _print_stages(out, request)
    out.print()
    for line in _lines(request):
        out.print(Text(line))


def _print_stages(out: Console, request: pb.RequestInfo) -> None:
    ends = [stage.end_s for stage in request.stages if stage.HasField("end_s")]
    total_s = max([request.ended_s if request.HasField("ended_s") else request.age_s, *ends, 1e-9])
    narrow = out.width < _NARROW
    columns = ["stage", "from", "for", *([] if narrow else [""]), ""]
    made = table(*columns, right=("from", "for"), fold=("",))
    for stage in request.stages:
        if stage.name in _HIDDEN and stage.HasField("end_s") and stage.end_s - stage.start_s < _HIDDEN_S:
            continue
        end_s = stage.end_s if stage.HasField("end_s") else total_s
        bar = [] if narrow else [Text(_bar(stage.start_s, end_s, total_s))]
        made.add_row(stage.name, _seconds(stage.start_s), _seconds(end_s - stage.start_s), *bar, Text(_details(stage)))
    out.print(made)
    if request.stages_left_out:
        out.print(f"{request.stages_left_out:,} more stages were not kept")


def _bar(start_s: float, end_s: float, total_s: float) -> str:
    first = min(int(start_s / total_s * _BAR), _BAR - 1)
    last = min(max(int(end_s / total_s * _BAR), first + 1), _BAR)
    return " " * first + "#" * (last - first) + " " * (_BAR - last)


def _details(stage: pb.StageInfo) -> str:
    given = dict(stage.attributes)
    if "bytes" in given:
        given["bytes"] = as_size(int(given["bytes"]))
    return " ".join(f"{name}={value}" for name, value in sorted(given.items()))


def _lines(request: pb.RequestInfo) -> Iterator[str]:
    """What was cached, what was missing, and why it waited."""
    if request.prompt_tokens:
        yield f"prompt      {request.prompt_tokens:,} tokens, {request.output_tokens:,} generated"
        yield f"cached      {_tiers(request.found)} when it came; used: {_tiers(request.used)}"
    if request.altered_blocks:
        yield f"altered     {request.altered_blocks:,} blocks were loaded from copies that a lossy codec has altered"
    if request.HasField("missing"):
        yield from _missing(request.missing)
    for decision in request.decisions:
        yield f"not loaded  {decision.blocks:,} blocks in {tier_name(decision.tier)}: {_estimates(decision)}"
    for wait in request.waits:
        if wait.seconds >= 0.0005:
            when = " after its first token" if wait.later else ""
            yield f"waited      {_seconds(wait.seconds)}{when}: {_WAITS.get(wait.reason, wait.reason)}"
    if request.preempted:
        whom = f", for {'; '.join(request.preempted_for)}" if request.preempted_for else ""
        yield f"preempted   {request.preempted:,} times{whom}"
    if request.restarts:
        yield f"restarted   {request.restarts:,} times, since its worker died or had no memory for it"
    if request.degraded:
        yield f"degraded    {', '.join(request.degraded)} when it came"


def _missing(missing: pb.MissingInfo) -> Iterator[str]:
    count, each = missing.missing_blocks, missing.block_tokens
    blocks = "1 block" if count == 1 else f"{count:,} blocks"
    yield f"missing     {blocks} of {each} tokens, from token {missing.found_blocks * each:,} on"
    if missing.HasField("difference"):
        differs = missing.difference
        actual = _token(differs.actual_id, differs.actual_text)
        expected = _token(differs.expected_id, differs.expected_text)
        yield (
            f"differs     token {differs.token:,} (block {differs.block:,}) is {actual}, and {expected} in the nearest "
            "cached prefix; "
            f"{differs.equal_tokens} of the block's {differs.compared_tokens} tokens are equal"
        )
    for eviction in missing.evictions:
        whom = f" for tenant {eviction.tenant}" if eviction.tenant else ""
        by = f", by {eviction.by}" if eviction.by else ""
        yield (
            f"evicted     {eviction.blocks:,} of {missing.looked_for:,} looked for, {duration(eviction.before_s)} "
            f"before, from {tier_name(eviction.tier)}: {_REASONS.get(eviction.reason, eviction.reason)}{whom}{by}"
        )
    if missing.other_namespace:
        differs_in = " and ".join(missing.other_differs)
        yield (
            f"elsewhere   namespace {missing.other_namespace} of tenant {missing.other_tenant} has its first block; it "
            f"differs in {differs_in}"
        )


def _token(identity: int, text: str) -> str:
    return f"{identity} '{text}'" if text else str(identity)


def _tiers(found: Iterable[pb.TierTokens]) -> str:
    return ", ".join(f"{each.tokens:,} in {tier_name(each.tier)}" for each in found) or "nothing"


def _estimates(decision: pb.LoadDecision) -> str:
    if decision.by_setting:
        return "scheduler.load = never"
    load = _seconds(decision.load_s) if decision.HasField("load_s") else "unknown"
    compute = _seconds(decision.compute_s) if decision.HasField("compute_s") else "unknown"
    return f"loading was estimated at {load}, computing at {compute}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
