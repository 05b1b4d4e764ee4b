"""Bytes saved by rule and as opaque blocks, for a model with sliding windows: `benchmarks.vllm --model hybrid`."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.engines.vllm_chat import BLOCK, chat_plan
from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest, connector
from benchmarks.workloads.growing_chats import ChatPlan, Chats
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client

MOST_BYTES = 0.6
"""Of the bytes a token that the opaque way saves."""
WINDOW_TOKENS = 128
_WAYS = {"opaque": {"resume_every": 1}, "by rule": {}}


def measure(options: Namespace) -> dict[str, Any]:
    """Both ways, each with a daemon and an engine of its own; under `broken` what does not hold."""
    plan = chat_plan(options)
    steps = len(_WAYS) * plan.turns * plan.conversations
    with (
        harness.progress("requests", steps) as step,
        tempfile.TemporaryDirectory(prefix="prefixd-model-") as directory,
    ):
        from benchmarks.engines.vllm_models import save_gemma3

        model = save_gemma3(Path(directory), options.seed)
        runs = {name: _replay(model, plan, options, extra, step) for name, extra in _WAYS.items()}
    opaque, by_rule = runs["opaque"], runs["by rule"]
    ratio = by_rule["bytes_per_token"] / opaque["bytes_per_token"]
    same = opaque.pop("tokens") == by_rule.pop("tokens")
    broken = []
    if not same:
        broken.append("the two ways gave different tokens")
    if by_rule["hit_tokens"] < opaque["hit_tokens"] or not opaque["hit_tokens"]:
        broken.append(f"{by_rule['hit_tokens']} hit tokens by rule, {opaque['hit_tokens']} as opaque blocks")
    if ratio > MOST_BYTES:
        broken.append(f"{ratio:.2f} of the bytes a token are saved by rule, not at most {MOST_BYTES}")
    return {"window_tokens": WINDOW_TOKENS, "bytes_ratio": ratio, "same_tokens": same, "runs": runs, "broken": broken}


def _replay(model: Path, plan: ChatPlan, options: Namespace, extra: dict[str, Any], step: Any) -> dict[str, Any]:
    longest = plan.prompt_tokens(plan.turns) + plan.output_tokens
    blocks = -(-longest // BLOCK)
    # What is slow on a busy machine must not count as a hit less.
    patient = {"recompute_if_slower": False, "timeout_s": 120, **extra, **dict(options.option)}
    tokens: list[tuple[int, ...]] = []
    with (
        DaemonProcess({"cpu.bytes": "1GiB", "disk.bytes": 0}) as daemon,
        EngineProcess(
            model,
            kv_transfer=connector(daemon.address, **patient),
            threads=options.threads,
            block_size=BLOCK,
            max_model_len=blocks * BLOCK,
            max_num_seqs=1,
            num_gpu_blocks_override=1 + 3 * blocks * options.held,  # three KV groups take blocks from one pool
        ) as engine,
    ):
        chats = Chats(plan)
        for _ in range(plan.turns):
            answers = []
            for prompt in chats.next_turn():
                (result,) = engine.generate([EngineRequest(prompt, plan.output_tokens)])
                engine.wait_until_idle()  # so that both ways find what was saved before
                answers.append(result.token_ids)
                step()
            chats.answered(answers)
            tokens += answers
        metrics = engine.metrics()
        with Client(daemon.address, name="benchmark") as client:
            (kept,) = client.stats().namespaces
    counts = {
        name: int(sum(value for key, value in metrics.samples.items() if key.startswith(f"vllm:prefixd_{name}{{")))
        for name in ("saved_bytes", "saved_blocks", "dropped_blocks")
    }
    return {
        **counts,
        "bytes_per_token": counts["saved_bytes"] / max(1, counts["saved_blocks"] * kept.namespace.block_tokens),
        "hit_tokens": metrics.external_hits,
        "local_hit_tokens": metrics.prompt_tokens_by_source.get("local_cache_hit", 0),
        "prompt_tokens": metrics.prompt_tokens,
        "tokens": tokens,
    }
