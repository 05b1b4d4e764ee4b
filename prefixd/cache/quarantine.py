"""Slots into which a client may still be writing though its reservation has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefixd.cache.sessions import Process, Reservation
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

    Args:
        release: takes slots back.
    """

    def __init__(self, release: Callable[[Slots], None]) -> None:
        self._release = release
        self._kept: dict[str, _Kept] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the slots kept."""
        return sum(kept.nbytes for kept in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def slots(self) -> Iterator[int]:
        """The slots kept."""
        for kept in self._kept.values():
            yield from kept.slots.tolist()

    def keep(self, reservation: Reservation, slots: Slots, nbytes: int) -> None:
        """Keeps a reservation's slots, or takes them back at once where nobody can write into them."""
        processes = {process for process in reservation.session.processes if process.alive}
        if processes and len(slots) and not reservation.by_daemon:
            self._kept[reservation.id] = _Kept(slots, nbytes, processes)
            for process in processes:
                process.quarantined_bytes += nbytes
        else:
            self._release(slots)

    def acknowledge(self, reservation_id: str, processes: set[Process]) -> None:
        """Takes back the slots of a reservation whose holder, one of `processes`, says that it no longer writes."""
        kept = self._kept.get(reservation_id)
        if kept is not None and kept.processes & processes:
            del self._kept[reservation_id]
            for process in kept.processes:
                process.quarantined_bytes -= kept.nbytes
            self._release(kept.slots)

    def process_ended(self, process: Process) -> None:
        """Takes back what only `process` could still write into."""
        for reservation_id, kept in list(self._kept.items()):
            kept.processes.discard(process)
            if not kept.processes:
                del self._kept[reservation_id]
                self._release(kept.slots)
