"""Layers of the loads that the engine's step computes on: each is waited for by itself, on a GPU in its stream."""

from __future__ import annotations

import threading
from collections.abc import Callable

from prefixd_swap import StreamMark


class LayerArrivals:
    """The layers that have come, of loads by request. The engine's thread waits, others tell.

    Args:
        layers: of the model. The last one counts when its load has ended, and with that is proved to be right.
    """

    def __init__(self, layers: int) -> None:
        self._last = layers - 1
        self._changed = threading.Condition()
        self._there: dict[str, int] = {}
        self._marks: dict[tuple[str, int], StreamMark] = {}

    def begin(self, request_id: str) -> None:
        """Adds a load of which nothing has come."""
        with self._changed:
            self._there[request_id] = 0

    def add(self, request_id: str, layer: int, mark: StreamMark | None = None) -> None:
        """Layer `layer` of a load has come; with `mark` it is there for what runs behind the mark."""
        with self._changed:
            if layer < self._last and request_id in self._there:
                self._there[request_id] = layer + 1
                if mark is not None:
                    self._marks[request_id, layer] = mark
                self._changed.notify_all()

    def end(self, request_id: str) -> None:
        """Removes a load that has ended, whether its bytes have come or not."""
        with self._changed:
            self._there.pop(request_id, None)
            for key in [key for key in self._marks if key[0] == request_id]:
                del self._marks[key]
            self._changed.notify_all()

    def wait_for(self, layer: int, hold: Callable[[StreamMark], None]) -> None:
        """Waits until every load has the layer or has ended; calls `hold` with the marks in front of the layer."""
        with self._changed:
            self._changed.wait_for(lambda: all(there > layer for there in self._there.values()))
            marks = [mark for (_, of), mark in self._marks.items() if of == layer]
        for mark in marks:
            hold(mark)

    def wait_for_all(self) -> None:
        """Waits until every load has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._there)
