"""The text analysis workload: the same requests each time, tiers of the promised size, true figures."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from prefixd.settings import Settings
from prefixd.workloads.latency_figures import RequestResult, digest, quantile, summarise
from prefixd.workloads.text_analysis import (
    BLOCK_BYTES,
    CONFIGS,
    Serving,
    TextAnalysis,
    TierSizes,
    serving_of,
)


def test_the_same_arguments_give_the_same_prompts() -> None:
    workload = TextAnalysis(prefixes=4, requests=32, seed=3)
    prompts = workload.prompts()
    assert prompts == TextAnalysis(prefixes=4, requests=32, seed=3).prompts()
    assert prompts != TextAnalysis(prefixes=4, requests=32, seed=4).prompts()


def test_prompts_are_a_shared_prefix_and_a_body_of_their_own() -> None:
    workload = TextAnalysis(prefixes=4, requests=32, prefix_tokens=64, body_tokens=16)
    prompts = workload.prompts()
    assert {len(prompt) for prompt in prompts} == {80}
    prefixes = {tuple(prompt[:64]) for prompt in prompts}
    assert len(prefixes) == 4
    assert len({tuple(prompt[64:]) for prompt in prompts}) == 32
    warm_up = workload.warm_up_prompts()
    assert {tuple(prompt[:64]) for prompt in warm_up} == prefixes and len(warm_up) == 4
    assert not {tuple(prompt) for prompt in warm_up} & {tuple(prompt) for prompt in prompts}


def test_a_header_is_the_beginning_of_every_prefix() -> None:
    plain, headed = (TextAnalysis(prefixes=4, requests=32, prefix_tokens=64, header_tokens=n) for n in (0, 16))
    prompts = headed.prompts() + headed.warm_up_prompts()
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 4
    assert [prompt[16:] for prompt in prompts] == [p[16:] for p in plain.prompts() + plain.warm_up_prompts()]


@pytest.mark.parametrize("header_tokens", [0, 16])
def test_new_prompts_have_the_header_and_prefixes_that_nobody_else_has(header_tokens: int) -> None:
    workload = TextAnalysis(
        prefixes=4, requests=32, prefix_tokens=64, body_tokens=16, repeats=2, header_tokens=header_tokens, new=0.25
    )
    known = {tuple(prompt[:64]) for prompt in workload.warm_up_prompts()}
    rounds = [workload.prompts(repeat) for repeat in range(2)]
    assert rounds == [workload.prompts(repeat) for repeat in range(2)]
    new = [tuple(prompt[:64]) for prompts in rounds for prompt in prompts if tuple(prompt[:64]) not in known]
    assert len(new) == len(set(new)) == 16 == 2 * workload.new_requests
    assert {prefix[:header_tokens] for prefix in new} == {prefix[:header_tokens] for prefix in known}
    assert {len(prompt) for prompts in rounds for prompt in prompts} == {80}
    tiers = TierSizes(gpu_prefixes=1, cpu_prefixes=1, disk_prefixes=4)
    without = tiers.overrides(replace(workload, new=0.0))
    assert tiers.overrides(workload)["disk.bytes"] - without["disk.bytes"] == 16 * 5 * BLOCK_BYTES


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="prefixes = 0"):
        TextAnalysis(prefixes=0, requests=1)
    with pytest.raises(ValueError, match="header_tokens = 64: must be 0 or more, and less than the prefix_tokens, 64"):
        TextAnalysis(prefixes=1, requests=1, prefix_tokens=64, header_tokens=64)
    with pytest.raises(ValueError, match=r"new = 1\.5: must be a share"):
        TextAnalysis(prefixes=1, requests=1, new=1.5)


def test_tiers_are_sized_in_prefixes_with_room_for_what_runs() -> None:
    workload = TextAnalysis(prefixes=128, requests=512)
    tiers = TierSizes(gpu_prefixes=8, cpu_prefixes=32, disk_prefixes=128, running=4)
    overrides = tiers.overrides(workload)
    prefix = 32 * BLOCK_BYTES
    assert prefix == 8 << 20
    # 34 tokens beside the prefix need 3 blocks, and a fourth is on its way.
    assert overrides["gpu.bytes"] == 8 * prefix + 4 * 4 * BLOCK_BYTES
    # Four requests a prefix and the one that warms up, each of which leaves two full blocks beside it.
    beside = 5 * 2 * BLOCK_BYTES
    assert (overrides["cpu.bytes"], overrides["disk.bytes"]) == (32 * (prefix + beside), 128 * (prefix + beside))


@pytest.mark.parametrize("config", CONFIGS)
def test_every_configuration_is_one_the_daemon_accepts(config: str) -> None:
    tiers = TierSizes(gpu_prefixes=2, cpu_prefixes=2, disk_prefixes=2)
    overrides = {
        "worker.embedded": True,
        **tiers.overrides(TextAnalysis(prefixes=2, requests=2)),
        **serving_of(config).settings,
    }
    settings = Settings.load(Path(os.devnull), overrides, {})
    assert settings.cache.enabled is (config != "no-cache")
    assert settings.scheduler.policy == ("fcfs" if config == "no-cache" else config)


def test_a_serving_says_which_tiers_there_are_and_whether_anything_is_prefetched() -> None:
    workload, tiers = (
        TextAnalysis(prefixes=16, requests=16),
        TierSizes(gpu_prefixes=2, cpu_prefixes=4, disk_prefixes=16),
    )
    alone = Serving(name="gpu", tiers=("gpu",), look_ahead=0, eviction="fifo", everything=True)
    overrides = {"worker.embedded": True, **alone.overrides(workload, tiers)}
    settings = Settings.load(Path(os.devnull), overrides, {})
    assert (settings.cpu.bytes, settings.disk.bytes, settings.scheduler.look_ahead) == (0, 0, 0)
    assert settings.cache.eviction == "fifo"
    small = Serving(name="three").overrides(workload, tiers)
    prefix = 32 * BLOCK_BYTES
    assert settings.gpu.bytes == small["gpu.bytes"] + 16 * prefix, "room for all prefixes besides"
    assert small["cpu.bytes"] > 0 and small["scheduler.look_ahead"] == "auto"


def test_repeats_choose_other_prefixes_and_bodies_and_find_room_in_the_tiers() -> None:
    once, thrice = (TextAnalysis(prefixes=4, requests=16, repeats=repeats) for repeats in (1, 3))
    assert once.prompts() == thrice.prompts() != thrice.prompts(1)
    prefixes = {tuple(prompt[:512]) for prompt in thrice.prompts(2)}
    assert prefixes <= {tuple(prompt[:512]) for prompt in once.warm_up_prompts()}
    sizes = [TierSizes(gpu_prefixes=1, cpu_prefixes=1, disk_prefixes=1).overrides(each) for each in (once, thrice)]
    assert sizes[1]["disk.bytes"] - sizes[0]["disk.bytes"] == 8 * 2 * BLOCK_BYTES


def test_figures_add_up() -> None:
    results = [RequestResult((1, 2), ttft_s=0.1 * n, gpu_tokens=64, cpu_tokens=32, disk_tokens=0) for n in range(1, 21)]
    figures = summarise("fpf", results, elapsed_s=4.0, prefix_tokens=128)
    assert figures.requests_per_s == 5.0
    assert figures.miss_rate == pytest.approx(0.25)
    assert (figures.ttft_s.p50, figures.ttft_s.p95) == (pytest.approx(1.0), pytest.approx(1.9))
    assert figures.first_outputs_digest == figures.output_digest == digest([(1, 2)] * 20)
    assert figures.to_plain()["hit_tokens"] == {"gpu": 1280, "cpu": 640, "disk": 0}


def test_quantiles_of_few_values() -> None:
    assert quantile([5.0], 0.95) == 5.0
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0


def test_the_digest_sees_every_token_and_where_outputs_end() -> None:
    outputs = [[1, 2], [3]]
    assert digest(outputs) == digest([(1, 2), (3,)])
    assert digest(outputs) != digest([[1, 2], [4]])
    assert digest(outputs) != digest([[1], [2, 3]])
    assert digest(outputs) != digest([[3], [1, 2]])


def test_a_body_that_is_known_too_makes_up_for_no_prefix() -> None:
    whole = RequestResult((1,), ttft_s=1.0, gpu_tokens=160, cpu_tokens=0, disk_tokens=0)
    missed = RequestResult((1,), ttft_s=1.0, gpu_tokens=0, cpu_tokens=0, disk_tokens=0)
    assert summarise("fpf", [whole, missed], elapsed_s=1, prefix_tokens=128).miss_rate == 0.5
