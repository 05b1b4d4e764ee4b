"""Chats with a vLLM, as `benchmarks.vllm` and `benchmarks.peers` hold them: the model, its engine, and a turn."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.options import from_options
from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from benchmarks.engines.vllm_figures import PromptTokens, Reply, Stage
from benchmarks.workloads.growing_chats import ChatPlan, Chats, Tokens

BLOCK = 32
VOCABULARY = 4096


def chat_plan(options: Namespace, spread: float = 0.0) -> ChatPlan:
    """The chats that the options describe."""
    return from_options(ChatPlan, options, vocabulary=VOCABULARY, spread=spread)


@contextmanager
def saved_llama(options: Namespace, **widths: Any) -> Iterator[Path]:
    """The model's directory, as long as the context. widths: further values of Hugging Face's configuration."""
    # torch and transformers take seconds to import: not before the command line was found to be right.
    from transformers.utils import logging

    from benchmarks.engines.vllm_models import save_llama

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="prefixd-model-") as folder:
        shape = {"vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 2048, **widths}
        save_llama(Path(folder), options.seed, layers=options.layers, **shape)
        yield Path(folder)


def engine_of(
    model: Path, options: Namespace, longest: int, kv_transfer: Mapping[str, Any] | None, **arguments: Any
) -> EngineProcess:
    """An engine whose own KV cache holds --held requests of `longest` tokens, with these further arguments."""
    blocks = -(-longest // BLOCK)
    by_options: dict[str, Any] = {
        "threads": options.threads,
        "block_size": BLOCK,
        "max_model_len": blocks * BLOCK,
        "max_num_seqs": max(4, options.outstanding),
        "max_num_batched_tokens": 1024,
        # Requests that run at once need their own blocks too; block 0 is vLLM's null block.
        "num_gpu_blocks_override": 1 + blocks * max(options.held, options.outstanding),
    }
    return EngineProcess(model, kv_transfer=kv_transfer, **{**by_options, **arguments})


def play_turn(name: str, engine: EngineProcess, chats: Chats, askers: Executor) -> Stage:
    """The next turn of all conversations: asked in order, as many at a time as `askers` has threads."""

    def ask(prompt: Tokens) -> Reply:
        (result,) = engine.generate([EngineRequest(prompt, max_tokens=chats.plan.output_tokens)])
        return Reply(result.token_ids, result.ttft_s)

    prompts = chats.next_turn()
    before = _prompt_tokens(engine)
    begin = time.monotonic()
    replies = list(askers.map(ask, prompts))
    elapsed_s = time.monotonic() - begin
    chats.answered([reply.tokens for reply in replies])
    return Stage(name, tuple(replies), elapsed_s, _prompt_tokens(engine) - before)


def _prompt_tokens(engine: EngineProcess) -> PromptTokens:
    metrics = engine.metrics()
    by_source, by_tier = metrics.prompt_tokens_by_source, metrics.cached_by_source
    return PromptTokens(
        total=metrics.prompt_tokens,
        local=by_source.get("local_cache_hit", 0),
        external=by_source.get("external_kv_transfer", 0),
        cpu=by_tier.get("host", 0),
        disk=by_tier.get("disk", 0),
    )
