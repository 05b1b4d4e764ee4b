"""The tables and figures of vAttention, sections 5 to 7."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.kv import step_tail
from benchmarks.papers_parts.figure import Claim, Curve, Figure, Measured, Paper, Values
from benchmarks.papers_parts.gpu_files import point
from benchmarks.papers_parts.measures.engine_pairs import compare_all, decoding, embedded_model, prompts, ratio
from benchmarks.papers_parts.measures.host_mapping import call_times, mapping_times
from prefixd_swap.block_size import choose_blocks
from prefixd_swap.group_shape import KvGeometry

VATTENTION = Paper(
    "vAttention",
    "vAttention: Dynamic Memory Management for Serving LLMs without PagedAttention",
    "sections 6 and 7",
    "A100 80 GB",
)
_GPU_PROMPT = 16384
_PAGES = {"64k": 64 << 10, "128k": 128 << 10, "256k": 256 << 10, "2m": 2 << 20}
_MODELS = {"yi6b": (32, 4), "llama": (32, 8), "yi34b": (60, 8)}
"""Layers and KV heads of the paper's table 5; heads have 128 numbers of two bytes."""


def _calls(short: bool) -> Measured:
    chunks, rounds = (4, 1) if short else (64, 20)
    found = {name: call_times(_PAGES[name], chunks, rounds) for name in ("64k", "2m")}
    found["64k"]["release"] += found["64k"].pop("unmap")  # one call in the paper
    values = {f"{call}_{name}": us for name, calls in found.items() for call, us in calls.items()}
    return Measured(values)


def _calls_on_gpu(parts: Mapping[str, Any]) -> Values:
    single = point(parts["virtual_memory"]["points"], chunks=1)
    return {f"{call}_2m": single[f"{call}_us"] for call in ("create", "map", "access", "unmap", "release")}


@lru_cache(maxsize=2)
def _prefill(short: bool) -> dict[int, dict[str, Any]]:
    """By the prompt's tokens; of the table and of the figure, which show the same runs."""
    lengths = (32,) if short else (512, 1024, 2048, 4096)
    return dict(zip(lengths, compare_all([prompts(length) for length in lengths], short), strict=True))


def _first_token(short: bool) -> Measured:
    found = _prefill(short)
    ratios = {length: ratio(of) for length, of in found.items()}
    lines = {
        design: (list(found), [1 / of[f"{design}_requests_per_s"]["median"] for of in found.values()])
        for design in ("virtual", "paged")
    }
    values = {"shortest": ratios[min(ratios)], "longest": ratios[max(ratios)]}
    details = {"ratios": {str(length): value for length, value in ratios.items()}}
    return Measured(values, Curve("tokens of the prompt", "s to the first token", lines), details)


def _first_token_on_gpu(parts: Mapping[str, Any]) -> Values:
    longest = max(parts["first_token"]["points"], key=lambda each: each["tokens"])
    if not 32_000 <= longest["tokens"] <= 34_000:
        raise LookupError("no prompt of 32K tokens")
    return {"seconds_32k": longest["recomputed_ms"] / 1e3}


def _prefill_throughput(short: bool) -> Measured:
    found = _prefill(short)
    ratios = [ratio(of) for of in found.values()]
    lines = {
        design: (list(found), [length * of[f"{design}_requests_per_s"]["median"] for length, of in found.items()])
        for design in ("virtual", "paged")
    }
    return Measured({"least": min(ratios), "most": max(ratios)}, Curve("tokens of the prompt", "tokens/s", lines))


def _decode(short: bool) -> Measured:
    batches, context, output = ((1, 2), 32, 4) if short else ((1, 2, 4, 8), 2048, 24)
    found = compare_all([decoding(batch, context, output) for batch in batches], short)
    ratios = [ratio(each) for each in found]
    lines = {
        design: (list(batches), [output * each[f"{design}_requests_per_s"]["median"] for each in found])
        for design in ("virtual", "paged")
    }
    values = {"first": ratios[0], "most": max(ratios)}
    details = {"ratios": dict(zip(map(str, batches), ratios, strict=True))}
    return Measured(values, Curve("batch", "tokens/s", lines), details)


def _decode_on_gpu(parts: Mapping[str, Any]) -> Values:
    points = [*parts["decode"]["points"], *parts.get("decode_16k", {}).get("points", ())]
    best = max(each["tokens_per_s"] for each in points if each["batch"] == 32)
    return {"tokens_per_s_32": best}


def _overlap(short: bool) -> Measured:
    rounds, steps, prefix = (1, 8, 64) if short else (5, 120, 3072)
    plan = step_tail.StepPlan(rounds, steps, batch=4, prompt_tokens=64, prefix_tokens=prefix, run_blocks=1)
    ratios, details = {}, {}
    for name, in_background in (("alone", False), ("beside", True)):
        found = step_tail.measure(embedded_model(), plan, lambda: None, in_background)
        steps = found["steps"]
        ratios[name] = steps[step_tail.ATTACH]["p50_ms"] / steps[step_tail.IDLE]["p50_ms"]
        details[name] = steps
    return Measured(ratios, details=details)


def _bandwidth(short: bool) -> Measured:
    chunks, rounds = (4, 1) if short else (64, 20)
    found = {name: nbytes / call_times(nbytes, chunks, rounds)["map"] / 1e3 for name, nbytes in _PAGES.items()}
    return Measured(found)


def _bandwidth_on_gpu(parts: Mapping[str, Any]) -> Values:
    single = point(parts["virtual_memory"]["points"], chunks=1)
    return {"2m": parts["virtual_memory"]["chunk_bytes"] / single["range_map_us"] / 1e3}


def _before_a_prompt(short: bool) -> Measured:
    tokens, rounds = (64, 1) if short else (2048, 7)
    model = embedded_model()
    (prompt,) = compare_all([prompts(tokens)], short)
    compute_s = 1 / prompt["virtual_requests_per_s"]["median"]
    times = {name: mapping_times(model.spec.geometry, tokens, nbytes, rounds) for name, nbytes in _PAGES.items()}
    values = {f"sync_{name}": 1 + cold / compute_s for name, (cold, _) in times.items()}
    values["reused"] = 1 + statistics.mean(warm for _, warm in times.values()) / compute_s
    details = {name: {"mapped_ms": cold * 1e3, "reused_ms": warm * 1e3} for name, (cold, warm) in times.items()}
    return Measured(values, details={"prompt_ms": compute_s * 1e3, **details})


def _before_a_prompt_on_gpu(parts: Mapping[str, Any]) -> Values:
    mapped = point(parts["attach"]["points"], layout="token", tokens=_GPU_PROMPT)
    times = sorted((each["tokens"], each["recomputed_ms"]) for each in parts["first_token"]["points"])
    if not times or not times[0][0] <= _GPU_PROMPT <= times[-1][0]:
        raise LookupError(f"no prompts around {_GPU_PROMPT} tokens")
    # On the line between the measured prompts on either side, as logarithms: time grows as a power of the length.
    lengths, milliseconds = np.log(np.array(times)).T
    compute_us = 1e3 * float(np.exp(np.interp(np.log(_GPU_PROMPT), lengths, milliseconds)))
    return {"sync_2m": 1 + mapped["map_us"] / compute_us, "reused": 1 + mapped["reuse_us"] / compute_us}


def _block_sizes(short: bool) -> Measured:
    del short  # nothing is run
    values = dict[str, float]()
    for model, (layers, heads) in _MODELS.items():
        asked = KvGeometry(layers, heads, 128, "bfloat16", 16)
        (geometry,) = choose_blocks([asked], _PAGES["2m"], "auto")
        block_memory = geometry.block_tokens * geometry.token_memory
        values |= {f"{model}_tokens": geometry.block_tokens, f"{model}_waste": block_memory / (1 << 20)}
    return Measured(values)


_TABLE_3: Mapping[str, Mapping[str, float]] = {
    "2m": {"reserve": 2, "create": 29, "map": 2, "access": 38, "unmap": 34, "release": 23, "free": 1},
    "64k": {"reserve": 18, "create": 1.7, "map": 8, "release": 2, "free": 35},
}
_SIZE = {"2m": "2 MB", "64k": "64 KB"}
_TABLE_8 = {
    "Yi-6B": ("yi6b", 2048, 128),
    "Llama-3-8B": ("llama", 1024, 128),
    "Yi-34B": ("yi34b", 1024, 240),
}
VATTENTION_FIGURES = (
    Figure(
        name="vattention-table-3",
        paper=VATTENTION,
        place="table 3",
        shows="calls that manage virtual memory",
        claims=tuple(
            Claim(f"{call}_{size}", f"{call}, pages of {_SIZE[size]}", "us", paper)
            for size, calls in _TABLE_3.items()
            for call, paper in calls.items()
        ),
        conditions="2 MB by CUDA's calls, 64 KB by an extended driver, which unmaps in its release",
        ours="64 chunks of host memory one by one, through prefixd's classes. GPU: one chunk of 2 MiB, CUDA's calls",
        why="A CPU has no call for access. In host memory `create` fills pages of 4 KB with zeros and `map` enters "
        "each in the page table, so that both take their time by the byte, where CUDA's calls take it by the call.",
        seconds=4,
        cpu=_calls,
        gpu=_calls_on_gpu,
    ),
    Figure(
        name="vattention-table-6",
        paper=VATTENTION,
        place="table 6",
        shows="time to the first token of a long prompt",
        claims=(
            Claim("shortest", "paged over contiguous, shortest prompt (paper: 16K, 2.44 s and 1.38 s)", "x", 1.77),
            Claim("longest", "the same, longest (paper: 192K, 266 s and 67.8 s)", "x", 3.92),
            Claim("seconds_32k", "a prompt of 32K tokens, contiguous", "s", 3.50),
        ),
        conditions="Yi-6B, FlashAttention, 2,048 tokens a step; FlashInfer: 1.13 to 1.27",
        ours="the small model, prompts of 512 to 4,096 tokens, 512 a step. GPU: a model of 8B's size",
        why="On a CPU a paged pass copies all earlier blocks of a layer together. By token, a layer's keys "
        "lie 16 KiB apart and in the copy side by side: reading those takes four fifths of the time (4,096 keys), so "
        "that the copy pays with long prompts. The paper's loss is its kernels'.",
        seconds=60,
        cpu=_first_token,
        gpu=_first_token_on_gpu,
    ),
    Figure(
        name="vattention-table-7",
        paper=VATTENTION,
        place="table 7",
        shows="memory that can be mapped in a second",
        claims=(
            Claim("64k", "pages of 64 KB", "GB/s", 7.59),
            Claim("128k", "pages of 128 KB", "GB/s", 14.56),
            Claim("256k", "pages of 256 KB", "GB/s", 27.04),
            Claim("2m", "pages of 2 MB", "GB/s", 35.17),
        ),
        conditions="one GPU; decoding needs 0.6 GB/s at most",
        ours="64 chunks of host memory that exist already, mapped one by one. GPU: map and access, one by one",
        why="In host memory each page of 4 KB is entered in the page table when it is mapped, which bounds the rate; "
        "with small chunks the call itself takes most of the time, as on a GPU.",
        seconds=10,
        cpu=_bandwidth,
        gpu=_bandwidth_on_gpu,
    ),
    Figure(
        name="vattention-table-8",
        paper=VATTENTION,
        place="table 8",
        shows="tokens of a block, and the most memory that a request wastes",
        claims=tuple(
            claim
            for model, (key, tokens, waste) in _TABLE_8.items()
            for claim in (
                Claim(f"{key}_tokens", f"{model}: tokens of a block, pages of 2 MB", "tokens", tokens),
                Claim(f"{key}_waste", f"{model}: most waste a request", "MiB", waste),
            )
        ),
        conditions="one GPU a model; with its own driver and pages of 64 KB: 64, 32, 32 tokens, 4, 4, 7.5 MB",
        ours="computed, for the layout by token, chunks of 2 MiB and `worker.block_padding = auto`",
        why="In the layout by token a block is one piece for all layers, and not a page for the keys and the values of "
        "each layer, so no smaller page is needed. A token of Yi-34B, 240 KiB, is padded to 256 KiB, which each of its "
        "tokens takes.",
        seconds=1,
        timed=False,
        cpu=_block_sizes,
    ),
    Figure(
        name="vattention-8",
        paper=VATTENTION,
        place="figure 8",
        shows="throughput of prompts, contiguous over paged",
        claims=(
            Claim("least", "least of the lengths", "x", 1.60),
            Claim("most", "most of the lengths", "x", 3.92),
        ),
        conditions="Yi-6B and Llama-3-8B, 1K to 192K tokens, FlashAttention; FlashInfer: 1.03 to 1.45",
        ours="the runs of table 6",
        why="As in table 6.",
        seconds=50,
        cpu=_prefill_throughput,
    ),
    Figure(
        name="vattention-9",
        paper=VATTENTION,
        place="figure 9",
        shows="throughput of decoding, contiguous over paged",
        claims=(
            Claim("first", "over vLLM at batch 1", "x", 1.1),
            Claim("most", "over vLLM, most of the batches (Llama-3-8B 1.3, Yi-34B 1.6)", "x", 1.97),
            Claim(
                "tokens_per_s_32", "Llama-3-8B at batch 32", "tokens/s", words="531, 16 times the tokens on two GPUs"
            ),
        ),
        conditions="Yi-6B, 16K tokens a request, against vLLM 0.2.7's kernel; FlashAttention with blocks of 128 is as "
        "fast as contiguous. 531 tokens/s on two A100 with 16K tokens, paged in blocks of 128",
        ours="the small model, 2,048 tokens a request, batches 1 to 8; requests share the context, so that it is "
        "computed once. GPU: a model of 8B's size on one GPU, 1,024 tokens a request, or 16,384 in a "
        "result with the part `decode_16k`",
        why="On a CPU block tables are copied together in every layer. 1,024 tokens are a sixteenth of the paper's "
        "contexts.",
        seconds=55,
        cpu=_decode,
        gpu=_decode_on_gpu,
    ),
    Figure(
        name="vattention-10",
        paper=VATTENTION,
        place="figure 10",
        shows="a decode step that maps memory, over one that maps none",
        claims=(
            Claim("alone", "mapped before the step (41 ms over 25 ms)", "x", 1.64),
            Claim("beside", "mapped beside the step before it", "x", 1.0),
        ),
        conditions="Llama-3-8B, batch 4, 32K tokens; a page for each request at the same step",
        ours="the small model, batch 4; a prefix of 3,072 tokens (192 blocks) is mapped for a new request; medians",
        why="Here the thread that maps and the step share two cores and one interpreter, so that the mapping takes its "
        "time beside the step as before it. On a GPU the device computes the step.",
        seconds=65,
        cpu=_overlap,
    ),
    Figure(
        name="vattention-11",
        paper=VATTENTION,
        place="figure 11",
        shows="a prompt whose memory is mapped first, over one whose memory is there",
        claims=(
            Claim("sync_64k", "pages of 64 KB, mapped when wanted", "x", 1.15),
            Claim("sync_128k", "pages of 128 KB", "x", 1.07),
            Claim("sync_256k", "pages of 256 KB", "x", 1.03),
            Claim("sync_2m", "pages of 2 MB", "x", 1.03),
            Claim("reused", "memory of an ended request, still mapped", "x", 1.0),
        ),
        conditions="Llama-3-8B, 16K tokens; the most of the three models",
        ours="vAttention's API on host memory, a prompt of 2,048 tokens of the small model. GPU: a prefix of 16K "
        "tokens that is attached, over the time of such a prompt on a model of 8B's size, between those measured",
        why="A token of the small model takes 16 KiB, an eighth of Llama's, so there is less to map, and a CPU takes "
        "longer to compute.",
        seconds=15,
        cpu=_before_a_prompt,
        gpu=_before_a_prompt_on_gpu,
    ),
)
