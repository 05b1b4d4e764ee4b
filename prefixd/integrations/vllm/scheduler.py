"""vLLM's scheduler with its waiting queue in the order of the nearest prefix: for `--scheduler-cls`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from prefixd.errors import ConfigError
from prefixd.integrations.engine.ordering import PrefixOrder, Waits
from prefixd.integrations.engine.seen import SeenPrefix
from prefixd.integrations.vllm.local import LocalPrefixes
from prefixd.integrations.vllm.log import log
from prefixd.integrations.vllm.options import ConnectorOptions
from prefixd_scheduler import create_policy


class FastestPrefixFirstScheduler(Scheduler):
    """vLLM's scheduler; at the beginning of a step that can take requests, the waiting queue is put in order.

    The order is that of `prefixd_scheduler`'s policies by distance: 0 for a prefix in vLLM's own cache, 1 and 2 for
    one that PrefixdConnector would load from the CPU or disk tier, 3 for none. Without the connector only vLLM's own
    cache counts. All else is vLLM's: what is begun, what it may use, what is preempted.

    **Never moved**: a request that vLLM has begun (preempted, loading, holding KV blocks) keeps its place, and whoever
    holds KV blocks goes first as always.

    **Look-ahead**: the first `look_ahead` (W) requests of the queue, its oldest, are put in order; the others keep
    vLLM's order behind them, and the oldest of them enters the window when one leaves it.

    **Waiting time** under Relaxed-FPF: if at most L requests wait at a time and one is begun at least every s
    seconds, a request waits at most 4 * L * s, whatever W is: it is in the window after L - W others have been begun,
    long before the age of 3 * L * s from which on nobody who comes later passes it (see
    `prefixd_scheduler.RelaxedFastestPrefixFirst`). A preemption puts one more request before it. What vLLM has to
    pass over for a reason of its own (no place for a LoRA adapter, a grammar or a look-up that is not ready) waits
    for that besides. The figures are in `waits` and in the log at shutdown. FPF promises nothing.

    **Priorities**: with `--scheduling-policy priority` the classes come first, as in vLLM, and the order is one among
    requests of a class. vLLM's heap, which has one order only, gives way to a plain queue, sorted by class in each
    step. With "fcfs" vLLM ignores priorities, and so does this.

    Settings: `policy` and `look_ahead` in `kv_connector_extra_config` (see ConnectorOptions); Relaxed-FPF and 256
    without the connector.

    Raises:
        ConfigError: an option is wrong, or the model needs a scheduler of its own.
    """

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
        options = _options(self.vllm_config.kv_transfer_config)
        by_priority = self.policy is SchedulingPolicy.PRIORITY
        if by_priority:
            self.waiting = create_request_queue(SchedulingPolicy.FCFS)
        ask: Callable[[str], SeenPrefix | None] = getattr(self.connector, "seen_prefix", _nothing_seen)
        self._prepare: Callable[[Any, int], None] = getattr(
            self.connector, "prepare", lambda request, local_tokens: None
        )
        self._prepared = options.prefetch
        self._local = LocalPrefixes(self.kv_cache_manager)

        def seen(request: Any) -> SeenPrefix | None:
            return None if request.skip_reading_prefix_cache else ask(request.request_id)

        def prefix_key(request: Any, cached_tokens: int) -> Hashable:
            end = min(cached_tokens // self.hash_block_size, len(request.block_hashes))
            key: Hashable = request.block_hashes[end - 1] if end else None
            return key

        self.waits = Waits()
        self._order: PrefixOrder[Any] = PrefixOrder(
            create_policy(options.policy),
            options.look_ahead,
            may_move=_may_move,
            local_tokens=self._local.tokens,
            seen=seen,
            prefix_key=prefix_key,
            by_priority=by_priority,
        )
        log.info("waiting requests are put in order by %s, %d at a time", options.policy, options.look_ahead)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step: the waiting queue is put in order, then vLLM schedules."""
        now_s = time.time()
        self.waits.waiting(len(self.waiting), now_s)
        if not self.waiting or len(self.running) >= self.max_num_running_reqs:
            return super().schedule(*args, **kwargs)  # vLLM would not look at the queue
        queue = self._order.arrange(self.waiting, now_s)
        for request, local_tokens in self._order.to_load(self._prepared):
            self._prepare(request, local_tokens)
        self.waiting.clear()
        self.waiting.extend(queue)
        output = super().schedule(*args, **kwargs)
        if (taken := len(queue) - len(self.waiting)) > 0:
            begun = itertools.islice((request for request in queue if request.status in _BEGUN), taken)
            self.waits.begun([r.arrival_time for r in begun if not r.num_preemptions], now_s, bool(self.waiting))
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
    """The same for asynchronous scheduling; FastestPrefixFirstScheduler becomes this where vLLM has chosen that."""


_NOT_BEGUN = frozenset((RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR))
_BEGUN = frozenset((RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS))


def _may_move(request: Any) -> bool:
    return request.status in _NOT_BEGUN and request.num_preemptions == 0 and request.num_computed_tokens == 0


def _nothing_seen(request_id: str) -> SeenPrefix | None:
    return None


def _options(kv_transfer_config: Any) -> ConnectorOptions:
    if kv_transfer_config is None or kv_transfer_config.kv_connector != "PrefixdConnector":
        return ConnectorOptions()
    return ConnectorOptions.parse(kv_transfer_config.kv_connector_extra_config)
