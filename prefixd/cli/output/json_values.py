"""Prints answers as JSON, for programs."""

from __future__ import annotations

import json
from typing import Any

from prefixd.base.plain_messages import to_plain

__all__ = ["print_json", "print_json_line", "to_plain"]


def print_json(value: Any) -> None:
    """Prints one JSON document."""
    print(json.dumps(value, indent=2, default=str))


def print_json_line(value: Any) -> None:
    """Prints one line of JSON and flushes it."""
    print(json.dumps(value, default=str), flush=True)
