"""What is compared: a model, two models, or one with a draft, each in several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import hybrid_models
from benchmarks.jenga_parts.chats import Plan

LEAST_HIT_RATIO = 1.5
BLOCK_TOKENS = 16
BASELINE, JENGA, PAGED, HALVES = "baseline", "virtual", "paged", "halves"
ALONE, DRAFT = "alone", "draft"
DRAFT_TOKENS = 4
WAYS: dict[str, dict[str, Any]] = {
    BASELINE: {"worker.groups": "one", "worker.keep_embeddings": False},
    JENGA: {},
    PAGED: {"worker.kv": "paged"},
}
"""What each way sets; the first is what the others are compared with."""
TWO_WAYS: dict[str, dict[str, Any]] = {BASELINE: WAYS[BASELINE], HALVES: {}, JENGA: WAYS[JENGA], PAGED: WAYS[PAGED]}
CROSS_WAYS: dict[str, dict[str, Any]] = {JENGA: WAYS[JENGA], PAGED: WAYS[PAGED]}
DRAFT_WAYS: dict[str, dict[str, Any]] = {ALONE: {}, DRAFT: {"worker.draft_tokens": DRAFT_TOKENS}}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured in several ways.

    models: of `hybrid_models`. Several models have a daemon each in the ways `BASELINE` and `HALVES`, with equal parts
        of the memory, and one daemon together in the other ways.
    ways: the settings of each way, the one that the others are compared with first.
    least_hit_ratio: what every other way must find, of what the first finds.
    counted: the layers keep different tokens, and one page size is no run but a count (`count_bytes`).
    """

    models: tuple[str, ...]
    ways: Mapping[str, Mapping[str, Any]]
    least_hit_ratio: float = 1.0
    with_images: bool = False
    counted: bool = False

    @property
    def first_way(self) -> str:
        """The one that the others are compared with."""
        return next(iter(self.ways))


SUBJECTS = {
    "window": Subject(("window",), WAYS, LEAST_HIT_RATIO),
    "state": Subject(("state",), WAYS, LEAST_HIT_RATIO),
    "vision": Subject(("vision",), WAYS, with_images=True),
    "cross": Subject(("cross",), CROSS_WAYS, least_hit_ratio=0.0, with_images=True, counted=True),
    "two": Subject(("window", "full"), TWO_WAYS),
    "draft": Subject(("full",), DRAFT_WAYS),
}


@dataclass(frozen=True, slots=True)
class Saved:
    """A subject's models in directories, each of its model's name. draft: of the first one; None in other subjects."""

    models: tuple[Path, ...]
    draft: Path | None = None


def save(subject: Subject, folder: Path) -> Saved:
    """Writes a subject's models below `folder`."""
    if DRAFT in subject.ways:
        (name,) = subject.models
        draft = folder / "draft"
        return Saved((hybrid_models.save_with_draft(name, folder / name, draft),), draft)
    return Saved(tuple(hybrid_models.save(name, folder / name) for name in subject.models))


def gpu_bytes(saved: Saved, plan: Plan) -> int:
    """The GPU tier of all ways: `plan.share` of what the first one would take for the chats of a phase, at their end.

    Of the phase that takes most. Of a model with a draft: of what both keep.
    """
    of_chat = [baseline_bytes(directory, plan.last_tokens, saved.draft) for directory in saved.models]
    phases = plan.phases(len(saved.models))
    return int(plan.share * max(sum(of_chat[chat // plan.chats] for chat in set(phase)) for phase in phases))


def baseline_bytes(directory: Path, tokens: int, draft: Path | None = None) -> int:
    """What the baseline takes for a sequence: every layer's KV of every token, and a state after each block."""
    from prefixd.worker.spec.model_spec import read_model_spec
    from prefixd.worker_protocol.worker_settings import WorkerSettings

    spec = read_model_spec(
        WorkerSettings(
            model=str(directory),
            block_tokens=BLOCK_TOKENS,
            groups="one",
            draft_model="" if draft is None else str(draft),
        )
    )
    frames = spec.block_frames + spec.state_frames
    return (-(-tokens // spec.block_tokens) * frames + spec.image_frames) * spec.groups.frame_bytes


@dataclass(frozen=True, slots=True)
class CountedBytes:
    """Bytes of what is cached of all chats at their end.

    needed: the KV of the text in the layers that attend to it, and that of the images in the others.
    one_size: KV of text and images in all layers, in pages of `BLOCK_TOKENS` tokens (PagedAttention; Jenga, 3.2).
    """

    needed: int
    one_size: int


def count_bytes(directory: Path, plan: Plan) -> CountedBytes:
    """Of a model with cross-attention. Each chat has one turn, and shows an image of its own.

    With T tokens of text, I of the image and E bytes a token and layer, Llama 3.2 Vision needs (32 T + 8 I) E bytes;
    one page size for all layers takes 40 (T + I) E. Of the last token of an answer there is no KV.
    """
    from prefixd.worker.spec.model_spec import read_model_spec
    from prefixd.worker_protocol.worker_settings import WorkerSettings

    groups = read_model_spec(WorkerSettings(model=str(directory), block_tokens=BLOCK_TOKENS)).groups
    (text,), cross = groups.attention, groups.cross
    assert cross is not None, "a model with cross-attention"
    text_tokens = (1 + plan.last_tokens - 1) // groups.block_tokens * groups.block_tokens  # the placeholder is one, too
    pages = -(-(text_tokens + cross.patches) // BLOCK_TOKENS)
    layer_bytes = text.geometry.token_bytes // len(text.layers)  # the same in the other layers
    needed = text_tokens * text.geometry.token_bytes + cross.patches * cross.geometry.token_bytes
    one_size = pages * BLOCK_TOKENS * layer_bytes * (len(text.layers) + len(cross.layers))
    return CountedBytes(plan.chats * needed, plan.chats * one_size)


def daemon_settings(subject: Subject, way: str, saved: Saved, nbytes: int, plan: Plan) -> list[dict[str, Any]]:
    """The settings of each daemon that a way has; their GPU tiers have `nbytes` together."""
    apart = way in (BASELINE, HALVES)
    daemons: Sequence[tuple[Path, ...]] = [(model,) for model in saved.models] if apart else [saved.models]
    settings: list[dict[str, Any]] = []
    for first, *more in daemons:
        of_daemon: dict[str, Any] = {
            "worker.model": str(first),
            "worker.threads": 1,
            "worker.block_tokens": BLOCK_TOKENS,
            "worker.max_step_tokens": 64,
            "worker.max_running": plan.at_once,
            "gpu.device": "cpu",
            "gpu.bytes": nbytes // len(daemons),
            "cpu.bytes": 0,
            "disk.bytes": 0,
            **subject.ways[way],
        }
        if way == PAGED:
            of_daemon["worker.page_order"] = plan.page_order
        if more:
            of_daemon["worker.more_models"] = ",".join(map(str, more))
        if saved.draft is not None and way != ALONE:
            of_daemon["worker.draft_model"] = str(saved.draft)
        settings.append(of_daemon)
    return settings
