"""What of the GPU tier a run begins with: the homes of its cached prefix, and frames for what it computes first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from prefixd.cache import TieredCache
from prefixd.cache.index.trie import NO_SLOT
from prefixd.serving.frame_budget import FrameBudget
from prefixd.serving.images.image_kv import NO_ROWS
from prefixd.serving.request.request import Request
from prefixd.serving.request.run import Run, RunStates


@dataclass(frozen=True, slots=True)
class FirstFrames:
    """Frames that were taken for a run, those that lie aside together.

    Attributes:
        of_images: for the images that the worker computes.
        of_blocks: for its first blocks behind the cached ones.
        of_states: for its state, and for those that it keeps.
    """

    of_images: list[int]
    of_blocks: list[int]
    of_states: list[int]

    @property
    def all(self) -> list[int]:
        """All of them."""
        return [*self.of_images, *self.of_blocks, *self.of_states]


async def take_first(cache: TieredCache, request: Request, states: int) -> FirstFrames | None:
    """Frames for a request that is READY and for so many states of its run; None where there are not enough."""
    kv, images = request.kv, request.image_holds
    tenant = cache.mover.use.tenant_of(request.namespace)
    near = request.trie.slots[request.rows[-1:], cache.tiers.compute.level, : len(kv.block_widths)].ravel().tolist()
    wants = [
        (0, ()) if images is None else (images.missing_blocks, (images.kv.width,)),
        (request.first_blocks - len(request.rows), kv.block_widths),
        (states, kv.state_widths),
    ]
    beside = [count * sum(widths) for count, widths in wants]
    taken: list[list[int]] = []
    with cache.mover.working():  # these frames are in nobody's book until this returns
        try:
            for number, (count, widths) in enumerate(wants):
                hint = near if number == 1 else ()
                frames = await cache.mover.slots.take_frames(
                    *(count, widths), tenant=tenant, near=hint, beside=sum(beside[number + 1 :])
                )
                if frames is None:
                    break
                taken.append(frames)
        finally:
            if len(taken) < len(wants):
                cache.tiers.compute.free(itertools.chain(*taken))
    return FirstFrames(*taken) if len(taken) == len(wants) else None


def weigh_images(request: Request, budget: FrameBudget, *, caching: bool) -> int:
    """How many more frames a queued request takes for its images, besides those taken or weighed in this round."""
    kv, holds = request.image_kv, request.image_holds
    if kv is None:
        return 0
    if holds is not None:
        return holds.missing_blocks * kv.width + budget.weigh(kv.trie, holds.held)
    found = [kv.find(digest) if caching else NO_ROWS for digest in kv.chains]
    missing = sum(kv.size for rows in found if not len(rows))
    return missing + budget.weigh(kv.trie, np.concatenate([NO_ROWS, *found]))


def first_run(cache: TieredCache, request: Request, fresh: FirstFrames, keep: list[int], *, caching: bool) -> Run:
    """The run of a request that is READY, with these frames.

    keep: by blocks of the prompt, the states that it keeps.
    """
    return Run(
        [*_homes_of_prefix(cache, request), *fresh.of_blocks],
        request.usable_blocks if caching else 0,
        caching,
        request.kv.block_widths,
        _share_out(request, fresh.of_states, keep),
    )


def state_to_resume(cache: TieredCache, request: Request) -> list[int]:
    """Where the state after its cached blocks lies."""
    slots = request.trie.slots[request.rows[-1:], cache.tiers.compute.level, len(request.kv.block_widths) :]
    frames: list[int] = slots.ravel().tolist()
    return frames


def _homes_of_prefix(cache: TieredCache, request: Request) -> list[int]:
    """Where what is held of its cached blocks lies; -1 for the rest, which may go while it runs."""
    trie, parts = request.trie, len(request.kv.block_widths)
    slots = trie.slots[request.rows, cache.tiers.compute.level, :parts]
    if request.wanted is not None:
        slots = np.where((request.wanted[:, None] & trie.part_mask[:parts]) != 0, slots, NO_SLOT)
    homes: list[int] = slots.ravel().tolist()
    return homes


def _share_out(request: Request, slots: list[int], keep: list[int]) -> RunStates | None:
    """Gives a run's states their slots: its own, those to be kept, and the tail's if any are left."""
    kv = request.kv
    if not kv.state_frames:
        return None
    size = len(kv.state_widths)
    states = [slots[start : start + size] for start in range(0, len(slots), size)]
    own, kept, tail = states[0], states[1 : 1 + len(keep)], states[1 + len(keep) :]
    return RunStates(own, dict(zip(keep, kept, strict=True)), tail[0] if tail else [], frames=kv.state_frames)
