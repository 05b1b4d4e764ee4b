"""The figures of Jenga, section 7."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.common.harness import BenchmarkError
from benchmarks.jenga import ENOUGH_SHARE, QUESTION_TOKENS
from benchmarks.jenga_parts.chats import Plan
from benchmarks.jenga_parts.comparison import figures_of, summary
from benchmarks.jenga_parts.subject_runs import hold_chats, measure_subject
from benchmarks.jenga_parts.subjects import (
    BASELINE,
    DRAFT,
    DRAFT_TOKENS,
    JENGA,
    SUBJECTS,
    WAYS,
    Subject,
    gpu_bytes,
    save,
)
from benchmarks.papers_parts.figure import Claim, Curve, Figure, Measured, Paper

_JENGA = Paper(
    "Jenga", "Jenga: Effective Memory Management for Serving LLM with Heterogeneity", "section 7", "H100 80 GB"
)
_TWO_WAYS = {way: WAYS[way] for way in (BASELINE, JENGA)}
_ONE_SIZE = "one page size"
_ARTICLES = (2, 4, 8, 12)
_USUAL = Plan(chats=8, turns=4, user_tokens=256, output_tokens=8, at_once=2, share=1 / 3, rounds=2)
_SHORT = Plan(chats=2, turns=2, user_tokens=48, output_tokens=2, at_once=2, share=1.0, rounds=1)

Ways = Mapping[str, Mapping[str, float]]
"""Figures of each way."""


def _ways(name: str, subject: Subject, plan: Plan) -> Ways:
    """A subject's figures by way. Raises BenchmarkError where the ways give different tokens."""
    runs = measure_subject(name, subject, plan)
    if len({run.output_digest for run in runs}) != 1:
        raise BenchmarkError(f"the ways of {name} give different tokens")
    return {way: figures for (_, way), figures in figures_of(runs).items()}


def _ratio(ways: Ways, figure: str, way: str = JENGA) -> float:
    """Of a way's figure to the first way's; one that is 0 counts as a thousandth."""
    return ways[way][figure] / max(0.001, next(iter(ways.values()))[figure])


def _throughput(short: bool) -> Measured:
    plan = _SHORT if short else replace(_USUAL, rounds=1)
    names = ("window",) if short else ("window", "state", "vision")
    found = {name: _ways(name, replace(SUBJECTS[name], ways=_TWO_WAYS), plan) for name in names}
    ratios = {name: _ratio(ways, "requests_per_s") for name, ways in found.items()}
    llama = _ways("llama", Subject(("full",), _TWO_WAYS), plan)
    values = {
        "mean": statistics.mean(ratios.values()),
        "most": max(ratios.values()),
        "llama": _ratio(llama, "requests_per_s"),
    }
    return Measured(values, details={"ratios": ratios})


def _memory(short: bool) -> Measured:
    subject = replace(SUBJECTS["window"], ways=_TWO_WAYS)
    plan = _SHORT if short else _USUAL
    values, lines = {}, {}
    with tempfile.TemporaryDirectory(prefix="prefixd-jenga-") as folder:
        saved = save(subject, Path(folder))
        nbytes = gpu_bytes(saved, plan)
        for way in subject.ways:
            memory = hold_chats(subject, way, saved, nbytes, plan).memory
            values[way] = 100 * memory.waste
            places = [100 * number / max(1, len(memory.wastes) - 1) for number in range(len(memory.wastes))]
            lines[way] = (places, [100 * waste for waste in memory.wastes])
    return Measured(values, Curve("part of the run, %", "not needed, % of what is allocated", lines))


def _articles(short: bool) -> Measured:
    subject = replace(SUBJECTS["window"], ways=_TWO_WAYS)
    numbers = (2,) if short else _ARTICLES
    base = _SHORT if short else replace(_USUAL, rounds=1)
    # The memory stays that of the usual number, however many chats there are.
    plans = {number: replace(base, chats=number, share=base.share * base.chats / number) for number in numbers}
    found = {number: _ways(f"{number} articles", subject, plan) for number, plan in plans.items()}
    hits = [_ratio(ways, "found") for ways in found.values()]
    rates = [_ratio(ways, "requests_per_s") for ways in found.values()]
    lines = {way: (list(numbers), [100 * ways[way]["found"] for ways in found.values()]) for way in subject.ways}
    details = {"hit_ratios": hits, "requests_ratios": rates}
    curve = Curve("articles", "prompt tokens found, %", lines)
    return Measured({"hits": max(hits), "rate": max(rates), "few": rates[0]}, curve, details)


def _vision(short: bool) -> Measured:
    ways = {BASELINE: {"worker.keep_embeddings": False}, JENGA: {}}
    found = _ways("vision", replace(SUBJECTS["vision"], ways=ways), _SHORT if short else _USUAL)
    rate = _ratio(found, "requests_per_s")
    details = {way: {name: of[name] for name in ("images", "encoded_images")} for way, of in found.items()}
    # A fixed number of requests is under way, so the mean latency is that number divided by the rate.
    return Measured({"rate": rate, "latency": rate}, details=details)


def _one_size(short: bool) -> Measured:
    chats = 4 if short else 8
    plan = Plan(chats, 1, QUESTION_TOKENS, 2 if short else 8, 2, ENOUGH_SHARE, images=chats)
    counted = summary(measure_subject("cross", SUBJECTS["cross"], plan))["models"]["cross"][JENGA]
    values = {"one_size": 100 * counted["one_size_waste"], "own": 100 * counted["waste"]}
    return Measured(values, details={name: counted[name] for name in ("used_bytes", "needed_bytes", "one_size_bytes")})


def _draft(short: bool) -> Measured:
    ways = {
        _ONE_SIZE: {"worker.groups": "one", "worker.draft_tokens": DRAFT_TOKENS},
        DRAFT: SUBJECTS["draft"].ways[DRAFT],
    }
    plan = _SHORT if short else replace(_USUAL, output_tokens=32)
    found = _ways("draft", replace(SUBJECTS["draft"], ways=ways), plan)
    values = {"rate": _ratio(found, "requests_per_s", DRAFT), "hits": _ratio(found, "found", DRAFT)}
    return Measured(values, details={"ways": {way: dict(of) for way, of in found.items()}})


_PROPORTIONS = "in small models of the same proportions, with a third of the memory that the baseline would take"
JENGA_FIGURES = (
    Figure(
        name="jenga-3",
        paper=_JENGA,
        place="figure 3",
        shows="KV memory that Llama 3.2 Vision wastes",
        claims=(
            Claim("one_size", "one page size for all layers", "%", 79.6),
            Claim("own", "a size for each kind of layer", "%", words="not given"),
        ),
        conditions="Llama 3.2 11B Vision on MMMU-pro, 6,193 tokens of an image and 43 of text a request (section 3.2)",
        ours="its 40 layers in small, 8 requests with an image of 6,404 patches and 42 tokens of text; counted",
        why="The requests are a little longer, and a block that is filled in part counts as needed.",
        seconds=30,
        timed=False,
        cpu=_one_size,
    ),
    Figure(
        name="jenga-13",
        paper=_JENGA,
        place="figure 13",
        shows="throughput over one page size and one rule for all layers",
        claims=(
            Claim("mean", "mean of the models (L4: 1.69)", "x", 1.80),
            Claim("most", "most of the models (L4: 3.29)", "x", 4.92),
            Claim("llama", "a Llama, whose layers are all alike", "x", words="comparable"),
        ),
        conditions="seven models, against vLLM 0.6.3",
        ours=f"chats with windows (Gemma 3), states (Jamba) and images, {_PROPORTIONS}; the baseline is prefixd with "
        "`worker.groups = one`",
        why="How much is won depends on how much of the memory the baseline lacks. On a CPU a batch of more requests "
        "is no faster, so what is won comes from hits alone.",
        seconds=165,
        cpu=_throughput,
    ),
    Figure(
        name="jenga-16",
        paper=_JENGA,
        place="figure 16",
        shows="KV memory that is allocated and not needed",
        claims=(
            Claim(BASELINE, "one rule for all layers (vLLM)", "%", 38.2),
            Claim(JENGA, "a rule for each kind of layer", "%", 0.04),
        ),
        conditions="Ministral; the mean of two traces, in one of which lengths change over time",
        ours="chats with a model in Gemma 3's proportions, samples every 0.1 s",
        why="Five of six layers have windows of 128 tokens in contexts of 1,056, so the baseline wastes more. What is "
        "left of ours are blocks that the next step gives up, and room ahead of the last token.",
        seconds=35,
        timed=False,
        cpu=_memory,
    ),
    Figure(
        name="jenga-17",
        paper=_JENGA,
        place="figure 17",
        shows="prefix caching by the number of articles, over one rule for all layers",
        claims=(
            Claim("hits", "tokens found, most of the numbers", "x", 1.60),
            Claim("rate", "throughput, most of the numbers", "x", 1.77),
            Claim("few", "throughput with few articles, which all fit", "x", words="slightly less than 1"),
        ),
        conditions="Ministral, articles of arXiv with several questions each",
        ours="2 to 12 chats of 4 turns of 256 tokens, in memory for 2.7 of them by the baseline's rule",
        why="A chat grows from turn to turn, an article does not. Windows are shorter than the paper's, so that more "
        "is won.",
        seconds=120,
        cpu=_articles,
    ),
    Figure(
        name="jenga-18",
        paper=_JENGA,
        place="figure 18",
        shows="images whose embeddings are kept, over computing them in each step",
        claims=(
            Claim("rate", "throughput", "x", 1.88),
            Claim("latency", "latency", "x", 1.60),
        ),
        conditions="four models that read images, MMMU-pro, 1,024 tokens a step",
        ours="chats in which each turn shows an image, 64 tokens a step, with and without `worker.keep_embeddings`. A "
        "fixed number of requests is under way, so latency follows from throughput",
        why="A small tower of 4 layers takes about as long as some hundred tokens do; large models have larger ones. "
        "Without a cache prefixd computes an image once a request, and not in each step. Runs differ by a fifth.",
        seconds=85,
        cpu=_vision,
    ),
    Figure(
        name="jenga-19",
        paper=_JENGA,
        place="figure 19",
        shows="speculative decoding, over one page size for both models",
        claims=(
            Claim("rate", "throughput, mean of the heterogeneous models", "x", 1.58),
            Claim("hits", "tokens found", "x", words="not shown"),
        ),
        conditions="the models of figure 13 with drafts of 1 to 2 billion parameters",
        ours="a Llama of five layers with its first as a draft, answers of 32 tokens, in a third of the memory that "
        "both would take with one page size (`worker.groups = one`)",
        why="The model's layers are all alike here, where the paper finds no difference to a manual split; models with "
        "windows and drafts were not measured.",
        seconds=100,
        cpu=_draft,
    ),
)
