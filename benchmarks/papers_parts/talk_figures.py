"""The figures of the talk about PagedAttention and vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common.harness import BenchmarkError
from benchmarks.papers_parts.figure import Claim, Curve, Figure, Measured, Paper, Values
from benchmarks.papers_parts.gpu_files import point
from benchmarks.papers_parts.measures.shared_blocks import Blocks, Lengths, of_beams, of_samples, share_gpt_lengths
from benchmarks.pressure import Batch, measure, summary, violations

_TALK = Paper(
    "PagedAttention and vLLM", "Paged Attention & vLLM for Efficient LLM Inference Engine", "a talk", "A100 40 GB"
)
_GPU_TOKENS = 8256
_WIDTHS = (2, 4, 6)
_FROM = "OPT-13B with ShareGPT; the chart is that of PagedAttention (SOSP 2023), whose section 6.3 has the numbers"


def _saved(of: Callable[[int, Sequence[Lengths]], Blocks], short: bool) -> Measured:
    requests = share_gpt_lengths(1, 16) if short else share_gpt_lengths(6, 256)
    shares = {width: 100 * of(width, requests).share for width in (_WIDTHS[:1] if short else _WIDTHS)}
    curve = Curve("sequences", "blocks saved, %", {"virtual tensors": (list(shares), list(shares.values()))})
    return Measured({str(width): share for width, share in shares.items()}, curve)


def _sharing(short: bool) -> Measured:
    return _saved(of_samples, short)


def _beams(short: bool) -> Measured:
    return _saved(of_beams, short)


def _preemption(short: bool) -> Measured:
    batch = Batch(requests=4, prompt_tokens=32, output_tokens=24, share=2) if short else Batch(12, 96, 64, 3)
    result = summary(measure(batch))
    if found := violations(result):
        raise BenchmarkError("; ".join(found))
    swap, recompute = result["swap_ratio"], result["recompute_ratio"]
    return Measured({"recompute": recompute / swap, "swapped": swap, "recomputed": recompute})


def _preemption_on_gpu(parts: Mapping[str, Any]) -> Values:
    of = point(parts["first_token"]["points"], tokens=_GPU_TOKENS)
    step_ms = of["gpu_ms"]  # what the first token takes with nothing to copy or to compute again
    return {"seconds": (of["recomputed_ms"] - step_ms) / (of["cpu_ms"] - step_ms)}


TALK_FIGURES = (
    Figure(
        name="talk-sharing",
        paper=_TALK,
        place="memory saving via sharing, parallel samples",
        shows="blocks saved, of all blocks without sharing",
        claims=(
            Claim("2", "2 samples", "%", 16.2),
            Claim("4", "4 samples", "%", words="drawn"),
            Claim("6", "6 samples", "%", 30.5),
        ),
        conditions=_FROM,
        ours="the small model, 6 prompts with ShareGPT's mean lengths; prompts, outputs and blocks a quarter as long",
        why="How long prompts are beside outputs decides; our lengths are drawn with ShareGPT's means, not from it.",
        seconds=75,
        timed=False,
        cpu=_sharing,
    ),
    Figure(
        name="talk-beams",
        paper=_TALK,
        place="memory saving via sharing, beam search",
        shows="blocks saved, of all blocks without sharing",
        claims=(
            Claim("2", "2 beams", "%", 44.3),
            Claim("4", "4 beams", "%", words="drawn"),
            Claim("6", "6 beams", "%", 66.3),
        ),
        conditions=f"{_FROM}. Its speedups over Orca (2.4, 3.2 and 3.5 times) have no counterpart here",
        ours="the same prompts; beams share blocks by mapping them",
        why="The beams of a random model descend from a few others sooner than those of a trained one, so they share "
        "more.",
        seconds=75,
        timed=False,
        cpu=_beams,
    ),
    Figure(
        name="talk-preemption",
        paper=_TALK,
        place="preemption and recovery",
        shows="requests preempted by swapping and by recomputing",
        claims=(
            Claim("seconds", "time of recomputing, over that of copying back", "x", words="surprisingly little"),
            Claim("recompute", "requests/s, recomputing over swapping", "x", words="recomputing is surprisingly fast"),
            Claim("swapped", "requests/s of swapping, of those with all the memory", "x", words="not shown"),
            Claim("recomputed", "requests/s of recomputing, the same", "x", words="not shown"),
        ),
        conditions="latency of 256 tokens by the size of a block; small blocks swap slowly",
        ours="12 requests of 96 and 64 tokens with a third of the memory that they want, blocks of 16 tokens. "
        "GPU: 8,256 tokens of a model of 8B's size, in copies of whole chunks",
        why="The talk's copies are of small blocks, ours are of 2 MiB. A CPU recomputes slowly and copies within one "
        "memory.",
        seconds=50,
        cpu=_preemption,
        gpu=_preemption_on_gpu,
    ),
)
