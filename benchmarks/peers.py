"""vLLM alone, with prefixd and with what people would use instead, on the same chats in one run.

The same chats on vLLM alone, on vLLM with prefixd's connector and on vLLM with LMCache's multiprocess server; where
torch sees a GPU also on vLLM with its own offloading to host memory and files. Run it in its own environment:

    make bench-peers

In each of the --rounds every cache is started empty, with an engine of its own: chats of several turns, more of them
than vLLM's own KV cache holds (--held); then the engines are restarted, the caches are not, and every chat has one more
turn, --restarts times: a process of vLLM may be faster than another for as long as it lives. The caches take turns with
every turn of the chats, beginning with another one each time, so that what else the machine does is in all of them;
while one is measured the others wait. All conversations have their turn before any has its next. A prompt is all that
was said before, with the answers that this engine gave, and ends anywhere in a block. One is asked for at a time
(--outstanding): two fall into step with each other or out of it, which is chance and moves the median wait.

The caches get the same bytes of host memory (--cpu-mib), less than all chats need, and as much of the disk as they
want. Both are as they come: prefixd stores blocks of 32 tokens, LMCache chunks of 256 (--lmcache-chunk 32: as prefixd).
LMCache's engine copies into the server's shared memory, and its server writes files (`fs_native`), which it neither
syncs nor checks when it reads them.

The model is a Llama with random weights in float32, built for the run, on --threads cores. The run fails when any
answer differs, or when prefixd is not ahead of LMCache in every figure by more than its lead differs between the
rounds: requests a second and the median and 95% of the waits for the first token, before the restart and after it.
With --short times are shown but not judged: there are too few of them.

With --gpu (`make gpu-engines`) the engines run on the GPU that torch sees: a model of 1.5 billion parameters in
bfloat16, prompts of up to 12,000 tokens, vLLM with its CUDA graphs; the caches are those whose packages are there,
LMCache's among them if it is. A GPU's kernels sum in another order where a prompt is computed in other parts, so
another answer is counted and not a failure; times are shown and not judged. There is one round, since starting engines
takes most of the time, and after a restart they start side by side. A cache that fails is left out, with the reason,
and the others are measured: a GPU is rarely at hand.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import flag, only
from benchmarks.common.plots import bars
from benchmarks.engines.vllm_chat import BLOCK, chat_plan, engine_of, play_turn, saved_llama
from benchmarks.engines.vllm_engine import EngineProcess
from benchmarks.engines.vllm_figures import Run, Stage
from benchmarks.engines.vllm_options import engine_options, fill_in
from benchmarks.peers_parts import cache_figures as figures
from benchmarks.peers_parts.caches import (
    LABELS,
    LMCACHE,
    PREFIXD,
    Caches,
    Config,
    Room,
    has_gpu,
    names_here,
    why_no_prefixd,
)
from benchmarks.peers_parts.left_out import Failing
from benchmarks.workloads.growing_chats import ChatPlan, Chats

_FULL = {
    "rounds": 3,
    "conversations": 8,
    "turns": 4,
    "restarts": 3,
    "held": 1,
    "system_tokens": 256,
    "user_tokens": 192,
    "output_tokens": 16,
    "outstanding": 1,
    "layers": 8,
    "cpu_mib": 96,
    "lmcache_chunk": 256,
}
_SHORT = {**_FULL, "rounds": 1, "conversations": 4, "turns": 2, "restarts": 1, "layers": 4, "cpu_mib": 24}
_ON_GPU = {
    "rounds": 1,
    "conversations": 16,
    "turns": 3,
    "restarts": 1,
    "held": 4,
    "system_tokens": 2048,
    "user_tokens": 2048,
    "output_tokens": 32,
    "outstanding": 4,
    "layers": 16,
    "cpu_mib": 4096,
    "lmcache_chunk": 256,
}
_GPU_WIDTHS = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}
"""Of a Llama 3.2 with 1B, its weights drawn anew: as wide ones as the small model has come to infinity in 16 layers."""
_HELP = {
    "rounds": "times that each of them has its turn",
    "conversations": "chats",
    "turns": "turns of each before the first restart",
    "restarts": "restarts of the engines, each with another turn behind it",
    "held": "of the conversations at their longest, how many vLLM's own KV cache holds",
    "system_tokens": "tokens that all prompts begin with",
    "user_tokens": "tokens that a user adds each turn, half as many more or fewer",
    "output_tokens": "tokens generated for a request",
    "outstanding": "requests asked for at a time",
    "layers": "layers of the model",
    "cpu_mib": "MiB of host memory that each cache has",
    "lmcache_chunk": "tokens that LMCache stores and finds together, by default as many as it does itself",
}
TITLES = {
    "requests_per_s": "Requests a second",
    "ttft_p50_s": "Time to the first token, median, s",
    "ttft_p95_s": "Time to the first token, 95%, s",
}
"""Of the plot's panels, by figure."""
_SPREAD = 0.5
_SETTLE_S = 0.5  # in which a cache writes what it still has to, before another is measured
_MEMORY_SHARE = (
    0.2  # of the device, which is the host for engines on a CPU: the engines of all caches are there at once
)
_GPU_ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "max_num_batched_tokens": 8192,
    "env": {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled when it is first used; all requests are greedy
        "VLLM_HOST_IP": "127.0.0.1",  # the machine may have no network
    },
}
"""The size of the KV cache is given, so vLLM does not measure what is free, which the other engines change."""
_VERSIONS = ("lmcache",)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, and under `broken` what does not hold. Raises EngineFailed, DaemonFailed and LMCacheFailed."""
    load_before = os.getloadavg()[0]
    plan = chat_plan(options, _SPREAD)
    caches = Caches(Room(options.cpu_mib << 20, options.lmcache_chunk, BLOCK), dict(options.option))
    names = options.only or names_here()
    widths = _GPU_WIDTHS if options.gpu else {}
    steps = options.rounds * len(names) * (1 + plan.turns + 2 * options.restarts)
    left_out: dict[str, str] = {}
    with harness.progress("peers", steps) as step, ExitStack() as stack:
        model = stack.enter_context(saved_llama(options, **widths))
        played = []
        for number in range(options.rounds):
            names = [name for name in names if name not in left_out]
            played.append(_play_round(number, names, caches, model, plan, options, step, left_out))
    names = [name for name in names if name not in left_out]
    rounds = [{name: each[name] for name in names} for each in played]
    compared = [LMCACHE] if {PREFIXD, LMCACHE} <= set(names) else []
    other_tokens = figures.other_tokens(rounds)
    broken = [] if options.gpu else list(other_tokens)
    if not options.short and not options.gpu:
        broken += [line for other in compared for line in figures.not_ahead(rounds, PREFIXD, other)]
    return {
        "load_before": load_before,  # what else the machine had to do
        "peers_versions": {name: metadata.version(name) for name in _VERSIONS if find_spec(name) is not None},
        "left_out": left_out,
        "caches": figures.summary(rounds),
        "leads": {other: [lead.to_plain() for lead in figures.leads(rounds, PREFIXD, other)] for other in compared},
        "rounds_in_turn": [[run.to_plain() for run in each.values()] for each in rounds],
        "same_tokens": not other_tokens,
        "other_tokens": other_tokens,
        "broken": broken,
    }


def _play_round(
    number: int,
    names: Sequence[str],
    caches: Caches,
    model: Path,
    plan: ChatPlan,
    options: argparse.Namespace,
    step: Callable[[], None],
    left_out: dict[str, str],
) -> dict[str, Run]:
    """All turns with every cache, the engines restarted before each of the last; without those that fail."""
    chats = {name: Chats(plan) for name in names}
    stages: dict[str, list[Stage]] = {name: [] for name in names}
    engines: dict[str, EngineProcess] = {}
    with ExitStack() as stack, ThreadPoolExecutor(options.outstanding) as askers:
        failing = Failing(engines, left_out, tolerant=options.gpu)
        for name in names:
            with failing(name):
                opened = caches.open(name)
                config = opened.__enter__()
                stack.callback(failing.close, name, opened)
                engines[name] = stack.enter_context(_engine(model, plan, config, options))
            step()
        for turn in range(plan.turns + options.restarts):
            restarts = max(0, turn + 1 - plan.turns)
            if restarts:
                _restart(engines, failing, side_by_side=options.gpu, step=step)
            first = (number + turn) % len(names)
            for name in [*names[first:], *names[:first]]:
                if name in engines:
                    title = figures.after_restart(restarts) if restarts else f"turn {turn + 1}"
                    with failing(name):
                        stages[name].append(play_turn(title, engines[name], chats[name], askers))
                        engines[name].wait_until_idle()
                    time.sleep(_SETTLE_S)
                step()
    return {name: Run(name, tuple(stages[name]), ()) for name in engines}


def _restart(
    engines: dict[str, EngineProcess], failing: Failing, *, side_by_side: bool, step: Callable[[], None]
) -> None:
    """Ends the engines and starts them again: one after the other, or all of them and then all."""
    for names in ([*engines],) if side_by_side else [[name] for name in engines]:
        for name in names:
            with failing(name):
                engines[name].stop()
                engines[name].launch()
        for name in names:
            if name in engines:
                with failing(name):
                    engines[name].wait_until_ready()
                step()


def _engine(model: Path, plan: ChatPlan, config: Config, options: argparse.Namespace) -> EngineProcess:
    longest = plan.prompt_tokens(plan.turns + options.restarts) + plan.output_tokens
    on_gpu = _GPU_ENGINE if options.gpu else {}
    return engine_of(model, options, longest, config, gpu_memory_utilization=_MEMORY_SHARE, **on_gpu)


def draw(panels: Sequence[Any], caches: dict[str, Any]) -> None:
    """A panel for each figure: medians of the rounds."""
    for axes, (figure, title) in zip(panels, TITLES.items(), strict=True):
        values = {LABELS[name]: [of[part][figure] for part in figures.PARTS] for name, of in caches.items()}
        bars(axes, figures.PARTS, values, title, "part of the load")


@harness.benchmark(
    "peers",
    __doc__,
    *engine_options(_HELP, _FULL, "a small run of about two minutes, for a first look"),
    flag("--gpu", "engines on the GPU that torch sees; see above"),
    only(LABELS, "one of them alone; again for another"),
    harness.PLOT,
    unrecorded=("option", "only"),
)
def main(options: harness.Options) -> harness.Outcome:
    """What was measured, and what must hold of it. Raises BenchmarkError outside the peers' environment."""
    wanted = ("vllm",) if options.gpu else ("vllm", "lmcache")
    if missing := [name for name in wanted if find_spec(name) is None]:
        command = "make gpu-engines" if options.gpu else "make bench-peers"
        raise harness.BenchmarkError(f"{sys.executable} lacks {' and '.join(missing)}; run `{command}`")
    if options.gpu and not has_gpu():
        raise harness.BenchmarkError(f"torch of {sys.executable} sees no CUDA GPU; run without --gpu")
    if (why_not := why_no_prefixd()) is not None:
        raise harness.BenchmarkError(f"{sys.executable}: {why_not}")
    fill_in(options, _ON_GPU if options.gpu else _FULL, _SHORT)
    measured = measure(options)
    caches = measured["caches"]
    rows = [{"part": part, "cache": LABELS[name], **of[part]} for part in figures.PARTS for name, of in caches.items()]
    tokens = ("prompt_tokens.computed", "prompt_tokens.total")
    leads = [{"other": other, **lead} for other, found in measured["leads"].items() for lead in found]
    return harness.Outcome(
        {"connector_options": dict(options.option), **measured},
        measured["broken"],
        [
            harness.Table(rows, ("part", "cache", *figures.HIGHER_IS_BETTER, *tokens)),
            harness.Table(leads, ("other", "part", "figure", "ours", "theirs", "ahead", "spread")),
        ],
        lambda panels: draw(panels, caches),
        len(TITLES),
    )


if __name__ == "__main__":
    harness.run(main)
