"""Decides whether passes are replayed as CUDA graphs, and captures the graphs when the model is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from prefixd.worker.attention.chunked_attention import ChunkedAttention
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.graphs.captured import GraphCapture
from prefixd.worker.graphs.decode_graphs import DecodeGraphs
from prefixd.worker.graphs.pass_graphs import PassGraphs
from prefixd.worker.graphs.prompt_graphs import PromptGraphs
from prefixd.worker.memory.grouped_kv import GroupedKv
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.model import CausalModel
from prefixd.worker.readiness import Readiness
from prefixd.worker.spec.model_spec import ModelSpec
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.errors import OutOfMemoryError

_SCRATCH_TOKENS = 256
_SAID_EVERY_S = 5.0


def why_no_graphs(settings: WorkerSettings, spec: ModelSpec, model: CausalModel, kv: KvMemory) -> str | None:
    """Why no pass can be replayed, one line; empty if nobody expects it, None if it can."""
    if not settings.cuda_graphs or spec.device.type != "cuda":
        return ""
    if settings.draft_model:
        return "a draft proposes tokens; CUDA graphs need a model alone"
    if isinstance(kv, GroupedKv):
        return "the model has several groups of layers; CUDA graphs need one"
    if model.images is not None and model.images.kind.cross:
        return "layers of the model attend to images alone; CUDA graphs know none"
    if model.images is not None and model.images.kind.grid_positions:
        return "the model's positions have three dimensions; CUDA graphs need one"
    if not isinstance(kv, VirtualKv):
        return f'worker.kv is "{settings.kv}"; CUDA graphs need "virtual"'
    if isinstance(model.attention, ChunkedAttention):
        return "layers of the model attend in chunks; CUDA graphs know none"
    if not isinstance(model.attention, FlashAttention):
        geometry = spec.geometry
        return (
            f"no flash attention for {geometry.dtype} KV with a head size of {geometry.head_dim} on {spec.device}; "
            "CUDA graphs need it"
        )
    return None


def load_graphs(
    settings: WorkerSettings,
    spec: ModelSpec,
    model: CausalModel,
    kv: KvMemory,
    readiness: Readiness,
    clock: Callable[[], float],
) -> PassGraphs | None:
    """The graphs that the settings ask for, captured as far as `cuda_graphs_seconds` allow; None without graphs."""
    why_not = why_no_graphs(settings, spec, model, kv)
    if why_not is not None or not isinstance(kv, VirtualKv):
        readiness.change(cuda_graphs_reason=why_not or "")
        return None
    tensors, pool = kv.manager.kv, GraphCapture()
    decode = DecodeGraphs(
        tensors,
        model.captured,
        settings.max_sequences,
        lambda why: readiness.change(cuda_graphs=False, cuda_graphs_reason=why),
        pool,
        note=readiness.note,
    )
    prompts: PromptGraphs | None = None
    if settings.prompt_graphs:
        prompts = PromptGraphs(
            tensors,
            model.captured,
            lambda why: readiness.change(prompt_graphs=False, prompt_graphs_reason=why),
            pool,
            readiness.note,
        )
    readiness.change(cuda_graphs=True, prompt_graphs=settings.prompt_graphs)
    if settings.cuda_graphs_seconds:
        kinds: list[Capturing] = [decode] if prompts is None else [prompts, decode]
        capture(kinds, model, kv, settings.cuda_graphs_seconds, readiness, clock)
    return PassGraphs(decode, prompts)


class Capturing(Protocol):
    """Graphs of a kind that can be captured at load."""

    @property
    def most_graphs(self) -> int: ...
    def capture_now(self, vocab_size: int, most_tokens: int) -> Iterator[None]: ...


def capture(
    kinds: Sequence[Capturing],
    model: CausalModel,
    kv: VirtualKv,
    seconds: float,
    readiness: Readiness,
    clock: Callable[[], float],
) -> None:
    """Capture graphs for at most `seconds`, and say how far it is. Nothing has a row of `kv` yet."""
    virtual = kv.manager.virtual
    tokens = min(_SCRATCH_TOKENS, virtual.tokens)
    started = said = clock()
    free_bytes = model.free_bytes()
    done, total = 0, sum(kind.most_graphs for kind in kinds)
    try:
        with virtual.scratch(len(virtual.rows), tokens):
            try:
                for _ in itertools.chain(*(kind.capture_now(model.spec.vocab_size, tokens) for kind in kinds)):
                    done += 1
                    now = clock()
                    if now - started >= seconds:
                        break
                    if now - said >= _SAID_EVERY_S:
                        said = now
                        readiness.note(f"captured {done} of {total} CUDA graphs in {now - started:.1f} s")
            finally:
                model.synchronize()  # before the memory is unmapped
    except (OutOfMemoryError, torch.OutOfMemoryError) as error:
        readiness.note(f"CUDA graphs are captured when they are first needed: there is no memory to do it now: {error}")
        return
    rest = "" if done == total else "; the others are captured when they are first needed"
    taken = (free_bytes - model.free_bytes()) >> 20
    readiness.note(f"captured {done} of {total} CUDA graphs in {clock() - started:.1f} s and {taken} MiB{rest}")
