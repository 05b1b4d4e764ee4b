"""Whether loading a cached prefix, or swapping a preempted request, is faster than computing it again."""

from __future__ import annotations

from dataclasses import dataclass

from prefixd_scheduler.distance import Distance
from prefixd_scheduler.errors import InvalidValueError


@dataclass(slots=True)
class _Rate:
    """Seconds per unit, as the ratio of two exponentially weighted means.

    Averaging seconds and units apart lets an observation count by its size: a one-block load, which is all
    latency, does not outweigh a load of a thousand blocks.
    """

    smoothing: float
    mean_s: float = 0.0
    mean_units: float = 0.0

    def observe(self, units: int, elapsed_s: float) -> None:
        if units < 0 or elapsed_s < 0:
            raise InvalidValueError(f"an observation of {units} units in {elapsed_s} s; both have to be 0 or more")
        if units == 0:
            return
        weight = self.smoothing if self.mean_units else 1.0
        self.mean_s += weight * (elapsed_s - self.mean_s)
        self.mean_units += weight * (units - self.mean_units)

    def estimate_s(self, units: int) -> float | None:
        return units * self.mean_s / self.mean_units if self.mean_units else None


class CostModel:
    """Learns what computing and loading cost, and says which is cheaper.

    The paper (section X) asks for a way to abort a load that turned out slow and to compute instead; `load_pays`
    decides that. Loading is the default, since a cache is there to be loaded from: a tier is passed over only after its
    loads were observed to be slower than computing.

    A tier that is passed over is not observed any more, so one slow minute would shut it out for ever. Therefore every
    `probe_every`-th load that is judged too slow is made all the same. The same holds for swaps.

    Args:
        smoothing: weight of the newest observation, 0 < smoothing <= 1.
        probe_every: of so many unfavourable answers for one tier in a row, one is favourable; at least 2.
    """

    def __init__(self, smoothing: float = 0.2, probe_every: int = 32) -> None:
        if not 0 < smoothing <= 1:
            raise InvalidValueError(f"smoothing is {smoothing}; pass 0 < smoothing <= 1")
        if probe_every < 2:
            raise InvalidValueError(f"probe_every is {probe_every}; pass 2 or more, or every load would be made")
        self._compute = _Rate(smoothing)
        self._loads = {distance: _Rate(smoothing) for distance in (Distance.CPU, Distance.DISK)}
        self._stores = {distance: _Rate(smoothing) for distance in self._loads}
        self._refusals = dict.fromkeys(self._loads, 0)
        self._refused_swaps = dict.fromkeys(self._loads, 0)
        self._probe_every = probe_every

    def observe_compute(self, tokens: int, elapsed_s: float) -> None:
        """`tokens` prompt tokens were computed in `elapsed_s` seconds."""
        self._compute.observe(tokens, elapsed_s)

    def observe_load(self, distance: Distance, nbytes: int, elapsed_s: float) -> None:
        """`nbytes` came to the GPU from `distance` in `elapsed_s` seconds, waiting for the device included.

        Raises:
            InvalidValueError: nothing is loaded from that distance, or a number is negative.
        """
        if distance not in self._loads:
            raise InvalidValueError(f"a load from {distance.name}; loads come from CPU or DISK")
        self._loads[distance].observe(nbytes, elapsed_s)

    def observe_store(self, distance: Distance, nbytes: int, elapsed_s: float) -> None:
        """`nbytes` went from the GPU to `distance` in `elapsed_s` seconds, making room there included.

        Raises:
            InvalidValueError: nothing is stored at that distance, or a number is negative.
        """
        if distance not in self._stores:
            raise InvalidValueError(f"a store to {distance.name}; stores go to CPU or DISK")
        self._stores[distance].observe(nbytes, elapsed_s)

    def compute_s(self, tokens: int) -> float | None:
        """Estimated seconds to compute `tokens` prompt tokens; None before the first observation."""
        return self._compute.estimate_s(tokens)

    def load_s(self, nbytes: int, distance: Distance) -> float | None:
        """Estimated seconds to bring `nbytes` up from `distance`: 0 from the GPU, None if never observed."""
        if distance is Distance.GPU:
            return 0.0
        rate = self._loads.get(distance)
        return None if rate is None else rate.estimate_s(nbytes)

    def store_s(self, nbytes: int, distance: Distance) -> float | None:
        """Estimated seconds to bring `nbytes` down to `distance`; None if never observed."""
        rate = self._stores.get(distance)
        return None if rate is None else rate.estimate_s(nbytes)

    def load_pays(self, tokens: int, nbytes: int, distance: Distance) -> bool:
        """Whether to load a prefix rather than compute it.

        Args:
            tokens: what would have to be computed otherwise.
            nbytes: what has to be loaded; for a load under way, what is left of it.
            distance: where the bytes are. `NONE` has nothing to load and never pays.

        Returns:
            True unless both costs are known and loading costs more, apart from the probes described above.
        """
        if distance is Distance.NONE:
            return False
        load_s = self.load_s(nbytes, distance)
        compute_s = self.compute_s(tokens)
        if load_s is None or compute_s is None or load_s <= compute_s:
            return True
        return self._probes(self._refusals, distance)

    def swap_pays(self, tokens: int, nbytes: int, distance: Distance) -> bool:
        """Whether to swap the KV of a preempted request out and in again rather than compute it again.

        What was never observed is assumed: a store is as fast as a load from the same distance, and a load as fast as a
        store to it, because both use the same path. Where neither of them or no computation was observed, swapping
        pays: it keeps what was computed, and it is an observation.

        Args:
            tokens: what would have to be computed otherwise.
            nbytes: what has to be stored now and loaded later.
            distance: where it goes, and is loaded from. `NONE`: it can go nowhere, and swapping never pays.

        Returns:
            True unless all costs are known, or assumed as above, and swapping costs more, apart from the probes
            described above.
        """
        if distance is Distance.NONE:
            return False
        load_s, store_s = self.load_s(nbytes, distance), self.store_s(nbytes, distance)
        store_s = load_s if store_s is None else store_s
        load_s = store_s if load_s is None else load_s
        compute_s = self.compute_s(tokens)
        if store_s is None or load_s is None or compute_s is None or store_s + load_s <= compute_s:
            return True
        return self._probes(self._refused_swaps, distance)

    def _probes(self, refusals: dict[Distance, int], distance: Distance) -> bool:
        """Counts one more unfavourable answer; whether it becomes a favourable one."""
        refusals[distance] = (refusals[distance] + 1) % self._probe_every
        return refusals[distance] == 0
