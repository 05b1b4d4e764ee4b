"""Hit tokens of a cache that knows which bytes of a hybrid model a prefix needs, against one that keeps them all.

Chats of several turns with the KV cache of Gemma 3 27B, scaled down: 10 layers see all tokens, 52 layers see
the last --window-tokens. A client stands for the engine. For every prompt it leases the cached prefix, compares
every byte with what belongs to exactly these tokens, and stores what a model would have computed. The CPU tier
holds --share of the bytes that all groups of all chats have at the end; there is no disk.

The same chats go to a daemon that is told the groups' rules, and to one that is told that every group needs the
whole prefix. hit_tokens are prompt tokens whose KV was cached; possible_hit_tokens those that a cache without a
limit would have served. ratio, which must be at least 1.3, is hit_tokens with rules against hit_tokens without.
wrong_bytes must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import asdict
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import from_options, number, option, seed
from benchmarks.workloads.chat_engine import ChatEngine, Counts
from benchmarks.workloads.growing_chats import ChatPlan, Chats
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncClient, NamespaceSpec, PartSpec, SlidingWindow

LEAST_RATIO = 1.3
FULL_LAYERS, WINDOW_LAYERS = 10, 52
"""Gemma 3 27B: five of six layers see a window."""


def namespace(options: argparse.Namespace, *, rules: bool) -> NamespaceSpec:
    """The model's KV groups, with their rules or all as full attention."""
    layer_bytes = options.block_tokens * options.layer_bytes
    window = SlidingWindow(options.window_tokens) if rules else None
    return NamespaceSpec(
        "gemma3-27b",
        options.block_tokens,
        (PartSpec("full", 0, FULL_LAYERS * layer_bytes), PartSpec("window", 0, WINDOW_LAYERS * layer_bytes, window)),
    )


def bytes_of_chats(plan: ChatPlan, spec: NamespaceSpec) -> int:
    """What all groups of all chats have at their end; the beginning that they share is counted once."""
    blocks = (plan.prompt_tokens(plan.turns) + plan.output_tokens) // spec.block_tokens
    shared = plan.system_tokens // spec.block_tokens
    return (plan.conversations * (blocks - shared) + shared) * spec.block_bytes


async def replay(address: str, spec: NamespaceSpec, plan: ChatPlan) -> tuple[Counts, list[int]]:
    """All turns of all chats; the counts, and the hit tokens of each turn."""
    chats, answers = Chats(plan), random.Random(f"{plan.seed} answers")
    hits: list[int] = []
    async with AsyncClient(address, name="benchmark groups", memory="shared") as client:
        engine = ChatEngine(await client.register(spec))
        with harness.progress("prompts", plan.turns * plan.conversations) as step:
            for _ in range(plan.turns):
                before = engine.counts.hit_tokens
                prompts = chats.next_turn()
                outputs = [tuple(answers.choices(range(plan.vocabulary), k=plan.output_tokens)) for _ in prompts]
                for prompt, output in zip(prompts, outputs, strict=True):
                    await engine.answer(prompt, output)
                    step()
                chats.answered(outputs)
                hits.append(engine.counts.hit_tokens - before)
    return engine.counts, hits


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both runs, each with a daemon of its own. Raises DaemonFailed."""
    # The chats differ in nothing between the two runs.
    plan = from_options(ChatPlan, options, conversations=options.chats, vocabulary=256_000)
    nbytes = bytes_of_chats(plan, namespace(options, rules=False))
    cpu_bytes = int(nbytes * options.share) // 4096 * 4096
    runs = []
    for name, rules in (("rules", True), ("all full attention", False)):
        spec = namespace(options, rules=rules)
        with DaemonProcess({"cpu.bytes": cpu_bytes, "disk.bytes": 0}) as daemon:
            counts, hits = asyncio.run(replay(daemon.address, spec, plan))
        runs.append({"name": name, **asdict(counts), "hit_tokens_by_turn": hits})
    with_rules, without = runs
    return {
        "bytes_of_chats": nbytes,
        "cpu_bytes": cpu_bytes,
        "prompt_tokens": with_rules["prompt_tokens"],
        "possible_hit_tokens": with_rules["possible_tokens"],
        "hit_tokens": with_rules["hit_tokens"],
        "hit_tokens_full_attention": without["hit_tokens"],
        "ratio": with_rules["hit_tokens"] / max(1, without["hit_tokens"]),
        "wrong_bytes": sum(run["wrong_bytes"] for run in runs),
        "runs": runs,
    }


@harness.benchmark(
    "groups",
    __doc__,
    option("--chats", 16, "chats"),
    option("--turns", 8, "turns of each chat"),
    option("--system-tokens", 512, "tokens that all chats begin with"),
    option("--user-tokens", 768, "tokens that a user adds in a turn"),
    option("--output-tokens", 192, "tokens of an answer"),
    option("--block-tokens", 64, "tokens of a block"),
    option("--window-tokens", 1024, "tokens that a window layer sees, the present one included"),
    option("--layer-bytes", 32, "bytes of a token in a layer; 8192 in the real model"),
    option("--share", 1 / 3, "of the chats' bytes that the cache holds", number(1e-9, 1)),
    seed("of the tokens and of the order in a turn"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Both runs, and what must hold of them."""
    result = measure(options)
    broken = harness.missed(result, zero=["wrong_bytes"], least={"ratio": LEAST_RATIO})
    columns = ("name", "hit_tokens", "possible_tokens", "loaded_bytes", "wrong_bytes")
    return harness.Outcome(result, broken, [harness.Table(result["runs"], columns)])


if __name__ == "__main__":
    harness.run(main)
