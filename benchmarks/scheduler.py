"""What a decision of the queue takes with 10,000 waiting, under each policy, and how long requests wait at the most.

With --waiting requests in the queue, times one decision after the other: taking out the next request, putting in a new
one, and moving one of which more or less is cached by now. decision_us are quantiles over all three, of the daemon's
queue and of the one that the scheduler for vLLM keeps (PrefixOrder, to which its RequestQueue hands everything; vLLM is
not needed). p99 has to be at most 50 us under every policy.

Then, in simulated time, requests whose prefix is on the GPU keep coming as fast as they are served: longest_wait_s of
one whose prefix is nowhere, under each policy with a limited queue. Relaxed-FPF has to stay within its bound, FPF may
starve it (none: it still waits at the end), and FPF with scheduler.starvation_bound_s has to stay within that bound.

    python -m benchmarks.scheduler --json benchmarks/results/scheduler.json
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import option, seed
from prefixd.integrations.engine.waiting.ordering import PrefixOrder
from prefixd.integrations.engine.waiting.seen_prefix import SeenPrefix
from prefixd_scheduler import POLICIES, WEIGHT_CLASSES, Distance, QueuedRequest, RequestQueue, create_policy

MOST_US = 50.0
_PROMPT = 1000


@dataclass(slots=True, eq=False)
class EngineRequest:
    """What is read of an engine's request."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    priority: int
    seen: SeenPrefix
    prefix: int


class Chance:
    """Requests of which anything may be cached anywhere."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def state(self) -> dict[str, Any]:
        some = self._random
        return {
            "weight": some.choice(WEIGHT_CLASSES),
            "cached_tokens": some.randrange(_PROMPT),
            "prefix": some.randrange(500),
        }

    def queued(self, number: int) -> QueuedRequest:
        made = QueuedRequest(number, number * 1e-3, _PROMPT, **self.state())
        made.ready_s, made.deadline_s = self._random.random(), number * 1e-3 + self._random.random()
        return made

    def engine(self, number: int) -> EngineRequest:
        tokens = self._random.randrange(1, _PROMPT)
        seen = SeenPrefix(tokens, ((self._random.choice((Distance.CPU, Distance.DISK)), tokens),))
        return EngineRequest(f"r{number}", number * 1e-3, _PROMPT, 0, seen, self._random.randrange(500))

    def ready_s(self) -> float:
        return self._random.random()

    def one_of(self, count: int) -> int:
        return self._random.randrange(count)


def daemon_decisions(policy: str, waiting: int, decisions: int, seed: int) -> Iterator[float]:
    """Seconds of each decision of the daemon's queue."""
    chance, queue = Chance(seed), RequestQueue(create_policy(policy), waiting + 1)
    for number in range(waiting):
        queue.push(chance.queued(number))
    now_s = waiting * 1e-3
    there = list(range(waiting))
    for number in range(waiting, waiting + decisions // 3):
        began_s = time.perf_counter()
        first = queue.window(1, now_s)[0]
        queue.remove(first.id)
        yield time.perf_counter() - began_s
        new = chance.queued(number)
        began_s = time.perf_counter()
        queue.push(new)
        yield time.perf_counter() - began_s
        there.append(number)
        moved = there[chance.one_of(len(there))]
        if moved in queue:
            state, ready_s = chance.state(), chance.ready_s()
            began_s = time.perf_counter()
            queue.update(moved, state["weight"], state["cached_tokens"], state["prefix"], ready_s=ready_s)
            yield time.perf_counter() - began_s


def vllm_decisions(policy: str, waiting: int, decisions: int, seed: int) -> Iterator[float]:
    """Seconds of each decision of the queue that vLLM's scheduler has."""
    chance = Chance(seed)
    order: PrefixOrder[EngineRequest] = PrefixOrder(
        create_policy(policy),
        1,
        may_move=lambda request: True,
        local_tokens=lambda request, before: 0,
        seen=lambda request: request.seen,
        prefix_key=lambda request, cached: request.prefix,
        ready_s=lambda request, local, seen: chance.ready_s(),
        deadline_s=lambda request: request.arrival_time + 1,
    )
    for number in range(waiting):
        order.add(chance.engine(number))
    order.refresh(waiting * 1e-3, 0)
    for number in range(waiting, waiting + decisions // 3):
        began_s = time.perf_counter()
        order.take()
        yield time.perf_counter() - began_s
        new = chance.engine(number)
        began_s = time.perf_counter()
        order.add(new)
        yield time.perf_counter() - began_s
        began_s = time.perf_counter()
        order.refresh(waiting * 1e-3, 0)  # looks at one request, which has moved or not
        yield time.perf_counter() - began_s


def longest_wait_s(policy: str, bound_s: float | None, limit: int, services: int) -> float | None:
    """How long a request waits of which nothing is cached, beside others that are on the GPU and come as fast as they
    are served, one a second, into a queue of `limit`. None: it still waits after `services` seconds."""
    queue, now_s = RequestQueue(create_policy(policy, bound_s), limit), 0.0
    for number in range(limit):
        far = number == limit - 1
        cached, weight, ready_s = (0, 1.0, 9.0) if far else (10, 4.0, 1.0)
        queue.push(QueuedRequest(number, now_s, 10, cached, weight, ready_s=ready_s))
    for number in range(limit, limit + services):
        now_s += 1.0
        first = queue.window(1, now_s)[0]
        queue.remove(first.id)
        if first.id == limit - 1:
            return now_s
        queue.push(QueuedRequest(number, now_s, 10, 10, 4.0, ready_s=1.0, deadline_s=now_s + 1))
    return None


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1e6 * each for each in seconds)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[len(ordered) * 99 // 100], "most": ordered[-1]}


def measure(options: argparse.Namespace, step: Callable[[], None]) -> dict[str, Any]:
    """Every policy in both queues, and the waits."""
    decision_us: dict[str, dict[str, dict[str, float]]] = {}
    gc.collect()
    gc.freeze()  # what the benchmark has built so far is no work of the queue's
    for where, decisions in (("daemon", daemon_decisions), ("vllm", vllm_decisions)):
        for policy in POLICIES:
            seconds = list(decisions(policy, options.waiting, options.decisions, options.seed))
            decision_us.setdefault(where, {})[policy] = _quantiles(seconds)
            step()
    gc.unfreeze()
    limit, bound_s = options.limit, float(options.limit)
    waits = {name: longest_wait_s(name, None, limit, options.services) for name in POLICIES}
    waits["fpf with a bound"] = longest_wait_s("fpf", bound_s, limit, options.services)
    return {
        "decision_us": decision_us,
        "decision_us_p99": max(each["p99"] for of_queue in decision_us.values() for each in of_queue.values()),
        "longest_wait_s": waits,
        "relaxed_fpf_bound_s": 4.0 * limit,
        "fpf_starvation_bound_s": bound_s + limit,
    }


def violations(result: dict[str, Any]) -> list[str]:
    """What is not as it has to be."""
    found = [
        f"{where}, {policy}: a decision takes {figures['p99']:.0f} us (p99), more than {MOST_US:g}"
        for where, policies in result["decision_us"].items()
        for policy, figures in policies.items()
        if figures["p99"] > MOST_US
    ]
    waits = result["longest_wait_s"]
    for name, bound in (("relaxed-fpf", "relaxed_fpf_bound_s"), ("fpf with a bound", "fpf_starvation_bound_s")):
        if waits[name] is None or waits[name] > result[bound]:
            found.append(f"{name}: a request waited {waits[name]} s, above the bound of {result[bound]:g} s")
    if waits["fpf"] is not None:
        found.append(f"fpf did not starve anybody ({waits['fpf']:g} s): the load is too low to show it")
    return found


@harness.benchmark(
    "scheduler",
    __doc__,
    option("--waiting", 10_000, "requests in the queue"),
    option("--decisions", 15_000, "timed for each policy"),
    option("--limit", 64, "queue limit of the simulation"),
    option("--services", 20_000, "seconds that it simulates"),
    seed("of what is cached where"),
)
def main(options: harness.Options) -> harness.Outcome:
    """What was measured, and what must hold of it."""
    with harness.progress("policies", 2 * len(POLICIES)) as step:
        result = measure(options, step)
    return harness.Outcome(result, violations(result))


if __name__ == "__main__":
    harness.run(main)
