"""Learns how long computing and loading take."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from prefixd_scheduler.costs.seconds import Seconds
from prefixd_scheduler.distance import Distance
from prefixd_scheduler.errors import InvalidValueError

LOADED_FROM = (Distance.CPU, Distance.DISK, Distance.REMOTE)
"""The tiers that blocks are loaded from."""
_FROM = "CPU, DISK or REMOTE"


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The time of computing prompt tokens, given by a caller and not learned.

    Attributes:
        pass_s: seconds for each pass of the model.
        token_s: for each token.
        pair_s: for each pair of a token and one that it attends to.

    Raises:
        InvalidValueError: one is negative or not finite.
    """

    pass_s: float
    token_s: float
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("pass_s", self.pass_s), ("token_s", self.token_s), ("pair_s", self.pair_s)):
            if not (math.isfinite(value) and value >= 0):
                raise InvalidValueError(f"{name} = {value}; the seconds of a prefill have to be finite and 0 or more")

    def estimate_s(self, features: tuple[float, ...]) -> float:
        """As `Seconds.estimate_s`."""
        tokens, passes, pairs = features
        return self.token_s * tokens + self.pass_s * passes + self.pair_s * pairs


class CostModel:
    """Learns the times of computing and loading; knows nothing of requests.

    - Computing: a fixed time for each pass, one for each token, and one for each pair of a token and one that it
      attends to.
    - Embedding images: a time for each image, and one for each block of its embedding.
    - A load or store: a latency, and a time for each byte, including those that wait before it on the same path. Of a
      load also a time for each byte that is decoded: a tier may keep blocks as they are beside blocks in fewer bytes.

    Each is learned by `Seconds`. An estimate is None before the first observation: a tier is passed over only after its
    loads were observed to be slower than computing. A tier that is passed over is not observed any more, so that one
    slow minute would exclude it for ever. Therefore `probes` asks for a load every `probe_every`-th time.

    Args:
        probe_every: one of this many refusals of a tier becomes a probe; at least 2.
    """

    def __init__(self, probe_every: int = 32) -> None:
        if probe_every < 2:
            raise InvalidValueError(f"probe_every is {probe_every}; pass 2 or more, or every load would be made")
        self._compute: Seconds | PrefillCost = Seconds(3)
        self._encode = Seconds(2)
        self._loads = {distance: Seconds(3) for distance in LOADED_FROM}
        self._stores = {distance: Seconds(2) for distance in LOADED_FROM}
        self._refusals = dict.fromkeys(LOADED_FROM, 0)
        self._refused_swaps = dict.fromkeys(LOADED_FROM, 0)
        self._probe_every = probe_every

    def computing_as(self, prefill: PrefillCost) -> CostModel:
        """A model with a given time of computing, which shares what this one learns of loads and stores."""
        other = copy.copy(self)
        other._compute = prefill
        return other

    def observe_compute(self, tokens: int, elapsed_s: float, context_tokens: float = 0) -> None:
        """A pass computed `tokens` prompt tokens in `elapsed_s` seconds. `context_tokens`: the tokens before them, the
        mean if they belong to several prompts.

        Raises:
            InvalidValueError: a number is negative or not finite.
        """
        _check("computation", elapsed_s, tokens, context_tokens)
        if tokens and isinstance(self._compute, Seconds):
            self._compute.observe(_prefill(tokens, context_tokens), elapsed_s)

    def observe_encode(self, images: int, blocks: int, elapsed_s: float) -> None:
        """`images` images, of `blocks` blocks together, were embedded in `elapsed_s` seconds.

        Raises:
            InvalidValueError: a number is negative or not finite.
        """
        _check("encoding", elapsed_s, images, blocks)
        if images:
            self._encode.observe((float(blocks), float(images)), elapsed_s)

    def observe_load(self, distance: Distance, nbytes: int, elapsed_s: float, decoded_bytes: int = 0) -> None:
        """`nbytes` came to the GPU from `distance` in `elapsed_s` seconds, latency included.

        Args:
            distance: where they were.
            nbytes: as they were kept there: of a coded block its stored bytes.
            elapsed_s: seconds.
            decoded_bytes: the bytes that were made of coded blocks.

        Raises:
            InvalidValueError: nothing is loaded from that distance, or a number is negative or not finite.
        """
        if distance not in self._loads:
            raise InvalidValueError(f"a load from {distance.name}; loads come from {_FROM}")
        _check("load", elapsed_s, nbytes, decoded_bytes)
        if nbytes:
            self._loads[distance].observe((float(nbytes), 1.0, float(decoded_bytes)), elapsed_s)

    def observe_store(self, distance: Distance, nbytes: int, elapsed_s: float) -> None:
        """`nbytes` went from the GPU to `distance` in `elapsed_s` seconds, making room there included.

        Raises:
            InvalidValueError: nothing is stored at that distance, or a number is negative or not finite.
        """
        if distance not in self._stores:
            raise InvalidValueError(f"a store to {distance.name}; stores go to {_FROM}")
        _check("store", elapsed_s, nbytes)
        if nbytes:
            self._stores[distance].observe((float(nbytes), 1.0), elapsed_s)

    def compute_s(self, tokens: int, context_tokens: float = 0) -> float | None:
        """Estimated seconds to compute `tokens` prompt tokens behind `context_tokens`; None before the first
        observation."""
        return self._compute.estimate_s(_prefill(tokens, context_tokens)) if tokens else 0.0

    def encode_s(self, images: int, blocks: int) -> float | None:
        """Estimated seconds to embed `images` images of `blocks` blocks together; None before the first observation."""
        return self._encode.estimate_s((float(blocks), float(images))) if images else 0.0

    def load_s(self, nbytes: int, distance: Distance, queued_bytes: int = 0, decoded_bytes: int = 0) -> float | None:
        """Estimated seconds to bring `nbytes` up from `distance` behind `queued_bytes` that wait or move on that path:
        0 from the GPU, None if never observed. Bytes as in `observe_load`."""
        if distance is Distance.GPU or not nbytes:
            return 0.0
        known = self._loads.get(distance)
        return None if known is None else known.estimate_s((float(nbytes + queued_bytes), 1.0, float(decoded_bytes)))

    def store_s(self, nbytes: int, distance: Distance) -> float | None:
        """Estimated seconds to bring `nbytes` down to `distance`; None if never observed."""
        known = self._stores.get(distance)
        return None if known is None else known.estimate_s((float(nbytes), 1.0))

    def probes(self, distance: Distance) -> bool:
        """Counts a refusal to load from `distance`; returns whether to load from it this time, as a probe."""
        return self._probes(self._refusals, distance)

    def swap_pays(self, tokens: int, nbytes: int, distance: Distance) -> bool:
        """Whether to swap the KV of a preempted request out and in again rather than compute it again.

        If only loads or only stores of a tier were observed, the others are assumed to be as fast, because both use the
        same path. If neither was observed, or no computation, swapping pays: it yields an observation.

        Args:
            tokens: number of tokens to compute otherwise.
            nbytes: bytes to store now and to load later.
            distance: the tier to swap to. `NONE`: there is none, and swapping never pays.

        Returns:
            True unless all costs are known, or assumed as above, and swapping costs more, apart from probes.
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
        refusals[distance] = (refusals[distance] + 1) % self._probe_every
        return refusals[distance] == 0


def _prefill(tokens: float, context_tokens: float) -> tuple[float, float, float]:
    """Tokens, one pass, and pairs of a token and one that it attends to."""
    return float(tokens), 1.0, tokens * (context_tokens + tokens / 2)


def _check(what: str, elapsed_s: float, *counts: float) -> None:
    for value in (elapsed_s, *counts):
        if not (math.isfinite(value) and value >= 0):
            raise InvalidValueError(f"a {what} with {value}; its seconds and counts have to be finite and 0 or more")
