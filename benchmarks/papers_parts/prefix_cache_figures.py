"""The charts of the prefix-cache paper, section VII."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks import chat, tree_search
from benchmarks.common.harness import BenchmarkError
from benchmarks.papers_parts.figure import Claim, Figure, Measured, Paper
from benchmarks.text_analysis import same_answers
from benchmarks.text_analysis_parts import measuring
from benchmarks.text_analysis_parts.measuring import Measured as OfCell
from benchmarks.text_analysis_parts.measuring import measure_group, worker_threads
from benchmarks.text_analysis_parts.suites import NO_CACHE, TIER_SETS, Cell
from benchmarks.tree_parts.grow import Plan
from benchmarks.tree_parts.programs import PROGRAMS
from benchmarks.ways_of_serving.run_progress import shown_progress
from benchmarks.ways_of_serving.way_figures import Figures
from benchmarks.ways_of_serving.ways import NO_CACHE as WITHOUT
from benchmarks.ways_of_serving.ways import TIERS, Room, Way
from benchmarks.workloads.conversations import Statistics, distinct_tokens, fitting, generate
from prefixd.workloads.text_analysis import Serving, TextAnalysis, TierSizes

_PAPER = Paper(
    "The prefix-cache paper",
    "Improving Large Language Model Throughput with Efficient Long-Term Memory Management",
    "section VII",
    "a machine that is not named (in V.G an RTX 3090)",
)
_SLOW_DISK = 50_000_000
_SET_NAMES = ("gpu", "cpu", "disk")
"""Of the tier sets, by the tier that each adds."""


def _measure(cells: Sequence[Cell], short: bool, requests: int, repeats: int) -> list[OfCell]:
    """The cells side by side, asked in turn. Raises BenchmarkError where the answers differ, DaemonFailed."""
    if short:
        workload = TextAnalysis(prefixes=4, requests=4, prefix_tokens=32, body_tokens=16, outstanding=4)
        sizes = TierSizes(gpu_prefixes=1, cpu_prefixes=1, disk_prefixes=4, running=2)
    else:
        # The paper's proportions: of 128 prefixes 8 fit on the GPU, 32 in CPU memory, 128 on disk.
        workload = TextAnalysis(prefixes=32, requests=requests, outstanding=requests, repeats=repeats)
        sizes = TierSizes(gpu_prefixes=2, cpu_prefixes=8, disk_prefixes=32)
    with shown_progress() as progress:
        measured = measure_group("papers", cells, workload, sizes, worker_threads(), progress)
    if not same_answers(measured):
        raise BenchmarkError("the outputs of the configurations differ")
    return measured


def _length(short: bool) -> int:
    return 32 if short else 512


def _tiers(short: bool) -> Measured:
    servings = (NO_CACHE, *(Serving(name="+".join(tiers), tiers=tiers) for tiers in TIER_SETS))
    none, *sets = _measure([Cell(serving, _length(short)) for serving in servings], short, 48, 2)
    values = dict(zip(_SET_NAMES, (measuring.ratio(each, none) for each in sets), strict=True))
    missed = {f"miss_{name}": 100 * each.figures.miss_rate for name, each in zip(_SET_NAMES, sets, strict=True)}
    return Measured(values | missed, details=_rates([none, *sets]))


def _latency(short: bool) -> Measured:
    servings = (NO_CACHE, *(Serving(name="+".join(tiers), tiers=tiers) for tiers in TIER_SETS))
    cells = [Cell(serving, _length(short), one_by_one=True) for serving in servings]
    none, *sets = _measure(cells, short, 48, 1)
    alone = none.figures.ttft_s.p50
    values = {name: each.figures.ttft_s.p50 / alone for name, each in zip(_SET_NAMES, sets, strict=True)}
    return Measured(values, details=_rates([none, *sets]))


def _evictions(short: bool) -> Measured:
    names = ("lru", "fifo", "random")
    cells = [Cell(Serving(name=name, eviction=name), _length(short)) for name in names]
    lru, *others = _measure(cells, short, 64, 3)
    values = {name: measuring.ratio(each, lru) for name, each in zip(names[1:], others, strict=True)}
    return Measured(values, details=_rates([lru, *others]))


def _prefetch(short: bool) -> Measured:
    length, disk = _length(short), _SLOW_DISK
    alone = Serving(name="gpu, fcfs", tiers=("gpu",), look_ahead=0, policy="fcfs")
    without = Serving(name="all tiers, fcfs, no prefetch", look_ahead=0, policy="fcfs")
    cells = [
        Cell(alone, length),
        Cell(without, length, disk_bytes_per_s=disk),
        Cell(Serving(name="all tiers, fpf"), length, disk_bytes_per_s=disk),
    ]
    gpu, swapping, ahead = _measure(cells, short, 48, 2)
    values = {"without": measuring.ratio(swapping, gpu), "with": measuring.ratio(ahead, gpu)}
    return Measured(values, details=_rates([gpu, swapping, ahead]))


def _chat(short: bool) -> Measured:
    turns, count = Statistics(turns=1.5 if short else 5.75), 2 if short else 6
    said = generate(count, turns, scale=1 / 64 if short else 1 / 8, time_scale=0.0 if short else 0.05, seed=0)
    conversations = fitting(said, 8191)
    lengths = [each.tokens for each in conversations]
    room = Room(
        longest=max(lengths),
        usual=sum(lengths) // len(lengths),
        all_tokens=distinct_tokens(conversations),
        running=2,
        gpu_share=0.0,
        cpu_share=0.3,
    )
    none, cached = _same(chat.measure(_ways(), conversations, room, 16))
    return Measured(
        {
            "rate": cached.requests_per_s / none.requests_per_s,
            "latency": cached.ttft_s.p50 / none.ttft_s.p50,
            "found": 100 * cached.hit_share,
        }
    )


def _lspdojo(short: bool) -> Measured:
    programs = PROGRAMS[:1]
    plan = Plan(programs=programs, width=2, candidates=3, attempts=2, sites=1 if short else 3, seed=0)
    longest = tree_search.longest_prompt(plan)
    room = Room(longest=longest, usual=longest, all_tokens=longest, running=4, gpu_share=0.0, cpu_share=0.3)
    measured, searched, _ = asyncio.run(tree_search.measure(_ways(), plan, room))
    none, cached = _same(measured)
    if any(len(grown.repaired) != len(programs) for grown in searched):
        raise BenchmarkError("a search did not end with its program")
    values = {"found": 100 * cached.hit_rate, "rate": cached.requests_per_s / none.requests_per_s}
    return Measured(values, details={"became": dict(searched[0].became), "requests": cached.requests})


def _ways() -> list[Way]:
    return [Way(WITHOUT, "fcfs", ""), Way("relaxed-fpf", "relaxed-fpf", TIERS[-1])]


def _same(measured: Sequence[Figures]) -> Sequence[Figures]:
    if len({each.output_digest for each in measured}) != 1:
        raise BenchmarkError("the answers differ with the cache and without it")
    return measured


def _rates(measured: Sequence[OfCell]) -> dict[str, Any]:
    return {
        each.cell.name: {
            "requests_per_s": round(each.figures.requests_per_s, 3),
            "ttft_p50_s": round(each.figures.ttft_s.p50, 4),
            "miss_rate": round(each.figures.miss_rate, 4),
        }
        for each in measured
    }


_OURS = "32 prefixes of 512 tokens, of which 2 fit on the GPU tier, 8 in CPU memory and 32 on disk"
_DRAWN = "The paper draws its values without numbers"
PREFIX_CACHE_FIGURES = (
    Figure(
        name="prefix-cache-text-analysis",
        paper=_PAPER,
        place="text analysis, throughput and miss rate",
        shows="requests a second over no cache, and prefixes computed, by tiers",
        claims=(
            Claim("gpu", "requests/s, GPU", "x", words="rises"),
            Claim("cpu", "requests/s, GPU and CPU", "x", words="rises further"),
            Claim("disk", "requests/s, GPU, CPU and disk (paper: its abstract)", "x", 2.0),
            Claim("miss_gpu", "miss rate, GPU", "%", words="highest"),
            Claim("miss_cpu", "miss rate, GPU and CPU", "%", words="lower"),
            Claim("miss_disk", "miss rate, GPU, CPU and disk", "%", words="lowest"),
        ),
        conditions="Llama 2 7B and WizardCoder 15B; 128 prefixes, of which 8 fit on the GPU, 32 in CPU memory, 128 on "
        "disk; FPF, LRU",
        ours=f"{_OURS}; the sets of tiers side by side, asked in turn",
        why=f"{_DRAWN}. Our disk tier holds all prefixes and is prefetched from, while the paper's had to be waited "
        "for more often. The small model takes long to compute a prefix, beside a load.",
        seconds=170,
        cpu=_tiers,
    ),
    Figure(
        name="prefix-cache-evictions",
        paper=_PAPER,
        place="text analysis, evictions",
        shows="requests a second over LRU",
        claims=(Claim("fifo", "FIFO", "x", 1.0), Claim("random", "random", "x", 1.0)),
        conditions="as text analysis; the three are identical within noise",
        ours=_OURS,
        why="Prefixes are chosen by chance, so no order predicts which comes next.",
        seconds=110,
        cpu=_evictions,
    ),
    Figure(
        name="prefix-cache-latency",
        paper=_PAPER,
        place="text analysis, latency",
        shows="median first token over that without a cache, one request after the other",
        claims=(
            Claim("gpu", "GPU", "x", words="higher than 1, unexplained"),
            Claim("cpu", "GPU and CPU", "x", words="higher"),
            Claim("disk", "GPU, CPU and disk", "x", words="higher"),
        ),
        conditions="Llama 2 7B, LRU",
        ours=_OURS,
        why=f"{_DRAWN}, and does not explain that a hit on the GPU takes longer. Here a load is chosen only where it "
        "is expected to take less than computing. With the GPU tier alone most requests miss, so the median is a miss.",
        seconds=150,
        cpu=_latency,
    ),
    Figure(
        name="prefix-cache-prefetch",
        paper=_PAPER,
        place="prefetching (V.G)",
        shows="requests a second of all tiers over those of the GPU tier alone",
        claims=(
            Claim("without", "FCFS, no prefetch", "x", words="less than 1 with a disk"),
            Claim("with", "FPF with prefetch", "x", words="not shown; FPF in text analysis"),
        ),
        conditions="LLaMA 7B on an RTX 3090, LRU",
        ours=f"{_OURS}, and reads 50 MB/s",
        why=f"{_DRAWN}. A load that would take longer than computing is not made here, prefetched or not.",
        seconds=190,
        cpu=_prefetch,
    ),
    Figure(
        name="prefix-cache-chat",
        paper=_PAPER,
        place="chat, throughput and latency",
        shows="with a cache over without one",
        claims=(
            Claim("rate", "requests/s", "x", words="virtually unchanged, a little less"),
            Claim("latency", "median first token", "x", words="virtually unchanged, a little less"),
            Claim("found", "possible prefix tokens found", "%", words="system prompts alone"),
        ),
        conditions="inputs of ShareGPT behind a system prompt; section VIII says that both decrease, and has no cause",
        ours="6 conversations with ShareGPT's statistics, an eighth as long, all tiers, Relaxed-FPF",
        why="Here each turn finds all turns before it, block by block: the paper names that as future work.",
        seconds=185,
        cpu=_chat,
    ),
    Figure(
        name="prefix-cache-lspdojo",
        paper=_PAPER,
        place="LSPDojo (VI)",
        shows="tree search that follows every error of a candidate",
        claims=(
            Claim("found", "prompt tokens found", "%", words="not measured"),
            Claim("rate", "requests/s over no cache", "x", words="not measured"),
        ),
        conditions="a case study without figures",
        ours="one program with three faulty lines, 3 candidates a node, a real language server, all tiers",
        why="A candidate is most of a program, so most of the time goes into decoding, which a cache does not shorten.",
        seconds=135,
        cpu=_lspdojo,
    ),
)
