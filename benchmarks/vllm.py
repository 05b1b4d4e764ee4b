"""vLLM alone and vLLM with prefixd on the same chats: waits for the first token, tokens computed, requests a second.

The same requests on vLLM alone, its own prefix cache on, and on vLLM with prefixd's connector. Run it with the
Python that vLLM is installed in:

    .venv-vllm/bin/python -m benchmarks.vllm --json results.json --plot results.png

1. Chats of several turns, more of them than vLLM's own KV cache holds (--held). All conversations have their
   turn before any has its next; --outstanding are asked for at a time. A prompt is all that was said before,
   with the answers that this engine gave, and begins with a system prompt that all conversations share.
2. The engine is restarted; the daemon is not. Then every conversation has one more turn.
3. Nothing to hit: prompts that nobody asked before, on both engines in turn, in several rounds, a round's
   prompts all at once. The two engines are started anew every few rounds (--pairs times in all), in turn the one
   and the other first: two processes of the same vLLM differ by up to 5% for as long as they live.

The model is a Llama with random weights in float32, built for the run: in bfloat16 vLLM alone gives other tokens
when it computes a prompt in other pieces. It computes on --threads cores. Tokens computed and hits are vLLM's own
counters. The run fails when any answer differs, when prefixd does not halve the prompt tokens that are computed,
when the median wait for the first token is not shorter, or when with nothing to hit fewer than 95% of the
requests a second are left. With --short times are shown but not judged: there are too few of them.

With --model hybrid it is a Gemma 3 whose layers see 128 tokens back, or all: the chats go to an engine that saves every
KV group of every block (resume_every = 1), and to one that saves of a window what likely prefixes need. The run fails
when the second does not have as many hits, or saves more than 0.6 of the bytes a token. The chats share no block:
where prompts part for the first time, the second one that has the beginning finds less of it (--system-tokens 256).

With --model codecs it is SmolLM2-135M in float32, with pages as a GPU's attention has them: texts of --round-tokens are
computed, saved to a disk with each codec, and loaded by an engine that is started anew. differing_share is the share of
--output-tokens greedy tokens that are not those of the exact blocks; one that differs changes all that follow it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.codecs_parts import vllm_tokens
from benchmarks.common import harness
from benchmarks.common.options import option
from benchmarks.common.plots import bars
from benchmarks.engines import vllm_hybrid
from benchmarks.engines.vllm_chat import VOCABULARY, chat_plan, engine_of, play_turn, saved_llama
from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest, connector
from benchmarks.engines.vllm_figures import Round, Run, Stage, broken_promises, computed_saving, nothing_to_hit
from benchmarks.engines.vllm_options import engine_options, fill_in
from benchmarks.workloads.growing_chats import Chats, Tokens, distinct_prompts
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client

_FULL = {
    "conversations": 16,
    "turns": 5,
    "held": 4,
    "system_tokens": 256,
    "user_tokens": 192,
    "output_tokens": 16,
    "outstanding": 2,
    "rounds": 12,
    "pairs": 4,
    "round_requests": 8,
    "round_tokens": 512,
    "layers": 8,
    "cpu_mib": 96,
}
_SHORT = {
    **_FULL,
    "conversations": 6,
    "held": 2,
    "rounds": 3,
    "pairs": 1,
    "round_requests": 4,
    "layers": 4,
    "cpu_mib": 12,
}
_HYBRID = {
    **_FULL,
    "conversations": 6,
    "turns": 3,
    "held": 1,
    "user_tokens": 1024,
    "output_tokens": 80,
    "system_tokens": 16,  # less than a block: the chats share nothing
}
_HYBRID_SHORT = {**_HYBRID, "conversations": 3, "turns": 2}
_CODECS = {**_FULL, "output_tokens": 48}
_CODECS_SHORT = {**_CODECS, "round_tokens": 128, "output_tokens": 8}
_HELP = {
    "conversations": "chats",
    "turns": "turns of each before the restart",
    "held": "of the conversations at their longest, how many vLLM's own KV cache holds",
    "system_tokens": "tokens that all prompts begin with",
    "user_tokens": "tokens that a user adds each turn",
    "output_tokens": "tokens generated for a request",
    "outstanding": "requests asked for at a time",
    "rounds": "rounds with nothing to hit",
    "pairs": "pairs of engine processes that these are spread over",
    "round_requests": "requests of such a round",
    "round_tokens": "tokens of their prompts",
    "layers": "layers of the model",
    "cpu_mib": "MiB of the daemon's CPU tier; less than all chats need, so that some of them are on disk",
}


class Comparison:
    """The two engines, the daemon, and what has been seen of them."""

    def __init__(self, options: argparse.Namespace, model: Path, stack: ExitStack, step: Callable[[], None]) -> None:
        self._options = options
        self._model = model
        self._stack = stack
        self._step = step
        self._askers = stack.enter_context(ThreadPoolExecutor(options.outstanding))
        # Entered first, left last: an engine gives back what it holds before the daemon ends.
        self._daemon = stack.enter_context(
            DaemonProcess({"cpu.bytes": f"{options.cpu_mib}MiB", "disk.bytes": "4GiB", "cpu.populate": True})
        )
        self._admin = stack.enter_context(Client(self._daemon.address, name="benchmark"))
        self._plan = chat_plan(options)
        self._kv_transfer = {"vllm": None, "prefixd": connector(self._daemon.address, **dict(options.option))}

    def chat(self, name: str) -> tuple[Run, EngineProcess]:
        """All turns on configuration `name`, its engine restarted before the last; the engine still runs."""
        chats = Chats(self._plan)
        starts: list[float] = []
        engine = self._engine(name, starts)
        stages = [self._turn(f"turn {turn}", engine, chats) for turn in range(1, self._plan.turns + 1)]
        engine.stop()
        engine = self._engine(name, starts)
        stages.append(self._turn("after restart", engine, chats))
        return Run(name, tuple(stages), tuple(starts)), engine

    def round(self, number: int, alone: EngineProcess, prefixd: EngineProcess) -> Round:
        """New prompts on both engines, each of which is first every other time."""
        options = self._options
        prompts = distinct_prompts(
            options.round_requests, options.round_tokens, VOCABULARY, f"{options.seed} round {number}"
        )
        seconds: dict[EngineProcess, float] = {}
        cpu_s: dict[EngineProcess, float] = {}
        tokens: dict[EngineProcess, list[Tokens]] = {}
        daemon_before = _cpu_s(self._daemon.pid)
        for engine in (alone, prefixd) if number % 2 else (prefixd, alone):
            cpu_before = _cpu_s(engine.pid)
            begin = time.monotonic()
            # All at once: one after the other, requests fall into step with each other or out of it, and which of it
            # is chance.
            results = engine.generate([EngineRequest(prompt, options.output_tokens) for prompt in prompts])
            seconds[engine] = time.monotonic() - begin
            tokens[engine] = [result.token_ids for result in results]
            # What is left to write would otherwise be done in the other engine's time.
            engine.wait_until_idle()
            self._admin.flush()
            cpu_s[engine] = _cpu_s(engine.pid) - cpu_before
        self._step()
        return Round(
            requests=len(prompts),
            alone_s=seconds[alone],
            prefixd_s=seconds[prefixd],
            same_tokens=tokens[alone] == tokens[prefixd],
            alone_cpu_s=cpu_s[alone],
            prefixd_cpu_s=cpu_s[prefixd],
            daemon_cpu_s=_cpu_s(self._daemon.pid) - daemon_before,
        )

    def new_pair(self, number: int, old: Sequence[EngineProcess]) -> tuple[EngineProcess, EngineProcess]:
        """An engine without prefixd and one with it, warm, in place of `old`."""
        for engine in old:
            engine.stop()
        names = ("vllm", "prefixd")
        engines = {name: self._engine(name, []) for name in (names if number % 2 else reversed(names))}
        for engine in engines.values():
            prompts = distinct_prompts(1, self._options.round_tokens, VOCABULARY, f"{self._options.seed} pair {number}")
            engine.generate([EngineRequest(prompt, self._options.output_tokens) for prompt in prompts])
            engine.wait_until_idle()
        return engines["vllm"], engines["prefixd"]

    def _engine(self, name: str, starts: list[float]) -> EngineProcess:
        longest = self._plan.prompt_tokens(self._plan.turns + 1) + self._plan.output_tokens
        longest = max(longest, self._options.round_tokens + self._plan.output_tokens)
        begin = time.monotonic()
        engine = self._stack.enter_context(engine_of(self._model, self._options, longest, self._kv_transfer[name]))
        starts.append(time.monotonic() - begin)
        self._step()
        return engine

    def _turn(self, name: str, engine: EngineProcess, chats: Chats) -> Stage:
        stage = play_turn(name, engine, chats, self._askers)
        self._step()
        return stage


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process has had, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both configurations, and under `broken` what does not hold. Raises EngineFailed and DaemonFailed."""
    load_before = os.getloadavg()[0]
    steps = 2 * (options.turns + 3) + options.rounds + 2 * (options.pairs - 1)
    with harness.progress("vLLM", steps) as step, ExitStack() as stack:
        model = stack.enter_context(saved_llama(options))
        comparison = Comparison(options, model, stack, step)
        alone, alone_engine = comparison.chat("vllm")
        prefixd, prefixd_engine = comparison.chat("prefixd")
        pair = (alone_engine, prefixd_engine)
        rounds = []
        for number in range(options.rounds):
            if number and number % -(-options.rounds // options.pairs) == 0:
                pair = comparison.new_pair(number, pair)
            rounds.append(comparison.round(number, *pair))
    nothing = nothing_to_hit(rounds)
    return {
        "load_before": load_before,  # what else the machine had to do
        "computed_saving": computed_saving(alone, prefixd),
        "same_tokens": alone.outputs == prefixd.outputs and nothing["same_tokens"],
        "nothing_to_hit": nothing,
        "runs": [alone.to_plain(), prefixd.to_plain()],
        "broken": broken_promises(alone, prefixd, nothing, times=not options.short),
    }


def draw(panels: Sequence[Any], result: dict[str, Any]) -> None:
    """Three panels: waits for the first token, tokens computed, requests a second."""
    waits, tokens, rates = panels
    runs = {run["name"]: run for run in result["runs"]}
    stages = [stage["name"].replace(" ", "\n") for stage in runs["vllm"]["stages"]]

    def by_stage(figure: str, name: str) -> dict[str, list[float]]:
        return {engine: [stage[figure][name] for stage in run["stages"]] for engine, run in runs.items()}

    bars(waits, stages, by_stage("ttft", "p50"), "Time to the first token, median, s", "stage")
    asked = {"asked": by_stage("prompt_tokens", "total")["vllm"]}
    bars(tokens, stages, asked | by_stage("prompt_tokens", "computed"), "Prompt tokens computed", "stage")
    nothing = result["nothing_to_hit"]
    cold = {"vllm": nothing["alone_requests_per_s"], "prefixd": nothing["prefixd_requests_per_s"]}
    both = {engine: [run["requests_per_s"], cold[engine]] for engine, run in runs.items()}
    bars(rates, ["chat", "nothing to hit"], both, "Requests a second", "load")


@harness.benchmark(
    "vllm",
    __doc__,
    option("--model", "llama", "what is measured, see above", str, choices=("llama", "hybrid", "codecs")),
    *engine_options(_HELP, _FULL, "a small run of about a minute, for a first look"),
    harness.PLOT,
    unrecorded=("option",),
)
def main(options: harness.Options) -> harness.Outcome:
    """What was measured, and what must hold of it. Raises BenchmarkError without vLLM."""
    if find_spec("vllm") is None:
        raise harness.BenchmarkError(
            f"vLLM is not installed in {sys.executable}; run `make test-vllm` once, then .venv-vllm/bin/python"
        )
    sizes = {"llama": (_FULL, _SHORT), "hybrid": (_HYBRID, _HYBRID_SHORT), "codecs": (_CODECS, _CODECS_SHORT)}
    fill_in(options, *sizes[options.model])
    measured = {"llama": measure, "hybrid": vllm_hybrid.measure, "codecs": vllm_tokens.measure}[options.model](options)
    result = {"connector_options": dict(options.option), **measured}
    if options.model == "codecs":
        table = harness.Table(measured["rows"], tuple(measured["rows"][0]))
        return harness.Outcome(result, measured["broken"], [table])
    if options.model == "hybrid":
        rows = [{"way": name, **run} for name, run in measured["runs"].items()]
        columns = ("way", "bytes_per_token", "saved_bytes", "hit_tokens", "prompt_tokens")
        return harness.Outcome(result, measured["broken"], [harness.Table(rows, columns)])
    runs = measured["runs"]
    rows = [{**stage, "engine": run["name"]} for run in runs for stage in [*run["stages"], {**run, "name": "all"}]]
    counts = (f"prompt_tokens.{name}" for name in ("total", "computed", "local", "cpu", "disk"))
    table = harness.Table(rows, ("engine", "name", "requests_per_s", "ttft.p50", "ttft.p95", *counts))
    return harness.Outcome(result, measured["broken"], [table], lambda panels: draw(panels, measured), 3)


if __name__ == "__main__":
    harness.run(main)
