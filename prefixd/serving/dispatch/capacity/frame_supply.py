"""Gives running requests frames a block ahead of need, and takes them from other requests when none is free."""

from __future__ import annotations

import math

from prefixd.base.errors import ExhaustedError
from prefixd.serving.dispatch.capacity.preemption import Preemption
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.endings import Endings
from prefixd.serving.dispatch.staging.prefetcher import Prefetcher
from prefixd.serving.frame_budget import name_holders
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Extend
from prefixd_swap import FramePool

_PATIENCE_S = 30.0
"""How long a request may lack frames, though it runs alone or the device gives no memory, before it is ended. A short
hold, such as that of a write to disk, ends within this time."""

_LACKING = (RequestState.WAITING, RequestState.READY, RequestState.STARVED)


class FrameSupply:
    """Supplies running requests with the frames that they need next.

    Args:
        context: the dispatcher's.
        prefetcher: holds frames for requests that wait.
        preemption: chooses which running request gives its frames up.
        endings: ends a request that gets no frame.
    """

    def __init__(
        self, context: DispatchContext, prefetcher: Prefetcher, preemption: Preemption, endings: Endings
    ) -> None:
        self._context = context
        self._cache = context.cache
        self._running = context.requests.running
        self._share = context.share
        self._prefetcher = prefetcher
        self._preemption = preemption
        self._endings = endings
        self._lacking: tuple[int, float] | None = None  # a request that alone lacks frames, and since when
        self._ready_s = -math.inf  # since when the present worker takes requests

    def note_need(self, request: Request) -> None:
        """Marks a running request as STARVED if it needs another block soon."""
        sampling = request.sampling
        if sampling.beam_search is not None:
            return  # a beam search has all its frames from the start
        left = sampling.max_tokens - request.generated
        if left > 0 and request.state is RequestState.RUNNING and request.wanted_blocks > request.run.blocks:
            request.starve()

    async def extend_starved(self) -> bool:
        """Gives frames to starved requests, by rank; False at the first that gets none: those behind it get none."""
        for request in self._preemption.in_rank(self._running.values()):
            if not self._is_starved(request):
                continue  # it has frames enough, or ended while the others got theirs
            run, mover = request.run, self._cache.mover
            tenant, near = mover.use.tenant_of(request.namespace), run.frames[-run.slots :]
            blocks = request.wanted_blocks - run.blocks
            frames = await mover.slots.take_frames(blocks, request.kv.block_widths, tenant=tenant, near=near)
            if not self._is_starved(request):
                if frames:
                    self._cache.tiers.compute.free(frames)
            elif frames is None:
                await self._prefetcher.unstage_all_but(request)
                await self._share.unstage_others(self._context.member)
                self._preempt()
                self.note_lack(request)
                return False
            else:
                self._lacking = None
                request.extend(frames)
                self._context.send(Extend(request.id, frames))
        return True

    def note_lack(self, request: Request) -> None:
        """A request got no frames. Ends it if it has lacked them for 30 s while no other runs: no frame will come."""
        others = [other for other in self._share.running() if other is not request]
        now_s = self._context.clock()
        if others or self._share.moving or request.state not in _LACKING:
            self._lacking = None
        elif self._lacking is None or self._lacking[0] != request.id:
            self._lacking = request.id, now_s
        elif now_s - self._lacking[1] >= _PATIENCE_S:
            self._lacking = None
            # Owners have names that tenants chose: with several tenants none may see another's.
            named = name_holders(self._cache, owners=len(self._cache.tenants) == 1)
            error = ExhaustedError(
                f"the gpu tier had no frame for the request for {_PATIENCE_S:g} s, though no other runs: "
                f"{named}; unpin blocks, end the requests or leases that hold them, or make the tiers larger"
            )
            if request.on_worker:
                self._endings.end_run(request, error)
            else:
                self._endings.end_waiting(request, error)

    def note_refused(self, request: Request, frames: int) -> None:
        """A waiting request could run with `frames` frames of the tier, which has fewer and cannot grow now. Ends it if
        the device has given no more for 30 s."""
        if (refused_s := self._share.refused_s) is None:
            return
        since_s = max(refused_s, request.queued.arrival_s, self._ready_s)
        if self._context.clock() - since_s >= _PATIENCE_S:
            self._endings.end_waiting(request, _device_full(request, frames, self._cache.tiers.frames))

    def note_success(self) -> None:
        """A request got its frames."""
        self._lacking = None

    def note_ready(self) -> None:
        """The worker is there: until now requests have waited for it, and not for frames."""
        self._lacking = None
        self._ready_s = self._context.clock()

    def _is_starved(self, request: Request) -> bool:
        return request.state is RequestState.STARVED and request.id in self._running

    def _preempt(self) -> None:
        """Takes a request back from the worker to free its frames, unless other frames are about to be free."""
        request = self._preemption.choose(self._share.running())
        if request is not None:
            self._share.take_back(request)


def _device_full(request: Request, frames: int, pool: FramePool) -> ExhaustedError:
    tokens, frame_bytes = request.most_blocks * request.trie.block_tokens, pool.frame_bytes
    others = frames - request.most_frames
    beside = f" beside {others * frame_bytes} that are guaranteed to other tenants" if others else ""
    return ExhaustedError(
        f"prompt and output, up to {tokens} tokens, need up to {request.most_frames * frame_bytes} bytes of the GPU "
        f"tier{beside}, which has {pool.lasting * frame_bytes} and may have {pool.attainable * frame_bytes}, but "
        f"{pool.memory.device} gave no more for {_PATIENCE_S:g} s; free memory there, lower gpu.reserve_bytes, shorten "
        "the prompt or lower max_tokens"
    )
