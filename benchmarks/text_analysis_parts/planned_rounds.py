"""Workloads as the planner takes them."""

from __future__ import annotations

from functools import partial

import numpy as np

from prefixd.planner.workload import PlannedRequest, Workload
from prefixd.workloads.text_analysis import TextAnalysis


def of_text_analysis(workload: TextAnalysis) -> list[Workload]:
    """The text analysis workload as `prefixd.cli.demo.runner` sends it: each prefix once, and then the requests of
    each repeat."""
    rounds = [workload.warm_up_prompts(), *(workload.prompts(repeat) for repeat in range(workload.repeats))]
    planned = []
    for number, prompts in enumerate(rounds):
        requests = [
            PlannedRequest(0.0, partial(np.array, prompt, np.uint32), len(prompt), workload.output_tokens)
            for prompt in prompts
        ]
        name = f"text analysis, {f'round {number}' if number else 'warm-up'}"
        planned.append(Workload(name, requests, outstanding=workload.outstanding))
    return planned
