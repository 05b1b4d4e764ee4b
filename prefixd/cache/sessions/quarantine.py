"""Slots into which a client may still be writing though its reservation has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from prefixd.cache.sessions.sessions import Process, Reservation
from prefixd.cache.tiers import Slots


@dataclass(frozen=True, slots=True)
class _Kept:
    slots: Slots
    nbytes: int
    processes: set[Process]


class Quarantine:
    """Keeps the slots of reservations that ended without their holders' word.

    Such a reservation expired, or its session's stream broke; but its client, if it lives, has the arena mapped and may
    be in the middle of a copy into the slots. A mapping cannot be taken back. So the slots are given to nobody until
    the client says that it no longer writes, or until every process that had the arena through that session has ended.
    A session through which no process has it gets no reservation: its client could write through another's mapping.

    Args:
        release: takes slots back.
    """

    def __init__(self, release: Callable[[Slots], None]) -> None:
        self._release = release
        self._kept: dict[str, _Kept] = {}  # by reservation
        self._of: dict[Process, set[str]] = {}  # by process, the reservations whose slots wait for its end
        self.nbytes = 0
        """Bytes of the slots kept."""

    def __len__(self) -> int:
        return len(self._kept)

    def slots(self) -> Iterator[int]:
        """The slots kept."""
        for kept in self._kept.values():
            yield from kept.slots.tolist()

    def keep(self, reservation: Reservation, slots: Slots, nbytes: int) -> None:
        """Keeps a reservation's slots, or takes them back at once where nobody can write into them."""
        processes = {process for process in reservation.session.processes if process.alive}
        if not processes or not len(slots) or reservation.by_daemon:
            self._release(slots)
            return
        self._kept[reservation.id] = _Kept(slots, nbytes, processes)
        self.nbytes += nbytes
        for process in processes:
            process.quarantined_bytes += nbytes
            self._of.setdefault(process, set()).add(reservation.id)

    def acknowledge(self, reservation_id: str, processes: set[Process]) -> None:
        """Takes back the slots of a reservation whose holder, one of `processes`, says that it no longer writes."""
        kept = self._kept.get(reservation_id)
        if kept is not None and kept.processes & processes:
            self._release(self._forget(reservation_id))

    def process_ended(self, process: Process) -> None:
        """Takes back what only `process` could still write into."""
        freed: list[Slots] = []
        for reservation_id in self._of.pop(process, ()):
            kept = self._kept[reservation_id]
            kept.processes.remove(process)
            if not kept.processes:
                freed.append(self._forget(reservation_id))
        if freed:
            self._release(np.concatenate(freed))

    def _forget(self, reservation_id: str) -> Slots:
        kept = self._kept.pop(reservation_id)
        self.nbytes -= kept.nbytes
        for process in kept.processes:
            process.quarantined_bytes -= kept.nbytes
            waiting = self._of[process]
            waiting.remove(reservation_id)
            if not waiting:
                del self._of[process]
        return kept.slots
