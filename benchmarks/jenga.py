"""Models whose layers keep different things: of each what its rule needs, against everything of all."""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.engines import hybrid_models
from prefixd.client import AsyncClient, Tokens
from prefixd.v1 import cache_pb2 as pb
from prefixd.workloads.daemon_process import DaemonProcess
from prefixd.workloads.figures import digest

DESCRIPTION = """\
Chats of several turns with small models in the proportions of large ones:

    window   Gemma 3: five of six layers see a window
    state    Jamba: seven of eight layers are recurrent, and a state is as large as the KV of 1,000 tokens
    vision   Gemma 3 with images: each turn shows one of --images, and is sent with all images of its chat so far

    python -m benchmarks.jenga --json jenga.json --plot jenga.png

A turn sends all that was said before and some new tokens; the turns of all chats come in an order by chance, --at-once
at a time.
Each run has a daemon of its own with an empty cache, a GPU tier of --share of what the baseline would take for all
chats at their end, and no other tier:

    baseline   one page size and one rule for all layers (worker.groups = "one"): layers with windows keep all tokens;
               blocks are as long as the largest layer's state, and a state is kept after each; no embedding of an
               image is kept (worker.feature_bytes = 0)
    virtual    of each layer what its rule needs, in chunks that serve any group (Jenga)
    paged      the same through block tables (worker.kv = "paged"): the same frames, so hits are those of virtual by
               construction, and waste but for when samples fall; its requests a second are what it is measured for

waste: bytes of the GPU tier that are allocated and not needed, of all allocated, summed over samples of the daemon's
figures taken through the run. Allocated: what running requests and cached blocks have, but for cached bytes that only
shorter prefixes need and nobody holds (spare_bytes): these go before anything else, and are there while memory is free.
Not needed: what no layer needs by its own rule (unneeded_bytes): what lies behind a window, states but the last of a
prompt and those at ends and branches, padding, blocks beyond the last known token. A block filled in part is needed.
At most 0.05 for virtual (Jenga, figure 16).

hit_ratio: prompt tokens found, against the baseline's, at least 1.5 (figure 17). requests_ratio: the same of requests a
second, at least 1 for virtual. What makes the difference is computed_tokens, the prompt tokens not found: prompts are
long, answers short and the ways run in turn, --rounds times, of which the best counts, so that other load on the
machine does not decide. same_tokens: every request got the baseline's tokens. encoded_images: embeddings computed; but
for the baseline each image's once, whatever stands before it (Jenga, section 5). Hits and requests of vision are at
least the baseline's. The benchmark fails when one does not hold."""

LEAST_HIT_RATIO = 1.5
MOST_WASTE = 0.05
BLOCK_TOKENS = 16
SAMPLE_S = 0.1
BASELINE, JENGA = "baseline", "virtual"
MORE_HITS = ("window", "state")
WITH_IMAGES = ("vision",)
MODELS = (*MORE_HITS, *WITH_IMAGES)
WAYS: dict[str, dict[str, Any]] = {
    BASELINE: {"worker.groups": "one", "worker.feature_bytes": 0},
    JENGA: {},
    "paged": {"worker.kv": "paged"},
}
"""What each way sets."""
COLORS = ("#bbbbbb", "#4477aa", "#ee6677")


@dataclass(frozen=True, slots=True)
class Plan:
    """The chats: the same arguments give the same ones. Lengths are in tokens."""

    chats: int
    turns: int
    user_tokens: int
    output_tokens: int
    at_once: int
    share: float
    rounds: int = 1
    seed: int = 0
    images: int = 4

    @property
    def last_tokens(self) -> int:
        """Of a chat at its end."""
        return self.turns * (self.user_tokens + self.output_tokens)

    def said(self, chat: int, turn: int) -> list[int]:
        """What the user says in a turn."""
        source = random.Random(f"jenga {self.seed} {chat} {turn}")
        return [source.randint(3, 500) for _ in range(self.user_tokens)]

    def shown(self, chat: int, turn: int) -> int:
        """The number of the image that the user shows in a turn, where the model reads images: each in its turn."""
        return (chat * self.turns + turn) % self.images

    def order(self) -> list[int]:
        """Whose turn is next: every chat as often as it has turns, in an order by chance."""
        order = [chat for chat in range(self.chats) for _ in range(self.turns)]
        random.Random(f"jenga {self.seed} order").shuffle(order)
        return order


@dataclass(frozen=True, slots=True)
class Run:
    """What a run came to. waste: see DESCRIPTION; spare: mean share of the tier that is spare; samples: of both."""

    model: str
    way: str
    round: int
    gpu_bytes: int
    requests_per_s: float
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    waste: float
    spare: float
    samples: int
    preempted: int
    output_digest: str
    images: int = 0
    encoded_images: int = 0


@dataclass(slots=True)
class Memory:
    """The GPU tier's bytes, summed over samples."""

    samples: int = 0
    capacity: int = 0
    used: int = 0
    spare: int = 0
    unneeded: int = 0

    def add(self, stats: Any) -> None:
        """One sample: the daemon's figures."""
        tier = next(tier for tier in stats.tiers if tier.tier == pb.TIER_GPU)
        self.samples += 1
        self.capacity += tier.capacity_bytes
        self.used += tier.used_bytes
        self.spare += tier.spare_bytes
        self.unneeded += tier.unneeded_bytes

    @property
    def waste(self) -> float:
        """Bytes allocated and not needed, of all allocated."""
        return self.unneeded / max(1, self.used - self.spare)


def measure(model: str, plan: Plan, step: Callable[[], None] = lambda: None) -> list[Run]:
    """One model, all ways in turn, as often as there are rounds; `step` is called after each request.

    Raises DaemonFailed, ClientError.
    """
    with tempfile.TemporaryDirectory(prefix="prefixd-jenga-") as folder:
        directory = hybrid_models.save(model, Path(folder))
        gpu_bytes = int(plan.share * plan.chats * baseline_bytes(directory, plan.last_tokens))
        return [
            _run(model, way, number, directory, gpu_bytes, plan, step) for number in range(plan.rounds) for way in WAYS
        ]


def picture(number: int) -> bytes:
    """A PNG of 4 x 4 colours; each number has others."""
    import io

    import numpy as np
    from PIL import Image

    colours = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize((128, 128), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def baseline_bytes(directory: Path, tokens: int) -> int:
    """What the baseline takes for a sequence: every layer's KV of every token, and a state after each block."""
    from prefixd.worker.model_spec import read_model_spec
    from prefixd.worker.settings import WorkerSettings

    spec = read_model_spec(WorkerSettings(model=str(directory), block_tokens=BLOCK_TOKENS, groups="one"))
    frames = spec.block_frames + spec.state_frames
    return -(-tokens // spec.block_tokens) * frames * spec.groups.frame_bytes


def _run(
    model: str, way: str, number: int, directory: Path, gpu_bytes: int, plan: Plan, step: Callable[[], None]
) -> Run:
    settings = {
        "worker.model": str(directory),
        "worker.threads": 1,
        "worker.block_tokens": BLOCK_TOKENS,
        "worker.max_step_tokens": 64,
        "worker.max_running": plan.at_once,
        "gpu.device": "cpu",
        "gpu.bytes": gpu_bytes,
        "cpu.bytes": 0,
        "disk.bytes": 0,
        **WAYS[way],
    }
    with DaemonProcess(settings) as daemon:
        said, elapsed_s, memory, stats = asyncio.run(_talk(daemon.address, plan, model in WITH_IMAGES, step))
    return Run(
        model=model,
        way=way,
        round=number,
        gpu_bytes=gpu_bytes,
        requests_per_s=plan.chats * plan.turns / elapsed_s,
        prompt_tokens=stats.asked_tokens,
        hit_tokens=stats.hit_tokens,
        computed_tokens=stats.asked_tokens - stats.hit_tokens,
        waste=round(memory.waste, 4),
        spare=round(memory.spare / max(1, memory.capacity), 4),
        samples=memory.samples,
        preempted=stats.scheduler.preempted_requests,
        output_digest=digest(said),
        images=len({plan.shown(chat, turn) for chat in range(plan.chats) for turn in range(plan.turns)})
        if model in WITH_IMAGES
        else 0,
        encoded_images=stats.worker.images.encoded_images,
    )


async def _talk(
    address: str, plan: Plan, with_images: bool, step: Callable[[], None]
) -> tuple[list[list[int]], float, Memory, Any]:
    """What was said in each chat, the seconds that all took together, the memory, and the daemon's figures."""
    said: list[list[int]] = [[] for _ in range(plan.chats)]
    shown: list[list[bytes]] = [[] for _ in said]
    turns = [asyncio.Lock() for _ in said]
    taken = [0] * plan.chats
    order = iter(plan.order())
    memory = Memory()
    async with AsyncClient(address, name="benchmark jenga", memory="streamed") as client:

        async def ask_in_order() -> None:
            for chat in order:
                async with turns[chat]:
                    if with_images:
                        shown[chat].append(picture(plan.shown(chat, taken[chat])))
                        said[chat].append(hybrid_models.IMAGE_TOKEN)
                    said[chat] += plan.said(chat, taken[chat])
                    taken[chat] += 1
                    async for event in client.generate(
                        said[chat],
                        images=shown[chat],
                        max_tokens=plan.output_tokens,
                        ignore_eos=True,
                        temperature=0.0,
                    ):
                        if isinstance(event, Tokens):
                            # An answer's placeholder would stand for an image in the next turn.
                            said[chat] += [
                                token
                                for token in event.token_ids
                                if not with_images or token < hybrid_models.IMAGE_TOKEN
                            ]
                    step()

        async def sample() -> None:
            while True:
                memory.add(await client.stats())
                await asyncio.sleep(SAMPLE_S)

        async for _ in client.generate([3], max_tokens=1):
            pass  # the model is loaded then; nothing of it is cached
        began = time.monotonic()
        sampler = asyncio.create_task(sample())
        try:
            await asyncio.gather(*(ask_in_order() for _ in range(plan.at_once)))
            elapsed_s = time.monotonic() - began
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
        memory.add(stats := await client.stats())
        return said, elapsed_s, memory, stats


def figures_of(runs: Sequence[Run]) -> dict[tuple[str, str], dict[str, float]]:
    """By model and way: mean waste, the share of prompt tokens found, and the requests a second of the best round."""
    by_way: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_way.setdefault((run.model, run.way), []).append(run)
    return {
        key: {
            "waste": sum(run.waste for run in rounds) / len(rounds),
            "found": sum(run.hit_tokens for run in rounds) / sum(run.prompt_tokens for run in rounds),
            "requests_per_s": max(run.requests_per_s for run in rounds),
            "images": max(run.images for run in rounds),
            "encoded_images": max(run.encoded_images for run in rounds),
        }
        for key, rounds in by_way.items()
    }


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The result of the runs: of each model, each way against the baseline."""
    models: dict[str, dict[str, Any]] = {}
    all_figures = figures_of(runs)
    for (model, way), figures in all_figures.items():
        baseline = all_figures[model, BASELINE]
        digests = {run.output_digest for run in runs if run.model == model and run.way in (BASELINE, way)}
        models.setdefault(model, {})[way] = {
            "waste": round(figures["waste"], 4),
            "found": round(figures["found"], 4),
            "requests_per_s": round(figures["requests_per_s"], 2),
            # A baseline that finds nothing counts as one that finds a thousandth.
            "hit_ratio": round(figures["found"] / max(0.001, baseline["found"]), 3),
            "requests_ratio": round(figures["requests_per_s"] / baseline["requests_per_s"], 3),
            "same_tokens": len(digests) == 1,
            **({name: figures[name] for name in ("images", "encoded_images")} if model in WITH_IMAGES else {}),
        }
    return {"models": models, "runs": [asdict(run) for run in runs]}


def violations(result: Mapping[str, Any]) -> list[str]:
    """What a result breaks of what must hold, in words."""
    found = []
    for model, ways in result["models"].items():
        for way, figures in ways.items():
            if way == BASELINE:
                continue
            name = f"{model}, {way}"
            if not figures["same_tokens"]:
                found.append(f"{name}: the tokens differ from the baseline's")
            if way == JENGA and figures["waste"] > MOST_WASTE:
                found.append(
                    f"{name}: {figures['waste']} of the allocated bytes are not needed, more than {MOST_WASTE}"
                )
            if model in MORE_HITS and figures["hit_ratio"] < LEAST_HIT_RATIO:
                found.append(f"{name}: {figures['hit_ratio']} times the hit tokens, less than {LEAST_HIT_RATIO}")
            if figures["hit_ratio"] < 1:
                found.append(f"{name}: {figures['hit_ratio']} times the hit tokens, less than 1")
            if figures.get("encoded_images", 0) != figures.get("images", 0):
                found.append(f"{name}: {figures['encoded_images']} embeddings for {figures['images']} images")
            if way == JENGA and figures["requests_ratio"] < 1:
                found.append(f"{name}: {figures['requests_ratio']} times the requests a second, less than 1")
    return found


def draw(panels: Sequence[Any], models: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Waste, prompt tokens found, and requests a second: a bar a way, in groups of a model."""
    titles = {
        "waste": "allocated bytes not needed, of all",
        "found": "prompt tokens found, of all",
        "requests_per_s": "requests a second",
    }
    width = 0.8 / len(WAYS)
    for axes, (figure, title) in zip(panels, titles.items(), strict=True):
        for place, (way, color) in enumerate(zip(WAYS, COLORS, strict=True)):
            at = [number + (place - (len(WAYS) - 1) / 2) * width for number in range(len(models))]
            bars = axes.bar(at, [ways[way][figure] for ways in models.values()], width, color=color, label=way)
            axes.bar_label(bars, fmt="{:.3g}", fontsize=8)
        axes.set_xticks(range(len(models)), list(models))
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.15)
    panels[0].legend()


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = harness.parser("jenga", DESCRIPTION)
    numbers = [
        ("--chats", 8, "chats"),
        ("--turns", 4, "turns of each"),
        ("--user-tokens", 256, "tokens that a user says in a turn"),
        ("--output-tokens", 8, "tokens of an answer"),
        ("--at-once", 2, "requests at a time"),
        ("--rounds", 2, "runs of each way"),
        ("--images", 4, "images that the chats show, of a model that reads images"),
    ]
    for flag, default, text in numbers:
        parser.add_argument(flag, type=harness.positive, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--share", type=float, default=1 / 3, help="of the memory that the baseline would take (0.33)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seed", type=int, default=0, help="of the chats (0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Raises BenchmarkError when something is violated, after the result is written."""
    options = make_parser().parse_args(arguments)
    plan = Plan(
        options.chats,
        options.turns,
        options.user_tokens,
        options.output_tokens,
        options.at_once,
        options.share,
        options.rounds,
        options.seed,
        options.images,
    )
    with harness.progress("requests", len(options.models) * len(WAYS) * plan.rounds * plan.chats * plan.turns) as step:
        runs = [run for model in options.models for run in measure(model, plan, step)]
    parameters = {name: value for name, value in vars(options).items() if name not in ("json", "plot", "models")}
    result = {**parameters, "block_tokens": BLOCK_TOKENS, **summary(runs)}
    harness.finish("jenga", result, options.json)
    for model, ways in result["models"].items():
        for way, of in ways.items():
            print(
                f"{model:8} {way:9} {of['waste']:7.2%} waste {of['found']:7.2%} of the prompt tokens found "
                f"{of['requests_per_s']:7.2f} req/s"
            )
    harness.plot(options.plot, lambda panels: draw(panels, result["models"]), columns=3)
    if found := violations(result):
        raise harness.BenchmarkError("; ".join(found))


if __name__ == "__main__":
    harness.run(main)
