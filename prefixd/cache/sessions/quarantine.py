"""Quarantine for slots of ended reservations into which a client may still be writing."""

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
    """Keeps the slots of reservations that ended without a message from their holders.

    Such a reservation expired, or its session's stream broke. Its client may still have the arena mapped and copy bytes
    into the slots; the daemon cannot undo a mapping. So the slots are not used again until the client says that it no
    longer writes, or until every process that mapped the arena for that session has ended. A session without such a
    process gets no reservation, since its client could write through the mapping of another session.

    Args:
        release: frees slots.
    """

    def __init__(self, release: Callable[[Slots], None]) -> None:
        self._release = release
        self._kept: dict[str, _Kept] = {}  # by reservation id
        self._of: dict[Process, set[str]] = {}  # process -> reservations whose slots wait for its end
        self.nbytes = 0
        """Bytes of the slots kept."""

    def __len__(self) -> int:
        return len(self._kept)

    def slots(self) -> Iterator[int]:
        """The slots kept."""
        for kept in self._kept.values():
            yield from kept.slots.tolist()

    def keep(self, reservation: Reservation, slots: Slots, nbytes: int) -> None:
        """Keeps a reservation's slots, or frees them at once if no client can write into them."""
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
        """Frees the slots of a reservation after its holder, one of `processes`, says that it no longer writes."""
        kept = self._kept.get(reservation_id)
        if kept is not None and kept.processes & processes:
            self._release(self._forget(reservation_id))

    def process_ended(self, process: Process) -> None:
        """Frees the slots that only `process` could still write into."""
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
