"""The last requests as JSON, for the page: what each asked for, found and got, without its tokens."""

from __future__ import annotations

from typing import Any

from prefixd.observability.request_log import RequestLog
from prefixd.observability.request_record import RequestRecord

MOST = 100
"""The most requests of one answer."""


def recent_requests(log: RequestLog, last: int) -> dict[str, Any]:
    """Returns the last requests, the latest first, `MOST` at most. Times are seconds from the request's arrival."""
    return {"requests": [_plain(record) for record in log.last(min(max(last, 0), MOST))]}


def _plain(record: RequestRecord) -> dict[str, Any]:
    ended_s = None if record.ended_s is None else record.ended_s - record.arrival_s
    return {
        "id": record.id,
        "kind": str(record.kind),
        "method": record.method,
        "tenant": record.tenant,
        "model": record.model,
        "arrival_unix_s": record.arrival_unix_s,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "found_tokens": record.found_tokens,
        "hit_tokens": record.hit_tokens,
        "queue_s": record.queue_s,
        "first_token_s": record.ttft_s,
        "ended_s": ended_s,
        "outcome": record.outcome,
    }
