"""Frames for requests that run: asked for a block ahead of need, taken from others when there are none."""

from __future__ import annotations

from prefixd.base.errors import ExhaustedError
from prefixd.serving.dispatch.capacity.preemption import Preemption
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.endings import Endings
from prefixd.serving.dispatch.staging.prefetcher import Prefetcher
from prefixd.serving.frame_budget import name_holders
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Extend

_PATIENCE_S = 30.0
"""For a request that lacks frames while no other runs: what holds them may be short, such as a write to disk."""


class FrameSupply:
    """Gives running requests the frames that they need next.

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

    def want(self, request: Request) -> None:
        """Asks for the next frames of a running request, a block ahead of need."""
        sampling = request.sampling
        if sampling.beam_search is not None:
            return  # it has frames for all of its search
        left = sampling.max_tokens - request.generated
        if left > 0 and request.state is RequestState.RUNNING and request.wanted_blocks > request.run.blocks:
            request.starve()

    async def extend_starved(self) -> bool:
        """Gives frames to those that run and need them; False when one gets none: then no other gets any."""
        for request in self._preemption.in_rank(self._running.values()):
            if not self._starves(request):
                continue  # it has its frames, or ended while the others got theirs
            run, mover = request.run, self._cache.mover
            tenant, near = mover.use.tenant_of(request.namespace), run.frames[-run.slots :]
            blocks = request.wanted_blocks - run.blocks
            frames = await mover.slots.take_frames(blocks, request.kv.block_widths, tenant=tenant, near=near)
            if not self._starves(request):
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
        """A request got no frames. Ends one that has lacked them for long though no other runs: none will come."""
        others = [other for other in self._share.running() if other is not request]
        now_s = self._context.clock()
        if others or self._share.moving or request.state not in (RequestState.READY, RequestState.STARVED):
            self._lacking = None
        elif self._lacking is None or self._lacking[0] != request.id:
            self._lacking = request.id, now_s
        elif now_s - self._lacking[1] >= _PATIENCE_S:
            self._lacking = None
            named = name_holders(self._cache, owners=len(self._cache.tenants) == 1)  # names that tenants have chosen
            error = ExhaustedError(
                f"the gpu tier had no frame for the request for {_PATIENCE_S:g} s, though no other runs: "
                f"{named}; unpin blocks, end who holds them, or make the tiers larger"
            )
            if request.on_worker:
                self._endings.end_run(request, error)
            else:
                self._endings.end_waiting(request, error)

    def note_success(self) -> None:
        """A request got its frames."""
        self._lacking = None

    def _starves(self, request: Request) -> bool:
        return request.state is RequestState.STARVED and request.id in self._running

    def _preempt(self) -> None:
        """Frees frames by taking a request back from the worker, unless frames are about to be free."""
        request = self._preemption.choose(self._share.running())
        if request is not None:
            self._share.take_back(request)
