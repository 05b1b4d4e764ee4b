"""The state that the parts of one model's dispatcher share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixd.base.long_work.pacer import SLICE_ROWS, Pacer
from prefixd.cache import TieredCache
from prefixd.serving.dispatch.capacity.tier_share import Sharer, TierShare
from prefixd.serving.dispatch.model_requests import Requests
from prefixd.serving.dispatch.options import DispatchOptions
from prefixd.serving.frame_budget import FrameBudget
from prefixd.worker_protocol.protocol import ToWorker
from prefixd_scheduler import CostModel, LookAhead


@dataclass(slots=True)
class DispatchCounters:
    """Events since the start.

    Attributes:
        finished: requests that ended without an error.
        resumed: runs that were interrupted and are repeated.
        asked_images: images of the prompts that were handed over.
        encoded_images: image embeddings that the worker has computed.
        found_images: images whose keys and values for cross-attention were found in a tier.
        layerwise_loads: runs that began while the last layers of their prefixes were on their way.
        passes: forward passes of the model.
        read_at_once: of these, those that were read with none queued behind them.
        proposed_tokens: tokens that the draft proposed.
        accepted_tokens: proposed tokens that the model chose, too.
    """

    finished: int = 0
    resumed: int = 0
    asked_images: int = 0
    encoded_images: int = 0
    found_images: int = 0
    layerwise_loads: int = 0
    passes: int = 0
    read_at_once: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(eq=False)
class DispatchContext:
    """The state that the parts of one model's dispatcher share.

    Attributes:
        cache: the cache; its GPU tier is set before the first request is handed over.
        requests: the model's requests.
        cost: learns what loading and computing cost.
        send: sends a message to the worker.
        clock: seconds.
        options: the settings.
        share: the dispatchers of all models, which take frames of one tier.
        member: this dispatcher, as the other models' dispatchers see it.
        look_ahead: estimates when a request's turn comes.
        budget: counts the frames that requests have and keep, except those of `image_budget`.
        image_budget: counts the frames of images that are in no block of a prompt.
        pacer: lets other tasks run during a dispatch.
    """

    cache: TieredCache
    requests: Requests
    cost: CostModel
    send: Callable[[ToWorker], None]
    clock: Callable[[], float]
    options: DispatchOptions
    share: TierShare
    member: Sharer
    counters: DispatchCounters = field(default_factory=DispatchCounters)

    def __post_init__(self) -> None:
        self.look_ahead = LookAhead(self.cost, self.clock, self.options.look_ahead)
        self.budget, self.image_budget = FrameBudget(self._frames_of_parts), FrameBudget(self._frames_of_parts)
        self.pacer = Pacer(SLICE_ROWS)
        self.wake = self.requests.wake

    @property
    def caching(self) -> bool:
        """Whether the cache is used at all."""
        return self.options.caching

    def _frames_of_parts(self, sizes: Sequence[int]) -> int:
        tier = self.cache.tiers.gpu
        return tier.footprint(sizes) // tier.frame_bytes
