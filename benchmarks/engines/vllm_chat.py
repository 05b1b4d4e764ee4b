"""A turn of chats with a vLLM, as `benchmarks.vllm` and `benchmarks.peers` play it."""

from __future__ import annotations

import time
from concurrent.futures import Executor

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from benchmarks.engines.vllm_figures import PromptTokens, Reply, Stage
from benchmarks.workloads.growing_chats import Chats, Tokens


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
