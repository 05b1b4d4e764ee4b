"""What the runs say together, and what of it must hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.jenga_parts.subject_runs import Run
from benchmarks.jenga_parts.subjects import DRAFT, HALVES, JENGA, PAGED, SUBJECTS

_LARGEST = (
    *("images", "encoded_images", "integrity_violations", "restarts", "passes"),
    *("used_bytes", "needed_bytes", "one_size_bytes"),
)
MOST_WASTE = 0.05
MOST_ENCODED = 0.25
"""Embeddings computed, of the baseline's: kept in a tier that is too small, some are evicted and computed again."""
PAPERS_ONE_SIZE_WASTE = 0.796
"""Of Llama 3.2 11B Vision on MMMU-pro, with 43 tokens of text and 6,193 of an image a request (Jenga, 3.2)."""
LEAST_ONE_SIZE_WASTE = 0.75


def figures_of(runs: Sequence[Run]) -> dict[tuple[str, str], dict[str, float]]:
    """By subject and way: mean waste, the share of prompt tokens found, the requests a second of the best round, and
    what of further figures was largest, or of passes smallest."""
    by_way: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_way.setdefault((run.model, run.way), []).append(run)
    return {
        key: {
            "waste": sum(run.waste for run in rounds) / len(rounds),
            "found": sum(run.hit_tokens for run in rounds) / sum(run.prompt_tokens for run in rounds),
            "requests_per_s": max(run.requests_per_s for run in rounds),
            **{name: max(getattr(run, name) for run in rounds) for name in _LARGEST},
            "proposed_tokens": sum(run.proposed_tokens for run in rounds),
            "accepted_tokens": sum(run.accepted_tokens for run in rounds),
        }
        for key, rounds in by_way.items()
    }


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The result of the runs: of each subject, each way against the first."""
    models: dict[str, dict[str, Any]] = {}
    all_figures = figures_of(runs)
    for (model, way), figures in all_figures.items():
        first_way = SUBJECTS[model].first_way
        first = all_figures[model, first_way]
        digests = {run.output_digest for run in runs if run.model == model and run.way in (first_way, way)}
        models.setdefault(model, {})[way] = {
            "waste": round(figures["waste"], 4),
            "found": round(figures["found"], 4),
            "requests_per_s": round(figures["requests_per_s"], 2),
            # A baseline that finds nothing counts as one that finds a thousandth.
            "hit_ratio": round(figures["found"] / max(0.001, first["found"]), 3),
            "requests_ratio": round(figures["requests_per_s"] / first["requests_per_s"], 3),
            "same_tokens": len(digests) == 1,
            "integrity_violations": figures["integrity_violations"],
            **_of_subject(model, way, figures, first, runs),
        }
    return {"models": models, "runs": [asdict(run) for run in runs]}


def _of_subject(
    model: str, way: str, figures: Mapping[str, float], first: Mapping[str, float], runs: Sequence[Run]
) -> dict[str, Any]:
    subject = SUBJECTS[model]
    found: dict[str, Any] = {}
    if subject.with_images:
        found |= {name: figures[name] for name in ("images", "encoded_images")}
    if subject.counted:
        found |= {name: figures[name] for name in ("used_bytes", "needed_bytes", "one_size_bytes")}
        found["one_size_waste"] = round(1 - figures["needed_bytes"] / max(1, figures["one_size_bytes"]), 4)
        found["papers_one_size_waste"] = PAPERS_ONE_SIZE_WASTE
        found["memory_ratio"] = round(figures["one_size_bytes"] / max(1, figures["used_bytes"]), 2)
    if len(subject.models) > 1:
        last = [run for run in runs if (run.model, run.way) == (model, way)][-1]
        found |= {"gpu_blocks": [list(blocks) for blocks in last.gpu_blocks], "restarts": figures["restarts"]}
    if DRAFT in subject.ways:
        found |= {
            "passes": figures["passes"],
            "passes_ratio": round(figures["passes"] / max(1, first["passes"]), 3),
            "accepted": round(figures["accepted_tokens"] / max(1, figures["proposed_tokens"]), 3),
            "used_bytes": figures["used_bytes"],
        }
    return found


def violations(result: Mapping[str, Any]) -> list[str]:
    """What a result breaks of what must hold, in words."""
    found = []
    for model, ways in result["models"].items():
        first_way = SUBJECTS[model].first_way
        for way, figures in ways.items():
            broken = [] if way == first_way else _broken(model, way, ways)
            if SUBJECTS[model].counted:
                broken += _counts_differ(figures)
            if count := figures["integrity_violations"]:
                broken.append(f"the daemon finds {count} errors in accounting for its memory")
            found += [f"{model}, {way}: {what}" for what in broken]
    return found


def _broken(model: str, way: str, ways: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What one way breaks against the first one."""
    subject, found = SUBJECTS[model], []
    figures, first = ways[way], ways[subject.first_way]
    if not figures["same_tokens"]:
        found.append(f"the tokens differ from those of {subject.first_way}")
    if way == JENGA and figures["waste"] > MOST_WASTE:
        found.append(f"{figures['waste']} of the allocated bytes are not needed, more than {MOST_WASTE}")
    if figures["hit_ratio"] < subject.least_hit_ratio:
        found.append(f"{figures['hit_ratio']} times the hit tokens, less than {subject.least_hit_ratio:g}")
    images, encoded = figures.get("images", 0), figures.get("encoded_images", 0)
    most = max(images, int(first.get("encoded_images", 0) * MOST_ENCODED))
    if not images <= encoded <= most:
        found.append(f"{encoded} embeddings for {images} images, instead of {images} to {most}")
    if way == JENGA and figures["requests_ratio"] < 1:
        found.append(f"{figures['requests_ratio']} times the requests a second, less than 1")
    if way in (JENGA, PAGED) and len(subject.models) > 1:
        found += _memory_stayed(figures)
    if way == JENGA and HALVES in ways and figures["found"] < ways[HALVES]["found"]:
        found.append(f"{figures['found']} of the prompt tokens found, less than the {ways[HALVES]['found']} of halves")
    if way == DRAFT:
        if figures["passes"] >= first["passes"]:
            found.append(f"{figures['passes']} passes of the model, no fewer than the {first['passes']} of it alone")
        if figures["used_bytes"] <= first["used_bytes"]:
            found.append(
                f"{figures['used_bytes']} bytes of the GPU tier are used, no more than by the model alone: what the "
                "draft keeps is missing"
            )
    return found


def _counts_differ(figures: Mapping[str, Any]) -> list[str]:
    """What does not hold of the bytes that are cached at the end of a run."""
    found = []
    if figures["used_bytes"] < figures["needed_bytes"]:
        found.append(f"{figures['used_bytes']} bytes are cached, less than the {figures['needed_bytes']} of all chats")
    if figures["waste"] > MOST_WASTE:
        found.append(f"{figures['waste']} of the cached bytes are not needed, more than {MOST_WASTE}")
    if figures["one_size_waste"] < LEAST_ONE_SIZE_WASTE:
        found.append(f"one page size wastes {figures['one_size_waste']}, less than {LEAST_ONE_SIZE_WASTE}")
    return found


def _memory_stayed(figures: Mapping[str, Any]) -> list[str]:
    """Whether the models' memory did not follow the load from the first model to the second."""
    found = []
    if figures["restarts"]:
        found.append(f"workers were started again {figures['restarts']} times")
    first, *later = figures["gpu_blocks"]
    for second in later[:1]:
        if second[0] >= first[0] or second[1] <= first[1]:
            found.append(
                f"the models had {first} blocks in the GPU tier, then {second}: no memory moved to the second one"
            )
    return found
