"""The figures of vTensor, section 7."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.kv import memory_by_design
from benchmarks.kv.designs import Workload
from benchmarks.papers_parts.figure import Claim, Curve, Figure, Measured, Paper, Values
from benchmarks.papers_parts.gpu_files import paged_us, point
from benchmarks.papers_parts.measures.cpu_kernels import NATIVE, PAGED, Shape, speed_ratios
from benchmarks.papers_parts.measures.engine_pairs import compare_all, embedded_model, ratio
from benchmarks.papers_parts.measures.held_memory import held_by_load

VTENSOR = Paper(
    "vTensor", "vTensor: Flexible Virtual Tensor Management for Efficient LLM Serving", "section 7", "A100 80 GB"
)
_TOKENS = 2048  # an eighth of the paper's 16K
_ROUNDS = 15
_FEW = 2


def _decode_kernels(short: bool) -> Measured:
    batches, lengths, heads = ((1, 2), (64,), (4,)) if short else ((1, 2, 4, 8), (128, 512, 2048, 4096), (32, 8, 4, 1))
    rounds, tokens = (_FEW, 64) if short else (_ROUNDS, _TOKENS)
    by_batch = {batch: speed_ratios(Shape(batch, tokens, 1), rounds) for batch in batches}
    by_length = {length: speed_ratios(Shape(4, length, 1), rounds) for length in lengths}
    by_heads = {each: speed_ratios(Shape(2, tokens // 2, 1, kv_heads=each), rounds) for each in heads}
    values = {
        "batch_mean": statistics.mean(each[PAGED] for each in by_batch.values()),
        "batch_peak": max(each[PAGED] for each in by_batch.values()),
        "batch_native": statistics.mean(each[NATIVE] for each in by_batch.values()),
        "length_mean": statistics.mean(each[PAGED] for each in by_length.values()),
        "length_peak": max(each[PAGED] for each in by_length.values()),
        "length_native": statistics.mean(each[NATIVE] for each in by_length.values()),
        "mha": by_heads[heads[0]][PAGED],
        "mqa": by_heads[heads[-1]][PAGED],
    }
    lines = {f"over {way}": (list(batches), [by_batch[batch][way] for batch in batches]) for way in (PAGED, NATIVE)}
    details = {"by_batch": by_batch, "by_length": by_length, "by_kv_heads": by_heads}
    return Measured(values, Curve("batch", "times as fast", lines), _plain(details))


def _decode_kernels_on_gpu(parts: Mapping[str, Any]) -> Values:
    points = [each for each in parts["attention"]["points"] if each["phase"] == "decode" and each["layout"] == "token"]
    gqa = [each for each in points if each["shape"] == "gqa"]
    batches = [each for each in gqa if each["tokens"] == 8192]
    lengths = [each for each in gqa if each["batch"] == 8]
    over = [paged_us(each) / each["contiguous_us"] for each in batches]
    by_length = [paged_us(each) / each["contiguous_us"] for each in lengths]
    heads = {name: point(points, shape=name, batch=8, tokens=8192) for name in ("mha", "mqa")}
    return {
        "batch_mean": _mean(over),
        "batch_peak": max(over, default=0.0),
        "batch_native": _mean([each["request_us"] / each["contiguous_us"] for each in batches]),
        "length_mean": _mean(by_length),
        "length_peak": max(by_length, default=0.0),
        "length_native": _mean([each["request_us"] / each["contiguous_us"] for each in lengths]),
        **{name: paged_us(each) / each["contiguous_us"] for name, each in heads.items()},
    }


def _prefill_kernels(short: bool) -> Measured:
    rounds, tokens = (_FEW, 64) if short else (5, _TOKENS // 2)
    batches, shares = ((1,), (0.5,)) if short else ((1, 2, 4), (0.25, 0.5, 0.75, 0.875))
    by_batch = {batch: speed_ratios(Shape(batch, tokens, tokens // 2), rounds) for batch in batches}
    by_share = {share: speed_ratios(Shape(1, tokens, tokens - int(tokens * share)), rounds) for share in shares}
    values = {
        "batch_mean": statistics.mean(each[PAGED] for each in by_batch.values()),
        "batch_peak": max(each[PAGED] for each in by_batch.values()),
        "native": statistics.mean(each[NATIVE] for each in by_batch.values()),
        "share_least": min(each[PAGED] for each in by_share.values()),
        "share_most": max(each[PAGED] for each in by_share.values()),
    }
    lines = {f"over {way}": (list(shares), [by_share[share][way] for share in shares]) for way in (PAGED, NATIVE)}
    curve = Curve("part of the tokens that is the prefix", "times as fast", lines)
    return Measured(values, curve, _plain({"by_batch": by_batch, "by_share": by_share}))


def _prefill_kernels_on_gpu(parts: Mapping[str, Any]) -> Values:
    of = parts["attention"]["points"]
    points = [each for each in of if (each["phase"], each["layout"], each["shape"]) == ("prefill", "token", "gqa")]
    batches = [each for each in points if each["tokens"] == 8192]
    over = [paged_us(each) / each["contiguous_us"] for each in batches]
    return {
        "batch_mean": _mean(over),
        "batch_peak": max(over),
        "native": _mean([each["request_us"] / each["contiguous_us"] for each in batches]),
    }


def _single_generation(short: bool) -> Measured:
    batches = (2,) if short else (1, 2, 4, 8)
    prompt, output = (24, 4) if short else (256, 64)
    works = [
        Workload(f"single generation {batch}", batch, 0, prompt - prompt // 8, prompt + prompt // 8, output, batch)
        for batch in batches
    ]
    found = compare_all(works, short)
    ratios = [ratio(each) for each in found]
    lines = {
        design: (list(batches), [each[f"{design}_requests_per_s"]["median"] for each in found])
        for design in ("virtual", "paged")
    }
    values = {"mean": statistics.mean(ratios), "peak": max(ratios)}
    return Measured(values, Curve("batch", "requests a second", lines), {"ratios": dict(_named(batches, ratios))})


def _prefix_caching(short: bool) -> Measured:
    prefix, turn, answer, concurrent = (64, 16, 4, 2) if short else (3072, 256, 64, 4)
    works = [
        # The paper: 12K shared, 4K of its own, 10 tokens generated.
        Workload("prefix sharing", concurrent, prefix, prefix // 3, prefix // 3, 10, concurrent),
        # The paper: 2K tokens of a prompt and 2K generated a turn; here a turn behind what two turns left.
        Workload("multi-turn chat", concurrent, 4 * turn, turn, turn, answer, concurrent),
    ]
    sharing, chat = map(ratio, compare_all(works, short))
    return Measured({"sharing": sharing, "chat": chat})


def _held(short: bool) -> Measured:
    batches = (1, 2) if short else (1, 2, 4, 8, 16, 32)
    plan = memory_by_design.MemoryPlan(batches, 32, 64 if short else 1024, 4 if short else 16)
    found = memory_by_design.measure(embedded_model(), plan, lambda: None)
    reserved = found[-1]["preallocated_bytes"]
    freed = [100 * (1 - each["held_bytes"] / reserved) for each in found]
    trace = held_by_load(embedded_model(), short)
    lines = {
        "virtual tensors": (list(batches), [each["held_bytes"] / (1 << 20) for each in found]),
        "reserved at the start": (list(batches), [reserved / (1 << 20)] * len(batches)),
    }
    values = {"first": freed[0], "last": freed[-1], "quiet": 100 * trace.quiet / trace.busy}
    return Measured(values, Curve("requests at a time", "MiB of KV", lines), {"held_bytes_over_time": trace.held})


def _held_on_gpu(parts: Mapping[str, Any]) -> Values:
    points = [each for each in parts["memory_held"]["points"] if each["layout"] == "token"]
    largest = max(points, key=lambda each: each["batch"])
    reserved = largest["preallocated_bytes"]
    return {
        "first": 100 * (1 - point(points, batch=1)["driver_bytes"] / reserved),
        "last": 100 * (1 - largest["driver_bytes"] / reserved),
    }


def _plain(details: Mapping[str, Mapping[Any, Mapping[str, float]]]) -> dict[str, Any]:
    return {
        name: {str(key): {way: round(value, 3) for way, value in ratios.items()} for key, ratios in of.items()}
        for name, of in details.items()
    }


def _named(keys: Sequence[float], values: Sequence[float]) -> list[tuple[str, float]]:
    return [(str(key), round(value, 3)) for key, value in zip(keys, values, strict=True)]


def _mean(values: Sequence[float]) -> float:
    if not values:
        raise LookupError("no points")
    return statistics.mean(values)


_KERNEL_WHY = (
    "A CPU has no kernel that follows a block table: blocks are copied together in every layer, which costs in "
    "proportion to the keys read. On this GPU's torch the same copy stands for a paged kernel where there is none, and "
    "`native` is a kernel call a request, so more calls at larger batches"
)
VTENSOR_FIGURES = (
    Figure(
        name="vtensor-7",
        paper=VTENSOR,
        place="figure 7",
        shows="decoding kernels over virtual tensors",
        claims=(
            Claim("batch_mean", "over paged attention (vLLM), mean of the batches", "x", 2.78),
            Claim("batch_peak", "the same, most (paper: batch 32)", "x", 3.08),
            Claim("batch_native", "over the native kernel, mean of the batches", "x", 1.02),
            Claim("length_mean", "over paged attention, mean of the lengths", "x", 2.67),
            Claim("length_peak", "the same, most (paper: 1,024 tokens)", "x", 3.27),
            Claim("length_native", "over the native kernel, mean of the lengths", "x", 1.02),
            Claim("mha", "over paged attention, a KV head for each query head", "x", 1.03),
            Claim("mqa", "over paged attention, one KV head", "x", 8.0),
        ),
        conditions="Yi-6B's heads (32, 4 of KV), 16K tokens; batch 16 where lengths or heads vary",
        ours="the same heads in float32, 2,048 tokens, batches 1 to 8; lengths 128 to 4,096 at batch 4, heads at batch "
        "2. GPU: 32 and 8 heads, 8,192 tokens, batches 1 to 64, lengths 1,024 to 32,768 at batch 8",
        why=f"{_KERNEL_WHY}.",
        seconds=15,
        cpu=_decode_kernels,
        gpu=_decode_kernels_on_gpu,
    ),
    Figure(
        name="vtensor-8",
        paper=VTENSOR,
        place="figure 8",
        shows="prompts behind a cached prefix, kernels over virtual tensors",
        claims=(
            Claim("batch_mean", "over the paged prefix kernel (SGLang's Triton), mean of the batches", "x", 3.40),
            Claim("batch_peak", "the same, most (paper: batch 16)", "x", 3.49),
            Claim("native", "over the native kernel", "x", 0.98),
            Claim("share_least", "over the paged prefix kernel, least of the prefix's parts", "x", 2.9),
            Claim("share_most", "the same, most", "x", 3.92),
        ),
        conditions="Yi-6B's heads, 16K tokens of which half are the prefix; then other parts",
        ours="the same heads in float32, 1,024 tokens, batches 1 to 4, prefixes of a quarter to seven eighths. GPU: "
        "128 tokens behind 8,192",
        why="Computing a prompt takes far longer than copying its blocks together, and reads the copy faster than rows "
        "(vAttention, table 6), so on a CPU nothing is left of the paged kernel's loss: the paper's baseline was slow "
        "in computing. The GPU's batched kernel runs a prompt "
        "behind a long prefix on few of its processors, a call a request does not.",
        seconds=35,
        cpu=_prefill_kernels,
        gpu=_prefill_kernels_on_gpu,
    ),
    Figure(
        name="vtensor-9",
        paper=VTENSOR,
        place="figure 9",
        shows="single generation, throughput over paged attention",
        claims=(
            Claim("mean", "mean of the batches (paper: Yi-6B; Yi-9B 1.3, Yi-34B 1.4)", "x", 1.8),
            Claim("peak", "most (paper: batch 64; 1.5 and 1.53)", "x", 2.02),
        ),
        conditions="prompts of 6,000 to 8,000 tokens, outputs of 2,000 to 4,000, against vLLM 0.4.2; Yi-34B on 4 GPUs",
        ours="prompts of about 256 tokens, outputs of 64, batches 1 to 8, the worker against itself with block tables",
        why="Both sides are the same engine, so only attention differs, and with short contexts attention is a small "
        "part of a pass. The paper's sides differ in their kernels, too.",
        seconds=100,
        cpu=_single_generation,
    ),
    Figure(
        name="vtensor-10",
        paper=VTENSOR,
        place="figure 10",
        shows="prefix caching, throughput over paged attention",
        claims=(
            Claim("sharing", "prefix sharing, most of the batches", "x", 2.42),
            Claim("chat", "multi-turn chat, most of the batches", "x", 2.0),
        ),
        conditions="Yi-6B; 12K tokens shared and 4K of its own, 10 generated; chats of 2K and 2K tokens a turn",
        ours="3,072 tokens shared and 1,024 of its own, 10 generated; a turn of 256 tokens and 64 generated behind "
        "1,024",
        why="Block tables lose where few tokens are computed behind many keys, as in decoding. Behind the prefix a "
        "quarter of each prompt is computed, which reads their copy faster than rows (vAttention, table 6). The shares "
        "are the paper's, the lengths a quarter and less.",
        seconds=120,
        cpu=_prefix_caching,
    ),
    Figure(
        name="vtensor-11",
        paper=VTENSOR,
        place="figure 11",
        shows="memory that is not held",
        claims=(
            Claim(
                "first",
                "of the KV memory reserved, free at batch 1",
                "%",
                words="almost all; 71.25% of the GPU, mean of the batches",
            ),
            Claim("last", "the same at the largest batch", "%", words="drawn"),
            Claim("quiet", "held in quiet times, of what is held in busy ones", "%", words="follows the load (drawn)"),
        ),
        conditions="Yi-6B; vLLM reserves its KV memory at the start, whatever runs",
        ours="the small model, batches 1 to 32 of 32 to 1,024 tokens, against room for 32 of the longest sequences; "
        "then three waves of 2 and 16 requests. GPU: batches 1 to 64 of 512 to 8,192 tokens, as the driver counts",
        why="The paper's share is of the whole GPU, with the weights; ours is of the KV memory alone. How much is free "
        "depends on how much longer the longest sequence is than the usual one.",
        seconds=45,
        timed=False,
        cpu=_held,
        gpu=_held_on_gpu,
    ),
)
