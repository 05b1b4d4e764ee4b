"""The daemon in virtual time finds exactly what can be found, and takes exactly as long as its costs say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from prefixd.base.errors import ConfigError
from prefixd.planner.machine.hardware import HARDWARE
from prefixd.planner.machine.pass_costs import PeakCosts
from prefixd.planner.machine.planned_codecs import PlannedCodec
from prefixd.planner.plan_figures import PlanFigures
from prefixd.planner.planned_models import MODELS, LayerGroup
from prefixd.planner.virtual_daemon import Plan, simulate
from prefixd.planner.workload import PlannedRequest, Workload, achievable_rate, of_trace
from prefixd.settings import Settings
from prefixd.workloads.mooncake import TraceRequest

MakePlan = Callable[..., Plan]
Letters = Callable[..., Workload]


def found(figures: PlanFigures, blocks: int = 2) -> dict[str, float]:
    """Hits by tier in whole prompts of `blocks` blocks and a token."""
    tokens = figures.requests * (4 * blocks + 1)
    return {tier: round(share * tokens / (4 * blocks), 6) for tier, share in figures.hits.items() if share}


def test_what_fits_is_found_and_the_rest_is_not(make_plan: MakePlan, one_by_one: Letters) -> None:
    # A request takes a frame for each block of its prefix, and one for the token behind them. LRU, leaves first:
    #   A miss   B miss   A 2   B 2   C miss, drops A's second block
    #   A 1, drops B's second   B 1, drops C's second   C 1, drops A's second
    (figures,) = simulate(make_plan(gpu=6), [one_by_one("ABABCABC")])
    assert found(figures) == {"gpu": 7 / 2}
    assert figures.requests == 8 and figures.evicted_blocks["gpu"] == 4


def test_what_falls_out_of_the_gpu_is_found_below(make_plan: MakePlan, one_by_one: Letters) -> None:
    (figures,) = simulate(make_plan(gpu=5, cpu=16), [one_by_one("ABCABC")])
    assert sum(found(figures).values()) == 3 and found(figures)["cpu"] >= 2
    (figures,) = simulate(make_plan(gpu=5, cpu=3, disk=64), [one_by_one("ABCDABCD")])
    assert sum(found(figures).values()) == 4 and found(figures)["disk"] >= 2
    assert figures.disk_written_bytes >= 8 * 4096 and figures.disk_read_bytes >= 4 * 4096


def test_the_disk_finds_what_lay_there_when_its_request_came(make_plan: MakePlan) -> None:
    """Looking ahead moves it to the CPU tier before its turn, and changes nothing about where it was found."""

    def requests(arrival_s: float) -> list[PlannedRequest]:
        return [
            PlannedRequest(arrival_s, lambda first=first: np.arange(first, first + 9, dtype=np.uint32), 9, 1)
            for first in range(0, 1200, 100)
        ]

    shares = []
    for look_ahead in (0, 8):
        plan = make_plan(gpu=5, cpu=8, disk=64, scheduler__look_ahead=look_ahead)
        (figures,) = simulate(plan, [Workload("twice", requests(0.0) + requests(1000.0))])
        shares.append({tier: round(share * 24 * 9 / 4) for tier, share in figures.hits.items()})  # in blocks
    assert shares[0] == shares[1]
    assert sum(shares[0].values()) == 24 and shares[0]["disk"] >= 24 - 5 - 8


def test_a_disk_of_half_the_bytes_finds_what_one_of_twice_the_size_does(
    make_plan: MakePlan, one_by_one: Letters
) -> None:
    def run(disk: int, stored: float) -> PlanFigures:
        plan = make_plan(gpu=5, cpu=3, disk=disk)
        (figures,) = simulate(replace(plan, codec=PlannedCodec("int8", stored)), [one_by_one("ABCDEF" * 2)])
        return figures

    few, many, coded = run(6, 1.0), run(12, 1.0), run(6, 0.5)
    assert found(few) != found(many) == found(coded)
    assert coded.disk_written_bytes == many.disk_written_bytes // 2 > 0
    assert coded.disk_read_bytes == many.disk_read_bytes // 2 > 0
    assert many.disk_saved_bytes == 0 and coded.disk_saved_bytes == 6 * 4096, "twelve blocks are in it"


def test_decoding_is_waited_for(make_plan: MakePlan, one_by_one: Letters) -> None:
    plan = make_plan(gpu=5, cpu=3, disk=64, scheduler__load="always")
    slow, fast = (
        simulate(replace(plan, codec=PlannedCodec("int8", 0.5, 1e9, speed)), [one_by_one("ABCDABCD")])[0]
        for speed in (4096.0, 1e9)
    )
    assert slow.hits == fast.hits
    assert slow.elapsed_s == pytest.approx(fast.elapsed_s + 2 * slow.disk_read_bytes / 4096, rel=0.01)


def test_a_disk_that_holds_one_coded_block_is_planned(make_plan: MakePlan, one_by_one: Letters) -> None:
    def plan(disk: int) -> Plan:
        three = (LayerGroup(layers=3, kv_heads=1, head_dim=256),)  # three times as many bytes a block
        exact = make_plan(6, 3, disk, three, disk__codec="int8", tenants__team__codec="k8v4")
        return replace(exact, codec=PlannedCodec("int8", 0.5))

    assert simulate(plan(2), [one_by_one("ABC", blocks=1)])[0].disk_saved_bytes == 3 * 4096 // 2
    with pytest.raises(ConfigError, match=r"disk\.bytes = 4096 holds no block: one of 4 tokens has 6144 bytes there"):
        simulate(plan(1), [one_by_one("A", blocks=1)])


def test_no_cache_finds_nothing(make_plan: MakePlan, one_by_one: Letters) -> None:
    (figures,) = simulate(make_plan(gpu=32, cpu=32, cache__enabled=False), [one_by_one("AAAA")])
    assert figures.hit_rate == 0 and figures.disk_written_bytes == 0


def test_time_is_what_the_passes_take(make_plan: MakePlan, one_by_one: Letters) -> None:
    (figures,) = simulate(make_plan(gpu=32), [one_by_one("ABA", output_tokens=10)])
    assert figures.ttft_s.p95 == pytest.approx(1.0, abs=1e-2)
    assert figures.elapsed_s == pytest.approx(30.0, abs=1e-2) and figures.gpu_busy == pytest.approx(1.0, abs=1e-2)
    assert figures.output_tokens_per_s == pytest.approx(1.0, abs=1e-2)


def test_a_prompt_longer_than_a_pass_takes_several(make_plan: MakePlan, one_by_one: Letters) -> None:
    (figures,) = simulate(make_plan(gpu=32, worker__max_step_tokens=8), [one_by_one("A", blocks=4)])
    assert figures.ttft_s.p50 == pytest.approx(3.0, abs=1e-2), "17 tokens, 8 at a time"


def test_a_request_that_comes_while_others_decode_joins_them(make_plan: MakePlan) -> None:
    def request(arrival_s: float, output_tokens: int, first: int) -> PlannedRequest:
        return PlannedRequest(arrival_s, lambda: np.arange(first, first + 5, dtype=np.uint32), 5, output_tokens)

    workload = Workload("two", [request(0.0, 20, 0), request(4.5, 2, 100)])
    (figures,) = simulate(make_plan(gpu=32, worker__max_running=2), [workload])
    assert figures.elapsed_s == pytest.approx(20.0, abs=1e-2), "a stretch of alike passes ends where the other begins"
    assert figures.ttft_s.p95 == pytest.approx(1.5, abs=1e-2), "the pass that runs, and its own"


def test_followers_come_after_the_answer_and_find_it(make_plan: MakePlan) -> None:
    answer = tuple(range(900, 908))
    first = np.arange(9, dtype=np.uint32)
    second = np.concatenate([first, np.array(answer, np.uint32), np.arange(500, 504, dtype=np.uint32)])
    turns = [
        PlannedRequest(0.0, lambda: first, 9, 8, answer),
        PlannedRequest(5.0, lambda: second, 21, 1, after=0),
    ]
    (figures,) = simulate(make_plan(gpu=32), [Workload("chat", turns)])
    # The last token that was sampled is in no memory: 16 of 17 tokens are full blocks.
    assert figures.hit_rate == 16 / 30 and figures.elapsed_s == pytest.approx(8 + 5 + 1, abs=1e-2)


def test_windows_are_the_models(make_plan: MakePlan, one_by_one: Letters) -> None:
    groups = (LayerGroup(1, 1, 256), LayerGroup(3, 1, 256, 4))
    plan = make_plan(gpu=64, groups=groups, worker__max_running=2)
    (figures,) = simulate(plan, [one_by_one("ABAB", blocks=6)])
    assert found(figures, 6) == {"gpu": 2}


@pytest.mark.slow
def test_the_same_plan_gives_the_same_figures(make_plan: MakePlan) -> None:
    chance = np.random.default_rng(1)
    prompts = [np.repeat(chance.integers(0, 3, 6), 4).astype(np.uint32) for _ in range(60)]
    requests = [PlannedRequest(0.7 * n, partial(np.copy, p), 24, 3 + n % 5) for n, p in enumerate(prompts)]
    plan = make_plan(gpu=40, cpu=40, disk=100, worker__max_running=4, scheduler__look_ahead=4)
    first, second = (simulate(plan, [Workload("chance", requests)]) for _ in range(2))
    assert first == second and first[0].hit_rate > 0
    assert first[0].requests == 60


def test_two_workloads_share_one_cache(make_plan: MakePlan, one_by_one: Letters) -> None:
    warm, run = simulate(make_plan(gpu=32), [one_by_one("AB"), one_by_one("AB")])
    assert warm.hit_rate == 0 and found(run) == {"gpu": 2}
    assert run.elapsed_s == pytest.approx(2.0, abs=1e-2), "each from its own beginning"


def test_requests_that_never_fit_are_refused_and_counted(make_plan: MakePlan, one_by_one: Letters) -> None:
    long, short = one_by_one("A", blocks=50).requests, one_by_one("B").requests
    (figures,) = simulate(make_plan(gpu=8), [Workload("mixed", [*long, *short], outstanding=1)])
    assert (figures.requests, figures.refused) == (1, 1)
    with pytest.raises(ConfigError, match="none of the 1 requests fits the GPU tier"):
        simulate(make_plan(gpu=8), [one_by_one("A", blocks=50)])


def test_a_gpu_tier_for_no_request_is_refused(make_plan: MakePlan, one_by_one: Letters) -> None:
    with pytest.raises(ConfigError, match="smallest request needs 2"):
        simulate(make_plan(gpu=1), [one_by_one("A")])
    with pytest.raises(ConfigError, match="auto"):
        simulate(make_plan(gpu=1, gpu__bytes="auto"), [one_by_one("A")])


def test_what_a_preempted_request_has_computed_itself_is_no_hit() -> None:
    """No two prompts have anything in common; what gave way is loaded again from the CPU tier beside computing."""
    asked = [
        TraceRequest(1000 * (at // 3), 512 * 10 + 7, 2500, tuple(range(100 * at, 100 * at + 10))) for at in range(30)
    ]
    model = MODELS["llama-3.1-8b"]
    sizes = {"gpu.bytes": 6 << 30, "cpu.bytes": 24 << 30, "worker.block_tokens": 512, "worker.max_running": 64}
    settings = Settings.load(None, {"worker.embedded": True, "scheduler.policy": "fcfs", **sizes}, {})
    plan = Plan(model, settings, PeakCosts(HARDWARE["h100"], model), HARDWARE["h100"].ways)
    (figures,) = simulate(plan, [of_trace("different", asked)])
    assert figures.preempted > 0 and figures.hit_rate == 0


def test_no_more_is_found_than_could_be_where_requests_are_refused() -> None:
    asked = [TraceRequest(at, 512 * len(ids), 1, tuple(ids)) for at, ids in enumerate([[1], [*range(9, 99)], [1]])]
    model = MODELS["llama-3.1-8b"]
    values = {"worker.embedded": True, "worker.block_tokens": 256, "gpu.bytes": 1 << 30, "cpu.bytes": 0}
    plan = Plan(model, Settings.load(None, values, {}), PeakCosts(HARDWARE["h100"], model), HARDWARE["h100"].ways)
    workload = of_trace("a long one", asked)
    (figures,) = simulate(plan, [workload], achievable=partial(achievable_rate, asked))
    assert figures.refused == 1 and figures.achievable_hit_rate == 0.5
    assert 0 < figures.hit_rate <= figures.achievable_hit_rate
