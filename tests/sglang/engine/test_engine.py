"""A whole SGLang engine on a CPU, with prefixd as its storage: it computes with what prefixd has what it computes
without."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.sglang.engine.engine_process import EngineProcess
from tests.sglang.engine.tiny_llama import VOCABULARY, make_adapter, make_model
from tests.sglang.served import DAEMON, flush, options
from tests.waiting import wait_until

PAGE_TOKENS = 16
PROMPT_PAGES = 20  # SGLang asks its storage about no less than 256 tokens
STORED = PROMPT_PAGES * PAGE_TOKENS

StartEngine = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def start_engine(model: Path) -> Iterator[StartEngine]:
    """`start_engine(address, layout, v1=True, **arguments)`: an engine; stopped at the end."""
    started: list[EngineProcess] = []

    def start(address: str, layout: str, *, v1: bool = True, **arguments: Any) -> EngineProcess:
        extra = {**options(address, v1=v1), "hicache_storage_pass_prefix_keys": True}
        engine = EngineProcess(
            model_path=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_total_tokens=4096,
            page_size=PAGE_TOKENS,
            enable_hierarchical_cache=True,
            hicache_ratio=2,
            hicache_mem_layout=layout,
            hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(extra),
            log_level="warning",
            enable_metrics=True,
            **arguments,
        )
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.stop()


def prompt(number: int) -> list[int]:
    """A prompt of all its pages and some tokens."""
    return random.Random(number).choices(range(1, VOCABULARY), k=STORED + 3)


def wait_until_saved(daemon: DaemonProcess, blocks: int) -> None:
    with Client(daemon.address) as client:
        wait_until(
            lambda: sum(each.blocks for each in client.stats().namespaces) >= blocks, f"{blocks} blocks were not saved"
        )


def counted(metrics: str, name: str, tier: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(f"{name}{{") and f'tier="{tier}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize(
    ("layout", "v1"), [("page_first", True), ("layer_first", False)], ids=["page_first", "layer_first"]
)
def test_an_engine_started_again_computes_what_it_computed(
    start_engine: StartEngine, tmp_path: Path, layout: str, v1: bool
) -> None:
    adapter = make_adapter(tmp_path / "adapter")
    lora = dict(lora_paths=[f"polite={adapter}"], lora_backend="torch_native", max_loras_per_batch=2)
    with DaemonProcess(DAEMON) as daemon:
        first = start_engine(daemon.address, layout, v1=v1, **lora)
        computed, stored = first.generate(prompt(1))
        adapted, adapted_stored = first.generate(prompt(1), "polite")
        assert (stored, adapted_stored) == (0, 0)
        assert computed != adapted
        wait_until_saved(daemon, 2 * PROMPT_PAGES)
        first.kill()
        flush(daemon)
        daemon.restart()

        second = start_engine(daemon.address, layout, v1=v1, **lora)
        assert second.generate(prompt(1)) == (computed, STORED)
        assert second.generate(prompt(1), "polite") == (adapted, STORED)
        assert second.generate(prompt(2))[1] == 0
        assert counted(second.metrics(), "sglang:prefixd_hit_pages_total", "disk") == 2 * PROMPT_PAGES

        wait_until(second.flush, "SGLang's caches were not flushed")
        assert second.generate(prompt(1)) == (computed, STORED)
        assert second.clear_storage()
        wait_until(second.flush, "SGLang's caches were not flushed")
        assert second.generate(prompt(1)) == (computed, 0)

        daemon.kill()
        wait_until(second.flush, "SGLang's caches were not flushed")
        assert second.generate(prompt(1)) == (computed, 0)


def test_what_follows_blocks_of_codecs(start_engine: StartEngine) -> None:
    """Without loss the same tokens; with int8 most of them, which depend on the whole prompt."""
    prompts = [prompt(number) for number in range(10, 16)]
    differing = {}
    with DaemonProcess(DAEMON) as daemon:
        engine = start_engine(daemon.address, "page_first")
        computed = [engine.generate(each)[0] for each in prompts]
        for codec in ("lossless", "int8"):
            daemon.configure({"disk.codec": codec})
            daemon.replace()
            wait_until(lambda: asked_again(engine, prompt(9))[1], "no hits from the new daemon")
            assert [asked_again(engine, each)[0] for each in prompts] == computed
            wait_until_saved(daemon, (1 + len(prompts)) * PROMPT_PAGES)
            flush(daemon)
            daemon.restart()
            wait_until(lambda: asked_again(engine, prompt(9))[1], "no hits after the daemon's return")
            loaded = [asked_again(engine, each) for each in prompts]
            assert [stored for _, stored in loaded] == [STORED] * len(prompts)
            with Client(daemon.address) as client:
                on_disk = client.stats().stored
            assert bool(on_disk.blocks["altered"]) == (codec == "int8")
            pairs = zip(loaded, computed, strict=True)
            differing[codec] = sum(one != other for (one, _), other in pairs)
    assert differing["lossless"] == 0
    assert differing["int8"] <= len(prompts) // 2, f"{differing['int8']} of {len(prompts)} answers differ"


def asked_again(engine: EngineProcess, tokens: list[int]) -> tuple[list[int], int]:
    """As `generate`, after SGLang's own caches were emptied."""
    wait_until(engine.flush, "SGLang's caches were not flushed")
    return engine.generate(tokens)
