"""FastestPrefixFirstScheduler in a real engine: its gain on a queue of which a third is cached, and its promise."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest, EngineResult
from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.vllm.forked import ForkedEngine
from tests.vllm.served import Expected, NewRequests, StartEngine, always, make_prompt, tokens_of

pytestmark = pytest.mark.timeout(1600)  # up to seven engines, one after the other

OURS = "prefixd.integrations.vllm.FastestPrefixFirstScheduler"
QUEUE = 48
PREFIX = 768
TAIL = 40
GAIN = 1.3
POLICIES = ("fcfs", "relaxed-fpf", "lpm", "shortest-ready")
"""Those whose orders differ where all requests come at once and none has a deadline."""

# A prompt takes several steps. There is room for all: what is compared is the order, not what it does to vLLM's cache.
ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20}

Partial = tuple[list[EngineRequest], list[list[int]]]
"""A queue, and the beginnings of its prompts that are cached."""


@pytest.fixture(scope="module")
def cached() -> list[list[int]]:
    """The prefixes of a third of the queue."""
    return [make_prompt(1000 + number, PREFIX) for number in range(QUEUE // 3)]


@pytest.fixture(scope="module")
def queue(cached: list[list[int]]) -> list[EngineRequest]:
    """Requests of equal length, those with a cached prefix strewn among the others."""
    prompts = [prefix + make_prompt(2000 + number, TAIL) for number, prefix in enumerate(cached)]
    prompts += [make_prompt(3000 + number, PREFIX + TAIL) for number in range(QUEUE - len(cached))]
    random.Random(64).shuffle(prompts)
    return [EngineRequest(prompt, 3) for prompt in prompts]


@pytest.fixture(scope="module")
def partial() -> Partial:
    """Prompts of many lengths, and of a third of them the beginning that is cached, from a quarter of it to nearly
    all."""
    some = random.Random(11)
    prompts = [make_prompt(4000 + number, some.randrange(128, 1024)) for number in range(QUEUE)]
    beginnings = [prompt[: int(some.uniform(0.25, 0.95) * len(prompt))] for prompt in prompts[::3]]
    return [EngineRequest(prompt, 3) for prompt in prompts], beginnings


@pytest.fixture(scope="module")
def warm_daemon(llama: Path, cached: list[list[int]], partial: Partial) -> Iterator[DaemonProcess]:
    """A daemon whose CPU tier has the prefixes of both queues, from an engine that is gone."""
    prompts = [*(prefix + [5] * TAIL for prefix in cached), *([*prefix, 5] for prefix in partial[1])]
    with DaemonProcess({"cpu.bytes": "256MiB", "disk.bytes": 0}) as daemon:
        with ForkedEngine(llama, kv_transfer=always(daemon.address), **ENGINE) as engine:
            engine.generate([EngineRequest(prompt, 1) for prompt in prompts])
            engine.wait_until_idle()
        yield daemon


def mean_ttft_s(results: Sequence[EngineResult]) -> float:
    return sum(result.ttft_s for result in results) / len(results)


def mean_wait(results: Sequence[EngineResult]) -> float:
    """Mean TTFT as a share of the time that the whole queue took, which is the same work in any order: two processes of
    the same vLLM differ in speed by up to 6% for as long as they live, and the machine's speed changes, too."""
    return mean_ttft_s(results) / max(result.ttft_s for result in results)


def mean_work(queue: Sequence[EngineRequest], results: Sequence[EngineResult]) -> float:
    """Prompt tokens that had been computed when a request had its first token, on the average: TTFT without a clock."""
    done = total = 0
    for request, result in sorted(zip(queue, results, strict=True), key=lambda pair: pair[1].first_token_order):
        done += len(request.prompt) - result.cached_tokens
        total += done
    return total / len(results)


def promise(engine: EngineProcess) -> tuple[float, int, float]:
    """The longest wait in seconds, the longest queue, and what Relaxed-FPF promises, from the log at its end."""
    said = re.search(
        r"longest wait ([\d.]+) s, with (\d+) requests waiting at most and one begun every ([\d.]+) s at least; "
        r"Relaxed-FPF promises ([\d.]+) s",
        engine.log.read_text(),
    )
    assert said, engine.last_words()
    return float(said[1]), int(said[2]), float(said[4])


def run(engine: EngineProcess, queue: list[EngineRequest], warm: Sequence[EngineRequest] = ()) -> list[EngineResult]:
    """The whole queue at once, with nothing in vLLM's own cache but what `warm` leaves there."""
    assert engine.reset_prefix_cache()
    engine.generate(warm)
    return engine.generate(queue)


def test_a_third_in_the_cpu_tier(
    llama: Path,
    warm_daemon: DaemonProcess,
    queue: list[EngineRequest],
    cached: list[list[int]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    # Engines that save nothing: else the first would cache everything for the second.
    kv_transfer = always(warm_daemon.address, save=False)
    with (
        ForkedEngine(llama, kv_transfer=kv_transfer, log=tmp_path / "vllm.log", **ENGINE) as vllm,
        ForkedEngine(llama, kv_transfer=kv_transfer, log=tmp_path / "ours.log", scheduler_cls=OURS, **ENGINE) as ours,
    ):
        in_order, fastest_first = run(vllm, queue), run(ours, queue)
        assert ours.metrics().external_hits == len(cached) * PREFIX
    longest_s, most, bound_s = promise(ours)
    vllm_s, ours_s = mean_ttft_s(in_order), mean_ttft_s(fastest_first)
    vllm_wait, ours_wait = mean_wait(in_order), mean_wait(fastest_first)
    vllm_work, ours_work = mean_work(queue, in_order), mean_work(queue, fastest_first)
    with capsys.disabled():
        print(
            f"\n  mean TTFT {vllm_s:.3f} s in vLLM's order, {ours_s:.3f} s in ours: {vllm_s / ours_s:.2f} times better "
            f"({vllm_wait / ours_wait:.2f} of the time for all, {vllm_work / ours_work:.2f} in computed tokens); "
            f"longest wait {longest_s:.2f} s, Relaxed-FPF promises {bound_s:.2f} s"
        )
    assert [result.token_ids for result in fastest_first] == [result.token_ids for result in in_order]
    for results in (in_order, fastest_first):
        assert sum(result.cached_tokens for result in results) == len(cached) * PREFIX
    assert vllm_work / ours_work >= GAIN
    assert most == QUEUE
    assert 0 < longest_s <= bound_s


def test_shortest_time_to_ready_where_prefixes_are_partial(
    llama: Path, warm_daemon: DaemonProcess, partial: Partial, capsys: pytest.CaptureFixture[str]
) -> None:
    queue, beginnings = partial
    work: dict[str, float] = {}
    seconds: dict[str, float] = {}
    tokens: list[list[int]] = []
    for policy in POLICIES:
        kv_transfer = always(warm_daemon.address, save=False, policy=policy)
        with ForkedEngine(llama, kv_transfer=kv_transfer, scheduler_cls=OURS, **ENGINE) as engine:
            results = run(engine, queue)
        work[policy], seconds[policy] = mean_work(queue, results), mean_ttft_s(results)
        tokens.append([result.token_ids for result in results])
        assert sum(result.cached_tokens > 0 for result in results) >= len(beginnings) - 2, "but for less than a block"
    with capsys.disabled():
        print(f"\n  mean TTFT in tokens computed before, and in seconds: {work}, {seconds}")
    assert all(each == tokens[0] for each in tokens)
    assert all(work["shortest-ready"] <= other for other in work.values())


def test_a_third_in_vllms_own_cache(llama: Path, queue: list[EngineRequest], cached: list[list[int]]) -> None:
    """Without a connector."""
    warm = [EngineRequest([*prefix, *[5] * TAIL], 1) for prefix in cached]
    results = []
    for scheduler_cls in (None, OURS):
        with ForkedEngine(llama, scheduler_cls=scheduler_cls, **ENGINE) as engine:
            results.append(run(engine, queue, warm))
    vllm, ours = results
    assert [result.token_ids for result in ours] == [result.token_ids for result in vllm]
    assert sum(result.cached_tokens for result in ours) == len(cached) * PREFIX
    assert mean_work(queue, vllm) / mean_work(queue, ours) >= GAIN


def test_the_same_tokens_when_blocks_are_scarce_and_priorities_differ(
    llama: Path, daemon: DaemonProcess, make_engine: StartEngine, expected: Expected, new_requests: NewRequests
) -> None:
    plain = new_requests(*range(160, 280, 10), max_tokens=120)
    requests = [replace(request, priority=place % 3) for place, request in enumerate(plain)]
    scarce = {"num_gpu_blocks_override": 40, "max_model_len": 1024}
    with make_engine(llama, daemon, scheduler_cls=OURS, scheduling_policy="priority", **scarce) as engine:
        for _ in range(2):
            results = engine.generate(requests)
            assert tokens_of(results) == expected(requests)
            engine.wait_until_idle()
            assert engine.reset_prefix_cache()
        metrics = engine.metrics()
    assert metrics.preemptions > 0
    assert metrics.external_hits > 0
    urgent, patient = ([r.first_token_order for r in results[place::3]] for place in (0, 2))
    assert sum(urgent) < sum(patient)
