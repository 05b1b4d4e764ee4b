"""The figures of the models that the daemon serves, and their totals."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from prefixd.cache.tiers import Tiers
from prefixd.server.figures.metrics import METRIC, METRICS
from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.models.model_host import ModelHost
from prefixd.serving.models.worker_process import WorkerState
from prefixd.v1 import admin_pb2 as pb
from prefixd_swap.tiers import GpuTier

_STATES = {
    WorkerState.STARTING: pb.WorkerStats.STATE_STARTING,
    WorkerState.READY: pb.WorkerStats.STATE_READY,
    WorkerState.FAILED: pb.WorkerStats.STATE_FAILED,
}


def model_figures(host: ModelHost, tiers: Tiers) -> pb.ModelStats:
    """Returns a model's figures: its worker's, its queue's, and the GPU memory that it holds."""
    compute = tiers.compute
    frame_bytes = compute.frame_bytes if isinstance(compute, GpuTier) else 0
    return pb.ModelStats(
        name=host.name,
        namespace=host.namespace_name,
        worker=_worker_figures(host, tiers),
        scheduler=_scheduler_of(host.dispatcher),
        held_bytes=host.dispatcher.taken_frames * frame_bytes,
    )


def total_worker(workers: Sequence[pb.WorkerStats]) -> pb.WorkerStats:
    """Returns the first worker's figures with all workers' counts added; its state is READY only if all are ready."""
    if not workers:
        return pb.WorkerStats(state=pb.WorkerStats.STATE_NONE)
    total = pb.WorkerStats()
    total.CopyFrom(workers[0])
    for other in workers[1:]:
        _add_counts(total, other)
        if other.state != pb.WorkerStats.STATE_READY:
            total.state = other.state
    return total


def total_scheduler(schedulers: Sequence[pb.SchedulerStats]) -> pb.SchedulerStats:
    """Returns the counts of all queues added; the policy is the last one's."""
    total = pb.SchedulerStats()
    for one in schedulers:
        total.policy = one.policy
        _add_counts(total, one)
    return total


def _add_counts(total: Message, one: Message) -> None:
    """Adds the numbers of `one` that are figures of the metrics page to `total`, in nested messages too."""
    for field in total.DESCRIPTOR.fields:
        options = field.GetOptions()
        if options.HasExtension(METRICS) and one.HasField(field.name):
            _add_counts(getattr(total, field.name), getattr(one, field.name))
        elif options.HasExtension(METRIC) and field.enum_type is None:
            setattr(total, field.name, getattr(total, field.name) + getattr(one, field.name))


def _worker_figures(host: ModelHost, tiers: Tiers) -> pb.WorkerStats:
    worker, hello, kv = host.worker, host.worker.hello, host.dispatcher.results.kv
    frame_bytes = tiers.frames.frame_bytes if kv.shared_blocks else 0
    return pb.WorkerStats(
        state=_STATES[worker.state],
        pid=worker.pid,
        restarts=worker.restarts,
        running_requests=len(host.dispatcher.running),
        model=worker.settings.model,
        device=worker.settings.device,
        block_tokens=hello.block_tokens if hello else 0,
        block_tokens_asked=hello.block_tokens_asked if hello else 0,
        block_tokens_reason=hello.block_tokens_reason if hello else "",
        token_bytes=hello.token_bytes if hello else 0,
        token_memory=hello.token_memory if hello else 0,
        shared_bytes=kv.shared_blocks * frame_bytes,
        mapped_blocks=kv.mapped_blocks,
        reused_blocks=kv.reused_blocks,
        copied_blocks=kv.copied_blocks,
        error=worker.failure,
        kv=worker.settings.kv,
        states=_states_of(host),
        images=_images_of(host),
        layout=worker.settings.layout,
        cuda_graphs=worker.ready.cuda_graphs,
        cuda_graphs_reason=worker.ready.cuda_graphs_reason,
        prompt_graphs=worker.ready.prompt_graphs,
        prompt_graphs_reason=worker.ready.prompt_graphs_reason,
        operators=worker.ready.operators,
        operators_reason=worker.ready.operators_reason,
        passes=host.dispatcher.counters.passes,
        passes_read_at_once=host.dispatcher.counters.read_at_once,
        draft=_draft_of(host),
    )


def _states_of(host: ModelHost) -> pb.StateStats | None:
    hello = host.worker.hello
    if hello is None or not hello.state_frames:
        return None
    counters = host.dispatcher.recorder.states.counters
    return pb.StateStats(
        kept_states=counters.kept,
        kept_bytes=counters.kept_bytes,
        resumed_runs=counters.resumed,
        resumed_tokens=counters.resumed_tokens,
        runs_without_room=counters.without_room,
    )


def _images_of(host: ModelHost) -> pb.ImageStats | None:
    hello, dispatcher = host.worker.hello, host.dispatcher
    if hello is None or hello.images is None:
        return None
    return pb.ImageStats(
        asked_images=dispatcher.counters.asked_images,
        encoded_images=dispatcher.counters.encoded_images,
        found_images=dispatcher.counters.found_images,
    )


def _draft_of(host: ModelHost) -> pb.DraftStats | None:
    settings, dispatcher = host.worker.settings, host.dispatcher
    if not settings.draft_model:
        return None
    return pb.DraftStats(
        model=settings.draft_model,
        draft_tokens=settings.draft_tokens,
        proposed_tokens=dispatcher.counters.proposed_tokens,
        accepted_tokens=dispatcher.counters.accepted_tokens,
    )


def _scheduler_of(dispatcher: Dispatcher) -> pb.SchedulerStats:
    preempted, loads = dispatcher.preemption.counters, dispatcher.loader.counters
    return pb.SchedulerStats(
        policy=dispatcher.queue.policy.name,
        waiting_requests=len(dispatcher.waiting),
        finished_requests=dispatcher.counters.finished,
        preempted_requests=preempted.preempted,
        resumed_requests=dispatcher.counters.resumed,
        swapped_requests=preempted.swapped,
        recomputed_requests=preempted.recomputed,
        swapped_blocks=preempted.swapped_blocks,
        recomputed_tokens=preempted.recomputed_tokens,
        load_decisions=loads.decided,
        cut_loads=loads.cut,
        split_loads=loads.beside,
        abandoned_loads=loads.abandoned,
        load_spent_s=loads.regret.spent_s,
        load_regret_s=loads.regret.lost_s,
        layerwise_loads=dispatcher.counters.layerwise_loads,
    )
