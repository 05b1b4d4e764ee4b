"""A daemon with one model in virtual time: its own parts, over tiers without bytes and a worker that computes nothing.

Everything here runs on a `SimulatedTimeLoop`; the same arguments give the same figures.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prefixd.base.errors import ConfigError
from prefixd.base.sampling import Sampling
from prefixd.cache import NamespaceSpec, TieredCache, Tiers, Troubles, check_integrity
from prefixd.planner.machine.hardware import Way, Ways
from prefixd.planner.machine.pass_costs import ComputeCosts
from prefixd.planner.machine.planned_codecs import EXACT, PlannedCodec
from prefixd.planner.plan_figures import PlanFigures, PlannedResult, summarise
from prefixd.planner.planned_models import PlannedModel
from prefixd.planner.planned_worker import SimulatedWorker
from prefixd.planner.simulation.event_loop import SimulatedTimeLoop
from prefixd.planner.simulation.link import NOT_CODED, SimulatedCoding, SimulatedLink, UnbackedCopyEngine
from prefixd.planner.simulation.memory import UnbackedMemory, UnbackedMemoryTier
from prefixd.planner.simulation.store import UnbackedStoreTier
from prefixd.planner.workload import PlannedRequest, Workload, own_tokens
from prefixd.serving.dispatch.wiring import make_cache, make_dispatcher
from prefixd.serving.request.kv_needs import KvNeeds
from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Event, NewTokens
from prefixd.settings import Settings
from prefixd_scheduler import QueuedRequest
from prefixd_swap import FramePool
from prefixd_swap.tiers import GpuTier
from prefixd_swap.transfers import DeviceLimits, Transfers

Progress = Callable[[], None]
Achievable = Callable[[Collection[int]], float]
"""What a cache without limits would find, by the places of the requests that were refused."""
_BLOCKS_A_WRITE = 32
_MOST_FRAMES = 1 << 22  # each takes some 100 bytes


@dataclass(frozen=True)
class Plan:
    """A machine with a daemon.

    Attributes:
        model: what it serves.
        settings: the daemon's. A plan uses the sizes of the tiers, `cache`, `scheduler`, `transfers`,
            `disk.io_threads`, and of the worker `block_tokens`, `block_padding`, `max_running` and `max_step_tokens`.
        costs: of passes of the model.
        ways: between the tiers.
        request_s: seconds of a request on its way to the queue and back.
        chunk_bytes: of the GPU's memory, which blocks fill; 0: any size fills it, as on a CPU.
        codec: of the disk tier.
    """

    model: PlannedModel
    settings: Settings
    costs: ComputeCosts
    ways: Ways
    request_s: float = 0.0
    chunk_bytes: int = 0
    codec: PlannedCodec = EXACT

    @property
    def disk_bytes(self) -> int:
        """Exact bytes of the blocks for which the disk tier has room."""
        return int(self.settings.disk.bytes / self.codec.stored)

    @property
    def strides(self) -> Sequence[int]:
        """Bytes of GPU memory that a token takes in each group of the model; empty: those of its keys and values."""
        padding = self.settings.worker.block_padding
        return self.model.strides(self.chunk_bytes, padding) if self.chunk_bytes else ()


def simulate(
    plan: Plan, workloads: Sequence[Workload], *, achievable: Achievable | None = None, progress: Progress | None = None
) -> list[PlanFigures]:
    """The figures of each workload, run one after the other on one daemon whose cache is empty at first.

    Args:
        plan: the machine.
        workloads: the requests.
        achievable: of `PlanFigures`, for the last workload.
        progress: called at the end of each request.

    Raises:
        ConfigError: a tier that holds no request of the model, or no request at all fits.
    """
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(_simulate(plan, workloads, achievable, progress or (lambda: None)))


async def _simulate(
    plan: Plan, workloads: Sequence[Workload], achievable: Achievable | None, progress: Progress
) -> list[PlanFigures]:
    figures = []
    async with open_daemon(plan) as daemon:
        for number, workload in enumerate(workloads, 1):
            last = number == len(workloads)
            figures.append(await daemon.run(workload, progress, achievable if last else None))
    return figures


@asynccontextmanager
async def open_daemon(plan: Plan) -> AsyncIterator[VirtualDaemon]:
    """A daemon that takes requests; at the end everything has to add up. Raises ConfigError, IntegrityError."""
    daemon = VirtualDaemon(plan)
    await daemon.start()
    try:
        yield daemon
    finally:
        await daemon.stop()
    check_integrity(daemon.cache)
    daemon.dispatcher.queue.check_integrity()
    daemon.close()


class VirtualDaemon:
    """The parts that `prefixd.server.daemon` and `model_host` put together, in virtual time."""

    def __init__(self, plan: Plan) -> None:
        settings, loop = plan.settings, asyncio.get_running_loop()
        self._plan = plan
        self._clock = clock = loop.time
        self._kv, frame_bytes = plan.model.kv(
            settings.worker.block_tokens, settings.worker.max_step_tokens, plan.strides
        )
        frames = self._frames(frame_bytes)
        transfers = Transfers(urgency_enabled=settings.transfers.urgency, clock=clock)
        _check_sizes(plan, self._kv.block_frames * frame_bytes)
        self._memory = UnbackedMemory(frame_bytes)
        self._pool = FramePool(self._memory, frame_bytes, frames)
        shared = None
        if settings.cpu.bytes:
            shared = UnbackedMemoryTier(settings.cpu.bytes, name="cpu", level=1, shared=True)
        self._read_link = self._link(plan.ways.disk_read, plan.codec.up)
        self._write_link = self._link(plan.ways.disk_write, plan.codec.down)
        durable = None
        if settings.disk.bytes:
            threads = settings.disk.io_threads
            durable = UnbackedStoreTier(  # everything above it counts exact bytes, so that its capacity does too
                transfers,
                name="disk",
                level=2,
                capacity_bytes=plan.disk_bytes,
                link=self._read_link,
                write_link=self._write_link,
                limits=DeviceLimits(in_flight=threads + threads // 2, reserved=threads // 2),
            )
            # Blocks of a plan may be larger than a piece of the daemon: a write for each took most of the plan's time.
            durable.least_piece_bytes = _BLOCKS_A_WRITE * self._kv.block_frames * frame_bytes
        tiers = Tiers(transfers, compute=GpuTier(self._pool), shared=shared, durable=durable, troubles=Troubles(clock))
        self._engine = UnbackedCopyEngine(self._link(plan.ways.to_gpu), self._link(plan.ways.from_gpu))
        self.cache: TieredCache = make_cache(_without_codecs(settings), tiers, self._engine, clock)
        self.worker = SimulatedWorker(
            plan.costs,
            self._kv,
            settings.worker.max_step_tokens,
            self._output,
            clock,
            on_step=lambda step: self.dispatcher.on_step(step),
            on_done=lambda done: self.dispatcher.on_done(done),
        )
        self.dispatcher = make_dispatcher(settings, self.cache, self.worker.send, clock)
        self.dispatcher.least_frames = self._kv.least_frames
        self.dispatcher.recorder.needs = KvNeeds(self._kv, frame_bytes)
        spec = NamespaceSpec(plan.model.name, self._kv.block_tokens, self._kv.parts(frame_bytes), worker=True)
        self._namespace = self.cache.register(spec)
        self._outputs: dict[int, tuple[int, ...]] = {}
        self._next_id = 1

    async def start(self) -> None:
        """Starts the background tasks."""
        self.cache.write_back.start()
        self.worker.start()
        self.dispatcher.start()
        self.dispatcher.on_ready()

    async def stop(self) -> None:
        """Ends everything; nothing is asked any more."""
        await self.dispatcher.stop()
        await self.worker.stop()
        self.dispatcher.abandon()
        await self.cache.close()
        await self.cache.tiers.close()

    def close(self) -> None:
        """Gives the accounting of the GPU tier back, after everything was checked."""
        self._engine.close()
        self._pool.close()
        self._memory.close()

    async def run(self, workload: Workload, progress: Progress, achievable: Achievable | None = None) -> PlanFigures:
        """Runs a workload. Raises ConfigError when no request fits."""
        tiers = self.cache.tiers
        began_s, busy_s = self._clock(), self.worker.counters.busy_s
        read, written = self._read_link.moved_bytes, self._write_link.moved_bytes
        evicted = {tier.name: tiers.counters[tier.level].evicted for tier in tiers.existing}
        preempted = self.dispatcher.counters.resumed
        client = _Client(self, workload, self._plan.request_s, progress)
        results = await client.run()
        if not results:
            raise ConfigError(
                f"none of the {len(workload.requests)} requests fits the GPU tier of {tiers.compute.capacity_bytes} "
                f"bytes, the shortest of {min(r.prompt_tokens + r.output_tokens for r in workload.requests)} tokens; "
                "make it larger"
            )
        disk_bytes = 0 if tiers.durable is None else tiers.durable.used_bytes
        return summarise(
            results,
            [tier.name for tier in tiers],
            began_s=began_s,
            refused=len(client.refused),
            achievable=None if achievable is None else achievable(client.refused),
            disk_written_bytes=self._write_link.moved_bytes - written,
            disk_read_bytes=self._read_link.moved_bytes - read,
            disk_saved_bytes=round((1 - self._plan.codec.stored) * disk_bytes),
            evicted_blocks={
                tier.name: tiers.counters[tier.level].evicted - evicted[tier.name] for tier in tiers.existing
            },
            preempted=self.dispatcher.counters.resumed - preempted,
            busy_s=self.worker.counters.busy_s - busy_s,
        )

    def fits(self, planned: PlannedRequest) -> bool:
        """Whether a request ever fits the GPU tier, as the daemon decides when one comes."""
        blocks = -(-(planned.prompt_tokens + planned.output_tokens) // self._kv.block_tokens)
        return self._kv.most_frames(blocks) <= self._pool.lasting

    def submit(self, planned: PlannedRequest, arrival_s: float, events: _Watch) -> Request:
        """Queues a request, as `Generation` does. Raises QueueFullError."""
        number, self._next_id = self._next_id, self._next_id + 1
        if planned.output is not None:
            self._outputs[number] = planned.output
        namespace = self._namespace
        request = Request(
            id=number,
            name=f"r{number}",
            namespace=namespace,
            trie=self.cache.trie(namespace),
            chain=self.cache.chain(namespace, planned.prompt().astype("<u4").tobytes()),
            prompt_tokens=planned.prompt_tokens,
            sampling=Sampling(max_tokens=planned.output_tokens, ignore_eos=True),
            queued=QueuedRequest(number, arrival_s, planned.prompt_tokens),
            kv=self._kv,
            events=events,
        )
        self.dispatcher.submit(request)
        return request

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._outputs.pop(request.id, None)

    def _output(self, number: int, first: int, count: int) -> list[int]:
        known = self._outputs.get(number)
        return own_tokens(number, first, count) if known is None else list(known[first : first + count])

    def _frames(self, frame_bytes: int) -> int:
        nbytes = self._plan.settings.gpu.bytes
        if not isinstance(nbytes, int):
            raise ConfigError("gpu.bytes = auto cannot be planned with; give the size of the GPU tier")
        frames = nbytes // frame_bytes
        if frames < self._kv.least_frames:
            raise ConfigError(
                f"the GPU tier of {nbytes} bytes has {frames} frames of {frame_bytes} bytes, and the smallest request "
                f"needs {self._kv.least_frames}; make it at least {self._kv.least_frames * frame_bytes} bytes"
            )
        if frames > _MOST_FRAMES:
            raise ConfigError(
                f"the GPU tier of {nbytes} bytes has {frames:,} frames of {frame_bytes} bytes, and at most "
                f"{_MOST_FRAMES:,} are planned; make it smaller, or raise worker.block_tokens"
            )
        return frames

    def _link(self, way: Way, coding: SimulatedCoding = NOT_CODED) -> SimulatedLink:
        return SimulatedLink(way.bytes_per_s, way.latency_s, self._clock, asyncio.sleep, coding)


class _Watch:
    """The events of one request."""

    __slots__ = ("_ended", "first_token_s", "request")

    def __init__(self, ended: Callable[[_Watch, Event], None]) -> None:
        self._ended = ended
        self.first_token_s: float | None = None
        self.request: Request | None = None

    def put_nowait(self, event: Event, /) -> None:
        """Takes the time of the first token, and tells of the end."""
        if isinstance(event, NewTokens):
            if self.first_token_s is None:
                self.first_token_s = asyncio.get_running_loop().time()
        else:
            self._ended(self, event)


class _Client:
    """Sends a workload's requests, each when it is due, and collects their results."""

    def __init__(self, daemon: VirtualDaemon, workload: Workload, request_s: float, progress: Progress) -> None:
        self.refused: set[int] = set()
        self._daemon = daemon
        self._workload = workload
        self._request_s = request_s
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._results: list[PlannedResult] = []
        self._left = len(workload.requests)
        self._all_ended = self._loop.create_future()
        self._followers: dict[int, list[int]] = {}
        for number, request in enumerate(workload.requests):
            if request.after is not None:
                self._followers.setdefault(request.after, []).append(number)
        self._places = workload.outstanding
        self._next = 0  # with places: the next request to be sent

    async def run(self) -> list[PlannedResult]:
        """Returns when every request has ended."""
        if self._places is not None:
            for _ in range(min(self._places, len(self._workload.requests))):
                self._send_next()
        else:
            sending = asyncio.create_task(self._send_all(), name="client")
            sending.add_done_callback(self._failed)
        await self._all_ended
        return self._results

    async def _send_all(self) -> None:
        for number, request in enumerate(self._workload.requests):
            if request.after is None:
                wait_s = self._began_s + request.arrival_s - self._loop.time()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                self._send(number)

    def _failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._all_ended.done():
            self._all_ended.set_exception(error)

    def _send_next(self) -> None:
        if self._next < len(self._workload.requests):
            self._next += 1
            self._send(self._next - 1)

    def _send(self, number: int) -> None:
        """Sends a request, which is at the queue after the time of its way."""
        arrival_s = self._loop.time()
        if self._request_s:
            self._loop.call_later(self._request_s, self._arrive, number, arrival_s)
        else:
            self._arrive(number, arrival_s)

    def _arrive(self, number: int, arrival_s: float) -> None:
        planned = self._workload.requests[number]
        if not self._daemon.fits(planned):
            self.refused.add(number)
            self._loop.call_soon(self._go_on, number)
            return

        def ended(watch: _Watch, event: Event) -> None:
            request = watch.request
            assert request is not None, "nothing ends while it is submitted"
            if isinstance(event, Exception):
                if not self._all_ended.done():
                    self._all_ended.set_exception(event)
                return
            now_s = self._loop.time()
            first_s = now_s if watch.first_token_s is None else watch.first_token_s
            hits = tuple(request.hit_tokens or [0] * 3)
            self._results.append(
                PlannedResult(first_s - arrival_s, now_s, planned.prompt_tokens, planned.output_tokens, hits)
            )
            self._daemon.forget(request)
            self._loop.call_soon(self._go_on, number)

        watch = _Watch(ended)
        watch.request = self._daemon.submit(planned, self._loop.time(), watch)

    def _go_on(self, number: int) -> None:
        """A request has ended: sends those that wait for it."""
        self._progress()
        self._left -= 1
        if not self._left and not self._all_ended.done():
            self._all_ended.set_result(None)
        for follower in self._followers.get(number, ()):
            self._loop.call_later(self._workload.requests[follower].arrival_s, self._send, follower)
        if self._places is not None:
            self._send_next()


def _without_codecs(settings: Settings) -> Settings:
    """The settings of a cache that encodes nothing, since a tier without bytes has none: its link does instead."""
    tenants = {name: tenant.model_copy(update={"codec": None}) for name, tenant in settings.tenants.items()}
    disk = settings.disk.model_copy(update={"codec": "exact"})
    return settings.model_copy(update={"disk": disk, "tenants": tenants})


def _check_sizes(plan: Plan, block_bytes: int) -> None:
    settings = plan.settings
    stored_bytes = math.ceil(block_bytes * plan.codec.stored)
    for name, nbytes, least in (
        ("cpu.bytes", settings.cpu.bytes, block_bytes),
        ("disk.bytes", settings.disk.bytes, stored_bytes),
    ):
        if 0 < nbytes < least:
            raise ConfigError(
                f"{name} = {nbytes} holds no block: one of {settings.worker.block_tokens} tokens has {least} bytes "
                "there; make the tier larger, or 0 for none"
            )
