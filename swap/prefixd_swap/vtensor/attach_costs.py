"""What it costs to give a request a prefix that another one has: by mapping it, or by copying it."""

from __future__ import annotations

_WEIGHT = 0.2  # of a new observation


class AttachCosts:
    """Seconds a block, measured: the mapping of a block, and the copy of its bytes on the device.

    Mapping costs a driver's call a chunk and saves memory. A copy costs bandwidth and needs memory of its own, but no
    call where that is mapped already, as it is where a request has ended (vAttention, 6.2.2). Which one is faster
    depends on the device, so it is measured.
    """

    def __init__(self) -> None:
        self.map_s: float | None = None
        self.copy_s: float | None = None

    def observe_map(self, blocks: int, seconds: float) -> None:
        """`blocks` blocks were mapped at once."""
        self.map_s = _moved(self.map_s, seconds / blocks)

    def observe_copy(self, blocks: int, seconds: float) -> None:
        """`blocks` blocks were copied, and the device was waited for."""
        self.copy_s = _moved(self.copy_s, seconds / blocks)

    def copy_pays(self, blocks: int, *, to_map: int, to_map_for_copy: int) -> bool:
        """Whether a prefix of `blocks` blocks is attached faster by a copy.

        to_map: blocks that are to be mapped to share it; to_map_for_copy: those that its copy lacks memory for. False
        as long as one of the costs is unknown.
        """
        if self.map_s is None or self.copy_s is None:
            return False
        return blocks * self.copy_s + to_map_for_copy * self.map_s < to_map * self.map_s


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
