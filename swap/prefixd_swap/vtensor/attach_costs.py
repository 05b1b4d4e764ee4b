"""The measured costs of giving a request another request's prefix: by mapping it, or by copying it."""

from __future__ import annotations

_WEIGHT = 0.2  # of a new observation


class AttachCosts:
    """Measured seconds to map a block, and to copy its bytes on the device.

    Mapping costs a call of the driver for each chunk, and saves memory. A copy costs bandwidth and needs memory of its
    own, but no call where memory is still mapped from an ended request (vAttention, 6.2.2). The faster way depends on
    the device.
    """

    def __init__(self) -> None:
        self.map_s: float | None = None
        self.copy_s: float | None = None

    def observe_map(self, blocks: int, seconds: float) -> None:
        """Enter that mapping `blocks` blocks took `seconds`."""
        self.map_s = _moved(self.map_s, seconds / blocks)

    def observe_copy(self, blocks: int, seconds: float) -> None:
        """Enter that copying `blocks` blocks took `seconds`, until the device had finished."""
        self.copy_s = _moved(self.copy_s, seconds / blocks)

    def copy_pays(self, blocks: int, *, to_map: int, to_map_for_copy: int) -> bool:
        """Whether a copy attaches a prefix of `blocks` blocks faster. False while one of the costs is unknown.

        to_map: blocks to map if the prefix is shared.  to_map_for_copy: blocks to map for its copy.
        """
        if self.map_s is None or self.copy_s is None:
            return False
        return blocks * self.copy_s + to_map_for_copy * self.map_s < to_map * self.map_s


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
