"""The scheduler class for vLLM's `--scheduler-cls`: it keeps the waiting queue in the order of a policy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from prefixd.base.clocks import elapsed_s
from prefixd.base.errors import ConfigError
from prefixd.integrations.engine.waiting.arrival_times import Arrivals
from prefixd.integrations.engine.waiting.ordering import PrefixOrder, Waits
from prefixd.integrations.engine.waiting.ready import time_to_ready
from prefixd.integrations.engine.waiting.seen_prefix import NOTHING_SEEN, SeenPrefix
from prefixd.integrations.vllm.log import log
from prefixd.integrations.vllm.options import ConnectorOptions
from prefixd.integrations.vllm.scheduling.local import LocalPrefixes
from prefixd.integrations.vllm.scheduling.waiting_queue import PolicyRequestQueue
from prefixd_scheduler import CostModel, create_policy


class FastestPrefixFirstScheduler(Scheduler):
    """vLLM's scheduler with a waiting queue in the order of one of `prefixd_scheduler`'s policies.

    The nearest prefix is in vLLM's own cache; then come the CPU tier, the disk and the shared store, from which
    PrefixdConnector loads; then none. Without the connector only vLLM's own cache counts. vLLM still decides which
    requests begin, which blocks they get and which are preempted.

    **Begun requests stay**: a request that vLLM has begun (preempted, holding KV blocks) stays in front of those that
    it has not, and a request that is loading its prefix goes first as always.

    **Cost**: `PrefixOrder` keeps the order as requests come and go. At the beginning of a step that can take requests
    it reads the cached prefixes again of the next `look_ahead` requests, of as many without an answer from prefixd, and
    of as many of the others in turn.

    **Waiting time** under Relaxed-FPF: if at most L requests wait at a time and one is begun at least every s seconds,
    a request waits at most 4 * L * s (`prefixd_scheduler.RelaxedFastestPrefixFirst`). A preemption puts one more
    request before it. Requests that vLLM has to pass over (no room for a LoRA adapter, a grammar or a look-up that is
    not ready) wait for that besides. The figures are in `waits` and in the log at shutdown. The policies that may
    starve promise `starvation_bound_s` plus L * s if that option is set, else nothing.

    **Deadlines**: seconds from its arrival in a request's `SamplingParams.extra_args["deadline_s"]` (over HTTP:
    `"vllm_xargs": {"deadline_s": 2.5}`), for the policy "deadline".

    **Priorities**: with `--scheduling-policy priority` the classes come first, as in vLLM, and the policy orders the
    requests of a class. With "fcfs" vLLM ignores priorities, and so does this scheduler.

    **Time** is measured by a monotonic clock (`prefixd.base.clocks.elapsed_s`): steps of the wall clock change neither
    the order nor the bound.

    Settings: `policy`, `starvation_bound_s` and `look_ahead` in the connector's `kv_connector_extra_config`
    (`ConnectorOptions`); inside MultiConnector too.

    Raises:
        ConfigError: an option is wrong, or the model needs a scheduler of its own.
    """

    clock: Callable[[], float] = staticmethod(elapsed_s)
    wall: Callable[[], float] = staticmethod(time.time)
    """The clock of vLLM's stamps (`Request.arrival_time`), in seconds since 1970."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # vLLM chooses between synchronous and asynchronous scheduling before it asks for the class, and each needs
        # its own scheduler: the asynchronous one counts on outputs that come a step later.
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        if cls is FastestPrefixFirstScheduler and config.scheduler_config.async_scheduling:
            cls = AsyncFastestPrefixFirstScheduler
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.vllm_config.model_config.is_diffusion:
            raise ConfigError("vLLM schedules diffusion models with a class of its own; start without --scheduler-cls")
        connector = find_connector(self.connector)
        if connector is None:
            log.info("there is no PrefixdConnector: waiting requests are ordered by vLLM's own prefix cache alone")
        options: ConnectorOptions = getattr(connector, "options", ConnectorOptions())
        ask: Callable[[str], SeenPrefix | None] = getattr(connector, "seen_prefix", _nothing_seen)
        self._prepare: Callable[[Any, int], None] = getattr(connector, "prepare", lambda request, local_tokens: None)
        self._prepared: Callable[[], int] = getattr(connector, "prepared_requests", lambda: 0)
        self._local = LocalPrefixes(self.kv_cache_manager)

        unobserved = CostModel()
        ready_s: Callable[[Any, int, SeenPrefix], float] = getattr(
            connector,
            "ready_s",
            lambda request, local, seen: time_to_ready(unobserved, request.num_tokens, local, seen, lambda tokens: 0),
        )

        def seen(request: Any) -> SeenPrefix | None:
            return NOTHING_SEEN if request.skip_reading_prefix_cache else ask(request.request_id)

        def prefix_key(request: Any, cached_tokens: int) -> Hashable:
            end = min(cached_tokens // self.hash_block_size, len(request.block_hashes))
            key: Hashable = request.block_hashes[end - 1] if end else None
            return key

        self.waits = Waits()
        self._arrivals = Arrivals(self.clock, self.wall)
        self._order: PrefixOrder[Any] = PrefixOrder(
            create_policy(options.policy, options.starvation_bound_s),
            options.look_ahead,
            may_move=_may_move,
            local_tokens=self._local.tokens,
            seen=seen,
            prefix_key=prefix_key,
            ready_s=ready_s,
            arrival_s=self._arrivals.arrival_s,
            deadline_s=lambda request: self._arrivals.arrival_s(request) + _due_after_s(request),
            by_priority=self.policy is SchedulingPolicy.PRIORITY,
        )
        self.waiting = PolicyRequestQueue(self._order)
        log.info("waiting requests are kept in the order of %s", options.policy)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Reads the cached prefixes of some waiting requests again, then schedules a step as vLLM does."""
        now_s = self.clock()
        self.waits.waiting(len(self.waiting), now_s)
        places = self.max_num_running_reqs - len(self.running)
        if not self.waiting or places <= 0:
            return super().schedule(*args, **kwargs)  # vLLM would not look at the queue
        self._order.refresh(now_s, places)
        for request, local_tokens in self._order.next_to_load(self._prepared()):
            self._prepare(request, local_tokens)
        output = super().schedule(*args, **kwargs)
        if begun := self._order.begun:
            new = [self._arrivals.arrival_s(request) for request in begun if not request.num_preemptions]
            self.waits.begun(new, now_s, bool(self.waiting))
        return output

    def shutdown(self) -> None:
        """Ends vLLM's scheduler and logs how long requests waited."""
        waits = self.waits
        promise = f"; Relaxed-FPF promises {waits.bound_s:.3f} s" if self._order.policy.name == "relaxed-fpf" else ""
        log.info(
            "longest wait %.3f s, with %d requests waiting at most and one begun every %.3f s at least%s",
            *(waits.longest_s, waits.most, waits.slowest_s, promise),
        )
        super().shutdown()


class AsyncFastestPrefixFirstScheduler(FastestPrefixFirstScheduler, AsyncScheduler):
    """FastestPrefixFirstScheduler for asynchronous scheduling, which takes its place where vLLM has chosen that."""


_NOT_BEGUN = frozenset((RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR))


def _may_move(request: Any) -> bool:
    return request.status in _NOT_BEGUN and request.num_preemptions == 0 and request.num_computed_tokens == 0


def _nothing_seen(request_id: str) -> SeenPrefix | None:
    return NOTHING_SEEN


def _due_after_s(request: Any) -> float:
    """Seconds from a request's arrival until its first token is due; infinite without a deadline."""
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    if (given := extra.get("deadline_s")) is None:
        return math.inf
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds >= 0:
        log.warning(
            "request %s: deadline_s = %r is no number of seconds; it has no deadline", request.request_id, given
        )
        return math.inf
    return seconds


def find_connector(connector: Any) -> Any:
    """The PrefixdConnector: vLLM's connector itself, or one inside its MultiConnector; None if there is none."""
    if connector is None or hasattr(connector, "seen_prefix"):
        return connector
    children = getattr(connector, "_connectors", ())  # in 0.29 they have no public name
    return next((found for child in children if (found := find_connector(child)) is not None), None)
