"""Decides how many frames a GPU tier has that grows and shrinks by itself (vTensor, sections 5.4 and 7.4).

The device's free memory is all that the processes of a device know of each other. So it is the signal by which they
trade: a process whose requests lack memory takes from the reserve, and all give back until the reserve is there again.

```
free memory   0 ------- reserve/2 ------- reserve ------- 5/4 reserve ----------->
growing         never      |  for requests: a quarter of it at a time  |  for requests, and to keep cached blocks
giving back     until 5/4 of the reserve are free  |  only when idle
```

- **For requests**: frames without which the next requests cannot run. **To keep cached blocks**: instead of evicting
  them. That leaves 5/4 of the reserve, so a small change of the free memory does not take back what was just given.
- **Giving back**, from when the reserve is broken: all that lacks, and a quarter of what no request has, if the tier's
  own requests lack nothing or it is the *larger* one, with half of what is taken; else a part, by its share of what is
  taken. No request begins on these frames; requests that run keep theirs until they end.
- **Pauses**: who grew within `HOLD_S` does not give back, as its requests are about to begin. The larger one that gave
  back does not grow for as long, so the others do first, and takes from the reserve more seldom. If nobody gave back
  what a process took from the reserve, it tries again later and later.
- **A process that can run nothing** may take half of a broken reserve. It keeps what it has for `_STARVED_S`, then all
  goes back but its least: of two that wait for each other's memory one gets it.
- **Idle**, with no request for `idle_s` seconds, a tier has its least.

So where two processes have more requests than memory, each gets about half, and where three or four do, none keeps it
all: `tests/serving/models/test_elastic_size.py` simulates them. Growing by steps and giving back in proportion is what
makes shares equal (additive increase, multiplicative decrease: Chiu and Jain, 1989).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

HOLD_S = 1.0
_STARVED_S = 4.0
_PAUSE_S = 2.0
_MOST_WAIT_S = 16.0
_STEPS = 32
_SPARE_SHARE = 4


class Why(enum.Enum):
    """The reason of a size."""

    START = "it was made with its least"
    REQUESTS = "requests need it"
    CACHE = "to keep cached blocks"
    IDLE = "no request waits or runs"
    RESERVE = "less than gpu.reserve_bytes were free on the device"
    MOST = "its most was lowered"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The settings, in frames.

    Attributes:
        least: an idle tier has so many.
        most: it never has more.
        reserve: frames that are to stay free on the device.
        idle_s: seconds without a request after which it is idle.
    """

    least: int
    most: int
    reserve: int
    idle_s: float

    @property
    def step(self) -> int:
        """The least frames by which it grows where the device has plenty: a part of the way to its most."""
        return max(1, (self.most - self.least) // _STEPS)

    @property
    def least_free(self) -> int:
        """Frames that stay free on the device whatever requests need."""
        return self.reserve // 2

    @property
    def comfort(self) -> int:
        """Free frames from which on cached blocks may have more."""
        return self.reserve + -(-self.reserve // 4)


@dataclass(frozen=True, slots=True)
class Load:
    """What is seen at one moment, in frames.

    Attributes:
        size: the tier's frames.
        held: frames that requests have, or may come to need until they end.
        required: frames with which the next requests could run; 0 if none lacks any.
        useful: frames with which no cached block need be evicted now; 0 if none would be.
        free: frames that the device has memory for.
        taken: frames that the device's memory makes, without the free ones.
        busy: requests wait or run, or have run since the last look.
        coming: of the free frames, those whose memory workers are about to take for the models that they load. The tier
            does not grow into them, but for their sake alone it gives nothing back: they are an estimate.
        begins: frames with which a request can run that others have passed while the tier was too small: it has grown
            for it, and does not give them back before it runs.
    """

    size: int
    held: int
    required: int
    useful: int
    free: int
    taken: int
    busy: bool
    coming: int = 0
    begins: int = 0

    @property
    def larger(self) -> bool:
        """Whether the tier has half of what is taken, or more."""
        return 2 * self.size >= self.taken


@dataclass(frozen=True, slots=True)
class Decision:
    """The frames that the tier should have now, and why; `why` is None if it has them."""

    frames: int
    why: Why | None = None


class ElasticSize:
    """Decides the size. Time is passed in.

    Args:
        bounds: see there.
        now_s: the time.
    """

    def __init__(self, bounds: Bounds, now_s: float) -> None:
        self.bounds = bounds
        self._busy_s = now_s
        self._grown_s = self._refused_s = -math.inf
        self._giving_back = False
        self._used_reserve = False  # and it was not seen whole since
        self._next_use_s = -math.inf  # when it may grow into the reserve again
        self._wait_s = HOLD_S

    def set_most(self, frames: int) -> None:
        """Changes the most; it is not below the least."""
        self.bounds = replace(self.bounds, most=max(frames, self.bounds.least))

    def refused(self, now_s: float) -> None:
        """The device did not give the frames that were decided: it does not grow for `HOLD_S`."""
        self._refused_s = now_s

    def decide(self, now_s: float, load: Load) -> Decision:
        """The size for what is seen now. A size below `load.held` is reached when requests have ended."""
        bounds, size = self.bounds, load.size
        if load.busy:
            self._busy_s = now_s
        if load.free >= bounds.reserve:
            if self._used_reserve:
                self._wait_s = HOLD_S
            self._used_reserve = False
        self._giving_back = load.free < (bounds.comfort if self._giving_back else bounds.reserve)
        if size > bounds.most:
            return Decision(bounds.most, Why.MOST)
        if frames := self._growth(now_s, load):
            self._grown_s = now_s
            self._used_reserve = load.free - frames < bounds.reserve
            if self._used_reserve and load.larger and load.held:
                self._next_use_s = now_s + _PAUSE_S
            return Decision(size + frames, Why.REQUESTS if load.required > size else Why.CACHE)
        idle = max(bounds.least, load.held)
        if idle < size and now_s - self._busy_s >= bounds.idle_s:
            return Decision(idle, Why.IDLE)
        starved = load.required > size and not load.held
        hold_s = _STARVED_S if starved and not load.larger else HOLD_S
        if self._giving_back and size > bounds.least and now_s - self._grown_s >= hold_s:
            frames = max(self._given_back(now_s, load), min(load.begins, size))
            return Decision(frames, Why.RESERVE if frames < size else None)
        return Decision(size)

    def _growth(self, now_s: float, load: Load) -> int:
        bounds, size, free = self.bounds, load.size, load.free - load.coming
        wanted = max(load.required, load.useful)
        if wanted <= size or now_s - self._refused_s < HOLD_S:
            return 0
        frames = min(max(wanted, size + bounds.step), bounds.most) - size
        frames = max(0, min(frames, free - bounds.comfort))
        needed = min(load.required, bounds.most) - size
        may_use = not load.held or free >= bounds.reserve
        if frames < needed and now_s >= self._next_use_s and may_use:
            at_once = max(1, bounds.reserve // 4) if load.held else bounds.reserve
            frames = max(frames, min(needed, frames + at_once, free - bounds.least_free))
        return frames

    def _given_back(self, now_s: float, load: Load) -> int:
        least, size = self.bounds.least, load.size
        in_vain, self._used_reserve = self._used_reserve, False
        if in_vain:
            self._back_off(now_s)
        if load.larger:
            self._refused_s = now_s  # the others grow first
        frames = self.bounds.comfort - load.free
        if load.required <= size:
            frames = max(frames, (size - max(least, load.held)) // _SPARE_SHARE)
        elif in_vain and not load.held:
            frames = size
        elif not load.larger:
            frames = math.ceil(frames * size / load.taken)
        return max(least, size - frames)

    def _back_off(self, now_s: float) -> None:
        self._next_use_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, _MOST_WAIT_S)
