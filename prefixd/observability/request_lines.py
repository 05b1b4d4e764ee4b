"""A line of the log for each request that has ended, at the level debug. It has no text and no token of a prompt."""

from __future__ import annotations

import logging

from prefixd.base.tiers import Tier
from prefixd.observability.request_record import Kind, RequestRecord, Value

log = logging.getLogger(__name__)


def log_request(record: RequestRecord) -> None:
    """Logs a record that has ended; a listener of `RequestLog.ended`."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "request %s: %s", record.id, _line(record), extra={"request_id": record.id, "fields": _fields(record)}
        )


def _line(record: RequestRecord) -> str:
    """`Generate of tenant acme, llama: stop after 0.61 s; 78 prompt tokens, 64 cached (gpu 64); ...`."""
    parts = [f"{record.outcome} after {_seconds(record):.3f} s"]
    if record.reason:
        parts.append(f"{record.status}: {record.reason}")
    found = ", ".join(f"{tier.label} {tokens}" for tier, tokens in _by_tier(record))
    parts.append(
        f"{record.prompt_tokens} prompt tokens, {record.cached_tokens} cached" + (f" ({found})" if found else "")
    )
    if record.kind is Kind.GENERATE:
        if record.queue_s is not None:
            parts.append(f"queued for {record.queue_s:.3f} s")
        if record.ttft_s is not None:
            parts.append(f"first token after {record.ttft_s:.3f} s")
        parts.append(f"{record.output_tokens} tokens generated")
    else:
        parts.append(f"{record.blocks} blocks")
    return f"{record.method} of tenant {record.tenant}, {record.model or 'no model'}: {'; '.join(parts)}"


def _fields(record: RequestRecord) -> dict[str, Value]:
    """The same as fields of JSON; times in seconds from the arrival."""
    fields: dict[str, Value | None] = {
        "kind": record.kind.value,
        "method": record.method,
        "tenant": record.tenant,
        "model": record.model,
        "outcome": record.outcome,
        "status": record.status or None,
        "reason": record.reason or None,
        "client_id": record.client_id or None,
        "trace_id": None if record.trace is None else record.trace.trace_id,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        **{f"cached_tokens_{tier.label}": tokens for tier, tokens in _by_tier(record)},
        "output_tokens": record.output_tokens,
        "blocks": record.blocks or None,
        "queue_s": record.queue_s,
        "ttft_s": record.ttft_s,
        "seconds": _seconds(record),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _seconds(record: RequestRecord) -> float:
    return 0.0 if record.ended_s is None else record.ended_s - record.arrival_s


def _by_tier(record: RequestRecord) -> list[tuple[Tier, int]]:
    hits = record.hit_tokens or []
    return [(tier, tokens) for tier, tokens in zip(Tier, hits, strict=False) if tokens]
