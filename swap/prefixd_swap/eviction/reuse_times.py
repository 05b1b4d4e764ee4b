"""Learns after how many idle seconds blocks are used again."""

from __future__ import annotations

from math import log2

import numpy as np
import numpy.typing as npt

from prefixd_swap.eviction.policy import Scores

_STEPS_PER_OCTAVE = 6
_BINS = 128  # of idle times: up to 2**21 s, 25 days
_LEARNED_AT = 2048  # uses between two updates of the values; the first updates come sooner
_FORGET = 0.98  # factor on older counts at each update: uses of 100,000 uses ago count a third
_PRIOR = 20.0  # a class with 20 blocks weighs its own counts as much as the counts of all classes
_END_S = 2.0 ** (np.arange(_BINS + 1) / _STEPS_PER_OCTAVE) - 1  # borders of the bins


class ReuseTimes:
    """The likelihood that an idle block is used soon, by its class.

    It counts the blocks of each class, and the seconds until their next use. The value of an idle time is the best rate
    of uses that keeping the block from now on can have, over all times T at which it might be given up:

        value(idle) = max over T > idle of  P(used before T) / E[seconds until the use, or until T]

    This is the Gittins index of an item whose next use has a known distribution (compare LHD, Beckmann et al., NSDI
    '18, which takes the mean instead of the maximum). It is useful for chat: people read and think for a minute, so a
    block that was just used is not needed yet, one used 2 minutes ago is, and one used an hour ago is not any more.

    An update of the values takes a millisecond, every 2,048 uses.

    Args:
        classes: number of classes.
    """

    def __init__(self, classes: int) -> None:
        self._uses = np.zeros((classes, _BINS))
        self._blocks = np.zeros(classes)
        self._uses_since_update = 0
        self._update_at = 64
        # Until the first update, the last used block has the highest value: LRU.
        self._values: Scores = np.tile(1.0 / (1.0 + _END_S[:-1]), (classes, 1))

    def began(self, classes: npt.NDArray[np.int64]) -> None:
        """Blocks of these classes were used now, and begin to wait for their next use."""
        np.add.at(self._blocks, classes, 1.0)
        self._uses_since_update += len(classes)
        if self._uses_since_update >= self._update_at:
            self._update_values()

    def ended(self, classes: npt.NDArray[np.int64], idle_s: Scores) -> None:
        """Blocks of these classes were used again after `idle_s` seconds."""
        np.add.at(self._uses, (classes, _bins(idle_s).astype(np.int64)), 1.0)

    def values(self, classes: npt.NDArray[np.int64], idle_s: Scores) -> Scores:
        """Expected uses a second of blocks of these classes that have been idle for `idle_s` seconds."""
        places = _bins(idle_s)
        lower = places.astype(np.int64)
        here: Scores = self._values[classes, lower]
        return here + (self._values[classes, lower + 1] - here) * (places - lower)

    def value(self, block_class: int, idle_s: float) -> float:
        """`values` of one block."""
        place = min(log2(max(idle_s, 0.0) + 1.0) * _STEPS_PER_OCTAVE, _BINS - 2.0)
        lower = int(place)
        here = self._values.item(block_class, lower)
        return here + (self._values.item(block_class, lower + 1) - here) * (place - lower)

    def _update_values(self) -> None:
        self._uses_since_update = 0
        self._update_at = min(2 * self._update_at, _LEARNED_AT)
        share = self._uses.sum(axis=0) / max(float(self._blocks.sum()), 1.0)
        uses = self._uses + _PRIOR * share
        left_after = np.maximum((self._blocks + _PRIOR)[:, None] - np.cumsum(uses, axis=1), 1e-9)
        seconds = np.diff(_END_S) * (left_after + uses / 2)
        self._values = _best_rates(uses, seconds)
        self._uses *= _FORGET
        self._blocks *= _FORGET


def _bins(idle_s: Scores) -> Scores:
    places = np.log2(np.maximum(idle_s, 0.0) + 1.0) * _STEPS_PER_OCTAVE
    bins: Scores = np.minimum(places, _BINS - 2.0)
    return bins


def _best_rates(uses: Scores, seconds: Scores) -> Scores:
    """[classes, bins]: uses a second from each bin to an end, for the end with the highest rate."""
    none = np.zeros((len(uses), 1))
    best = np.zeros_like(uses)
    all_uses = np.concatenate([none, np.cumsum(uses, axis=1)], axis=1)
    all_seconds = np.concatenate([none, np.cumsum(seconds, axis=1)], axis=1)
    for start in range(_BINS):
        gained = all_uses[:, start + 1 :] - all_uses[:, start : start + 1]
        taken = all_seconds[:, start + 1 :] - all_seconds[:, start : start + 1]
        best[:, start] = (gained / np.maximum(taken, 1e-9)).max(axis=1)
    return best
