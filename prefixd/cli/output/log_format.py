"""How the daemon's log is written: a line for people, or a JSON object a line for programs.

A record about a request has its id as `request_id`: `log.info(..., extra={"request_id": request.name})`, or by itself
what is logged while a request acts (`acting`). Its `fields` are further figures, which only JSON has.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from prefixd.cli.output.terminal import LogFormatter
from prefixd.observability.actor import current_request

_OURS = ("prefixd", "prefixd_swap", "prefixd_scheduler")
TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    r"""Writes each record as one line of JSON.

    `{"time": "2026-11-30T07:00:00.123Z", "level": "info", "logger": "prefixd.server.daemon", "message": "..."}`, and
    where there are any `request_id`, the record's `fields`, and `exception` with the traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Formats the record; JSON escapes whatever is in it."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", current_request()):
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(level: str, format: str) -> None:
    """Makes all loggers write to stderr: records of this level ("info") or above, as "text" or as "json".

    "debug" is for prefixd's own loggers: gRPC's alone would write a hundred lines at the start.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else LogFormatter(TEXT))
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(number)
