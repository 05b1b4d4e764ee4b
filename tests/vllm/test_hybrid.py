"""Models with windows or states, one after the other: the bytes that prefixes need, saved and loaded, and no others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, RecurrentState, Rule, SlidingWindow
from tests.vllm.served import DAEMON, NewRequests, StartEngine, Tokens, alter, registered, run
from tests.vllm.tiny_models import save_gemma2, save_gpt_oss, save_lfm2, save_qwen3_next

WINDOWS = [SlidingWindow(128), None]
BFLOAT16 = {"dtype": "bfloat16", "kv_cache_memory_bytes": 256 << 20}  # vLLM's gated delta rule on a CPU takes no other

# Of each how it is made, vLLM's arguments, the rules of its groups, and the least tokens of a block.
# PREFIXD_VLLM_MODELS names others than these three: Gemma 2 has the rules of GPT-OSS.
MODELS = {
    "gemma2": (save_gemma2, {}, WINDOWS, 32),
    "gpt_oss": (save_gpt_oss, {}, WINDOWS, 32),
    "qwen3_next": (save_qwen3_next, BFLOAT16, [RecurrentState()] * 3 + [None], 144),
    "lfm2": (save_lfm2, {}, [RecurrentState()] * 3 + [None], 32),
}
NAMES = os.environ.get("PREFIXD_VLLM_MODELS", "gpt_oss qwen3_next lfm2").split()


def one_by_one(engine: EngineProcess, requests: list[EngineRequest], *, forget: bool = True) -> tuple[Tokens, int]:
    """In a batch vLLM alone gives other tokens for some of these models."""
    tokens, hits = zip(*(run(engine, [request], forget=forget) for request in requests), strict=True)
    return [each for (each,) in tokens], sum(hits)


@pytest.mark.parametrize(("save", "arguments", "rules", "least_tokens"), [MODELS[name] for name in NAMES], ids=NAMES)
def test_what_prefixes_need_is_saved_and_loaded(
    save: Callable[[Path], Path],
    arguments: dict[str, Any],
    rules: list[Rule | None],
    least_tokens: int,
    make_engine: StartEngine,
    tmp_path: Path,
    new_requests: NewRequests,
) -> None:
    model = save(tmp_path / "model")
    states = RecurrentState() in rules
    answered = 12 if states else 80  # a window's end is saved for answers too: one fills a block
    first, second, more = new_requests(1000, 389, 90, max_tokens=answered)
    requests = [first, second]
    # With a cache of its own vLLM cuts prompts of models with states where a state is to be kept, and goes on from
    # there; without, it gives other tokens after a while, since sums are made in another order.
    with make_engine(model, None, enable_prefix_caching=states, **arguments) as alone:
        expected, _ = one_by_one(alone, requests, forget=False)
        again, _ = one_by_one(alone, requests, forget=False)
        chat = EngineRequest([*first.prompt, *expected[0], *more.prompt], 12)
        continued, _ = one_by_one(alone, [chat], forget=False)
    with DaemonProcess(DAEMON) as daemon, make_engine(model, daemon, **arguments) as engine:
        cold, none = one_by_one(engine, requests)
        saved = engine.metrics().samples
        with Client(daemon.address) as client:
            (cache,) = registered(client)
        warm, hits = one_by_one(engine, requests)
        next_turn, of_chat = one_by_one(engine, [chat])
        with Client(daemon.address) as client:
            altered = alter(client, first.prompt)
        wrong, _ = one_by_one(engine, [first])
    assert (cold, warm) == (expected, again)
    assert next_turn == continued
    assert none == 0
    block_tokens = cache.spec.block_tokens
    assert least_tokens <= block_tokens <= 2 * least_tokens, "vLLM rounds up to what this processor's kernels take"
    assert hits == sum((len(request.prompt) - 1) // block_tokens * block_tokens for request in requests)
    # With windows the end of the answer. vLLM 0.32 keeps no states of answers, so with states the end of the prompt.
    continued_from = 1000 if states else 1000 + answered
    assert of_chat == (continued_from - 1) // block_tokens * block_tokens
    assert sorted((part.rule for part in cache.spec.parts), key=repr) == sorted(rules, key=repr)
    total = sum(value for name, value in saved.items() if name.startswith("vllm:prefixd_saved_bytes{"))
    blocks = sum(value for name, value in saved.items() if name.startswith("vllm:prefixd_saved_blocks{"))
    assert 0 < total < 0.9 * blocks * cache.spec.block_bytes
    assert altered and wrong != again[:1], "the bytes that were loaded count"
