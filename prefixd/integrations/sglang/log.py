"""The backend's logger, below SGLang's own, and a limit of one warning of a kind a minute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("sglang.prefixd")

_EVERY_S = 60.0
_KINDS = 256


class RareWarnings:
    """Logs a warning of a kind once a minute: three threads repeat a failing call again and again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}

    def warn(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Logs `text` unless a warning of this kind was logged within the last minute."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._said.get(kind, -_EVERY_S) < _EVERY_S:
                return
            if len(self._said) >= _KINDS:
                self._said.clear()
            self._said[kind] = now_s
        log.warning("prefixd: %s", text, exc_info=error)
