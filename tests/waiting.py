"""Waiting, with a deadline, for what another thread or process brings about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

WAIT_S = 60.0
"""Far beyond what is waited for, on a busy machine too."""


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str] = "it", seconds: float = WAIT_S) -> Any:
    """Returns the first true value of `condition`; fails with `what`, or what `what` returns then."""
    deadline_s = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {seconds:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.01)
    return value


async def until(condition: Callable[[], Any], seconds: float = WAIT_S) -> None:
    """Lets the loop run until `condition` holds; each turn waits for what the threads have reported."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {seconds:g} s"
        await asyncio.sleep(0.001)
