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
from prefixd.workloads.daemon_process import DaemonProcess
from prefixd.workloads.figures import digest

DESCRIPTION = """\
Chats of several turns with a small model in the proportions of a large one: window (Gemma 3: five of six layers see a
window):

    python -m benchmarks.jenga --json jenga.json

A turn sends all that was said before and some new tokens; the turns of all chats come in rounds, --at-once at a time.
It runs in two daemons with an empty cache: by_rule keeps of each layer what its rule needs (Jenga), baseline keeps of
every layer everything (worker.groups = "one"). Both have a GPU tier of --share of what the baseline would take for all
chats at their end, and no other tier.

hit_ratio: prompt tokens found, by_rule against baseline, at least 1.5. requests_ratio: the same of requests a second,
at least 1. same_tokens: every request got the same tokens in both. The benchmark fails when one does not hold."""

LEAST_HIT_RATIO = 1.5
BLOCK_TOKENS = 16
WAYS = ("baseline", "by_rule")


@dataclass(frozen=True, slots=True)
class Plan:
    """The chats: the same arguments give the same ones. Lengths are in tokens."""

    chats: int
    turns: int
    user_tokens: int
    output_tokens: int
    at_once: int
    share: float
    seed: int = 0

    @property
    def last_tokens(self) -> int:
        """Of a chat at its end."""
        return self.turns * (self.user_tokens + self.output_tokens)

    def said(self, chat: int, turn: int) -> list[int]:
        """What the user says in a turn."""
        source = random.Random(f"jenga {self.seed} {chat} {turn}")
        return [source.randint(3, 500) for _ in range(self.user_tokens)]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run came to."""

    model: str
    way: str
    gpu_bytes: int
    requests_per_s: float
    prompt_tokens: int
    hit_tokens: int
    preempted: int
    output_digest: str


def measure(model: str, plan: Plan, step: Callable[[], None] = lambda: None) -> list[Run]:
    """Both ways with one model; `step` is called after each request. Raises DaemonFailed, ClientError."""
    with tempfile.TemporaryDirectory(prefix="prefixd-jenga-") as folder:
        directory = hybrid_models.save(model, Path(folder))
        gpu_bytes = int(plan.share * plan.chats * baseline_bytes(directory, plan.last_tokens))
        return [_run(model, way, directory, gpu_bytes, plan, step) for way in WAYS]


def baseline_bytes(directory: Path, tokens: int) -> int:
    """What the baseline takes for a sequence: every layer's KV of every token."""
    from prefixd.worker.model_spec import read_model_spec
    from prefixd.worker.settings import WorkerSettings

    spec = read_model_spec(WorkerSettings(model=str(directory), block_tokens=BLOCK_TOKENS, groups="one"))
    return -(-tokens // spec.block_tokens) * spec.block_frames * spec.groups.frame_bytes


def _run(model: str, way: str, directory: Path, gpu_bytes: int, plan: Plan, step: Callable[[], None]) -> Run:
    settings = {
        "worker.model": str(directory),
        "worker.groups": "one" if way == "baseline" else "by_rule",
        "worker.threads": 1,
        "worker.block_tokens": BLOCK_TOKENS,
        "worker.max_step_tokens": 64,
        "worker.max_running": plan.at_once,
        "gpu.device": "cpu",
        "gpu.bytes": gpu_bytes,
        "cpu.bytes": 0,
        "disk.bytes": 0,
    }
    with DaemonProcess(settings) as daemon:
        outputs, elapsed_s, stats = asyncio.run(_talk(daemon.address, plan, step))
    return Run(
        model,
        way,
        gpu_bytes,
        plan.chats * plan.turns / elapsed_s,
        stats.asked_tokens,
        stats.hit_tokens,
        stats.scheduler.preempted_requests,
        digest(outputs),
    )


async def _talk(address: str, plan: Plan, step: Callable[[], None]) -> tuple[list[list[int]], float, Any]:
    """The output of each request, the seconds that all took together, and the daemon's figures."""
    said: list[list[int]] = [[] for _ in range(plan.chats)]
    outputs: list[list[int]] = []
    places = asyncio.Semaphore(plan.at_once)
    async with AsyncClient(address, name="benchmark jenga", memory="streamed") as client:

        async def ask(chat: int, turn: int) -> list[int]:
            async with places:
                said[chat] += plan.said(chat, turn)
                output: list[int] = []
                async for event in client.generate(
                    said[chat], max_tokens=plan.output_tokens, ignore_eos=True, temperature=0.0
                ):
                    if isinstance(event, Tokens):
                        output += event.token_ids
                said[chat] += output
                step()
                return output

        async for _ in client.generate([3], max_tokens=1):
            pass  # the model is loaded then; nothing of it is cached
        began = time.monotonic()
        for turn in range(plan.turns):
            outputs += await asyncio.gather(*(ask(chat, turn) for chat in range(plan.chats)))
        return outputs, time.monotonic() - began, await client.stats()


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The result of the runs, two a model."""
    models: dict[str, dict[str, Any]] = {}
    for baseline, by_rule in zip(runs[::2], runs[1::2], strict=True):
        models[baseline.model] = {
            "hit_ratio": round(by_rule.hit_tokens / max(1, baseline.hit_tokens), 3),
            "requests_ratio": round(by_rule.requests_per_s / baseline.requests_per_s, 3),
            "same_tokens": by_rule.output_digest == baseline.output_digest,
        }
    return {"models": models, "runs": [asdict(run) for run in runs]}


def violations(result: Mapping[str, Any]) -> list[str]:
    """What a result breaks of what must hold, in words."""
    found = []
    for name, figures in result["models"].items():
        if not figures["same_tokens"]:
            found.append(f"{name}: the tokens differ between baseline and by_rule")
        if figures["hit_ratio"] < LEAST_HIT_RATIO:
            found.append(f"{name}: {figures['hit_ratio']} times the hit tokens, less than {LEAST_HIT_RATIO}")
        if figures["requests_ratio"] < 1:
            found.append(f"{name}: {figures['requests_ratio']} times the requests a second, less than 1")
    return found


def draw(axes: Any, runs: Sequence[Run]) -> None:
    """Share of the prompt tokens found, a pair of bars a model."""
    names = [f"{run.model}\n{run.way}" for run in runs]
    colors = ["#bbbbbb" if run.way == "baseline" else "#4477aa" for run in runs]
    bars = axes.bar(names, [run.hit_tokens / run.prompt_tokens for run in runs], color=colors)
    axes.bar_label(bars, [f"{run.requests_per_s:.1f} req/s" for run in runs])
    axes.set_ylabel("prompt tokens found, of all")
    axes.margins(y=0.15)
    axes.set_title("Hits in equal memory")


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = harness.parser("jenga", DESCRIPTION)
    numbers = [
        ("--chats", 8, "chats"),
        ("--turns", 5, "turns of each"),
        ("--user-tokens", 160, "tokens that a user says in a turn"),
        ("--output-tokens", 32, "tokens of an answer"),
        ("--at-once", 2, "requests at a time"),
    ]
    for flag, default, text in numbers:
        parser.add_argument(flag, type=harness.positive, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--share", type=float, default=1 / 3, help="of the memory that the baseline would take (0.33)")
    parser.add_argument("--models", nargs="+", choices=sorted(hybrid_models.MODELS), default=["window"])
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
        options.seed,
    )
    with harness.progress("requests", len(options.models) * len(WAYS) * plan.chats * plan.turns) as step:
        runs = [run for model in options.models for run in measure(model, plan, step)]
    parameters = {name: value for name, value in vars(options).items() if name not in ("json", "plot", "models")}
    result = {**parameters, "block_tokens": BLOCK_TOKENS, **summary(runs)}
    harness.finish("jenga", result, options.json)
    for run in runs:
        print(
            f"{run.model:8} {run.way:9} {run.gpu_bytes / 2**20:6.1f} MiB {run.requests_per_s:7.2f} req/s "
            f"{run.hit_tokens:7} of {run.prompt_tokens} prompt tokens found"
        )
    harness.plot(options.plot, lambda axes: draw(axes, runs))
    if found := violations(result):
        raise harness.BenchmarkError("; ".join(found))


if __name__ == "__main__":
    harness.run(main)
