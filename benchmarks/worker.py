"""The worker's KV memory in one process: virtual tensors against block tables, the cost of mapping, memory held.

Runs the worker's engine in this process, without a daemon, on host memory and the small model that comes with prefixd:

    python -m benchmarks.worker --json worker.json --plot worker.png

virtual_over_paged: requests a second of worker.kv = virtual over worker.kv = paged. The same requests go through an
engine of each kind, which take turns pass by pass. single_generation: prompts that share nothing; at least 1.0.
prefix_sharing: short questions behind one long prefix whose KV is in memory; at least 1.2. Both designs must give the
same tokens. vTensor measured 1.3 to 1.8 and up to 2.42 on GPUs against vLLM's paged attention (sections 7.3.1, 7.3.2).

attention_calls_per_layer: kernels a layer and pass on the CUDA path, counted on the tests' stand-in for the driver,
with prompts and decoding requests in one pass; must be 1 in every batch.

step_p99_ratio: the 99th percentile of decode steps during which blocks are mapped in the background (a block for
requests that reach the end of theirs, a long prefix for a new request), over that of steps that map nothing; at most
1.1. idle_halves_p99_ratio is what the same ratio comes to between steps that both map nothing.

memory_ratio: the most bytes that the KV of a batch held over those of a cache that has room for the longest sequence
for each request; a list with one figure a batch, and the plot (vTensor, figure 11a). Must be below 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.common import harness
from benchmarks.common.options import option, seed
from benchmarks.kv import attention_calls, designs, step_tail
from benchmarks.kv import memory_by_design as memory_held
from benchmarks.kv.rig import load_embedded_model

LEAST_RATIO = {"single_generation": 1.0, "prefix_sharing": 1.2}
MOST_STEP_P99_RATIO = 1.1
CALL_BATCHES = (1, 2, 8)
MEMORY_BATCHES = (1, 2, 4, 8, 16, 32)
VTENSOR_THROUGHPUT = {
    "single_generation": {"Yi-6B": 1.8, "Yi-9B": 1.3, "Yi-34B": 1.4},
    "prefix_caching_up_to": 2.42,
}
"""Requests a second against vLLM on A100 GPUs: averages of vTensor's figure 9, and the most of its figure 10."""
_STEP_TOKENS = 512  # `worker.max_step_tokens` as it is by default


def workloads(options: argparse.Namespace) -> list[designs.Workload]:
    """What `virtual_over_paged` is measured on."""
    half, most = max(1, options.prompt_tokens // 2), options.prompt_tokens + options.prompt_tokens // 2
    question = options.question_tokens
    return [
        designs.Workload(
            "single_generation", options.requests, 0, half, most, options.output_tokens, options.requests, options.seed
        ),
        designs.Workload(
            "prefix_sharing",
            options.requests,
            options.prefix_tokens,
            max(1, question // 2),
            question + question // 2,
            options.answer_tokens,
            max(1, options.requests // 2),
            options.seed,
        ),
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All four. Raises BenchmarkError, ModelError."""
    batches = [batch for batch in MEMORY_BATCHES if batch <= options.largest_batch]
    works = workloads(options)
    total = len(works) * (1 + options.repetitions) + 1 + (1 + options.rounds) + len(batches)
    step_plan = step_tail.StepPlan(
        rounds=options.rounds,
        steps=-(-options.steps // 4) * 4,
        batch=4,
        prompt_tokens=64,
        prefix_tokens=options.prefix_tokens,
        run_blocks=options.run_blocks,
        seed=options.seed,
    )
    memory_plan = memory_held.MemoryPlan(batches, 32, options.longest_prompt_tokens, 16, options.seed)
    with harness.progress("worker", total) as step:
        model = load_embedded_model()
        compared = [designs.compare(model, work, options.repetitions, _STEP_TOKENS, step) for work in works]
        calls = attention_calls.count([batch for batch in CALL_BATCHES if batch <= options.largest_batch])
        step()
        steps = step_tail.measure(model, step_plan, step)
        memory = memory_held.measure(model, memory_plan, step)
    return {
        "virtual_over_paged": {each["name"]: each["virtual_over_paged"] for each in compared},
        "vtensor_over_vllm": VTENSOR_THROUGHPUT,
        "same_tokens": all(each["same_tokens"] for each in compared),
        "attention_calls_per_layer": {str(each["batch"]): each["attention_calls_per_layer"] for each in calls},
        **{name: steps.pop(name) for name in ("step_p99_ratio", "idle_halves_p99_ratio", "step_p50_ratio")},
        "memory_ratio": {str(each["batch"]): each["memory_ratio"] for each in memory},
        "workloads": compared,
        "attention_calls": calls,
        "step_times": [steps],
        "memory": memory,
    }


def violations(result: Mapping[str, Any]) -> list[str]:
    """What a result breaks of what must hold, in words."""
    found = []
    if not result["same_tokens"]:
        differing = [each["name"] for each in result["workloads"] if not each["same_tokens"]]
        found.append(f"virtual and paged give different tokens in {', '.join(differing)}")
    for name, least in LEAST_RATIO.items():
        if result["virtual_over_paged"][name] < least:
            found.append(f"virtual_over_paged is {result['virtual_over_paged'][name]} in {name}, below {least}")
    for each in result["attention_calls"]:
        if each["attention_calls_per_layer"] != 1:
            found.append(f"{each['attention_calls_per_layer']} attention calls a layer in batch {each['batch']}, not 1")
        if each["largest_pass"] != each["batch"] or (each["batch"] > 1 and not each["mixed_passes"]):
            found.append(f"no pass of batch {each['batch']} had all requests, or none had prompts and decoding ones")
    if result["step_p99_ratio"] > MOST_STEP_P99_RATIO:
        found.append(
            f"step_p99_ratio is {result['step_p99_ratio']}, above {MOST_STEP_P99_RATIO}; "
            f"steps that map nothing differ by {result['idle_halves_p99_ratio']} on this machine"
        )
    (times,) = result["step_times"]
    if times["steps"]["idle"]["blocks_mapped"]:
        found.append("blocks were mapped in steps that should map nothing")
    if not all(times["steps"][kind]["blocks_mapped"] for kind in ("boundary", "attach")):
        found.append("nothing was mapped in steps that should map blocks")
    for batch, ratio in result["memory_ratio"].items():
        if not 0 < ratio < 1:
            found.append(f"the KV of batch {batch} held {ratio} of what a preallocating cache takes")
    return found


@harness.benchmark(
    "worker",
    __doc__,
    option("--requests", 8, "requests of a workload; all at a time, or half of them with a shared prefix"),
    option("--repetitions", 5, "repetitions of both designs, each with other prompts"),
    option("--prompt-tokens", 256, "length of an independent prompt, give or take half"),
    option("--output-tokens", 32, "tokens generated for it"),
    option("--prefix-tokens", 3072, "length of the shared prefix, and of what a new request attaches"),
    option("--question-tokens", 32, "length of a question behind the prefix, give or take half"),
    option("--answer-tokens", 10, "tokens generated for a question"),
    option("--rounds", 5, "rounds of decode steps; the ratio is the median of the rounds'"),
    option("--steps", 240, "decode steps of a round; half of them map blocks"),
    option("--run-blocks", 1, "blocks of an attached prefix that lie together; each run is a mapping of the kernel"),
    option("--largest-batch", 32, "most requests at a time whose memory, and whose attention calls, are measured"),
    option("--longest-prompt-tokens", 1024, "longest prompt of these"),
    option("--threads", 1, "threads of torch; one core less than there are leaves one to map in the background"),
    seed("of prompts and of the order of steps"),
    harness.PLOT,
)
def main(options: harness.Options) -> harness.Outcome:
    """What was measured, and what must hold of it."""
    torch.set_num_threads(options.threads)
    result = measure(options)
    return harness.Outcome(result, violations(result), draw=lambda axes: memory_held.draw(axes, result["memory"]))


if __name__ == "__main__":
    harness.run(main)
