"""Makes the memory for a model: of one group or of several, in virtual tensors or block tables."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from prefixd.worker.memory.cross_kv import CrossMemory
from prefixd.worker.memory.embedding_memory import EmbeddingMemory
from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.grouped_kv import GroupedKv
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.memory.state_memory import PagedStates, StateMemory
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.spec.model_spec import ModelSpec
from prefixd_swap.group_shape import ELEMENT_BYTES, KvGeometry
from prefixd_swap.vmem import FrameTable, VirtualMemory
from prefixd_swap.vtensor import VirtualTensorManager


def make_kv(
    spec: ModelSpec,
    memory: VirtualMemory,
    table: FrameTable,
    *,
    requests: int,
    frames: int,
    background: Executor | None = None,
) -> KvMemory:
    """Memory for sequences of a model.

    Args:
        spec: the model.
        memory: of all frames.
        table: the frames' chunks.
        requests: most sequences at a time.
        frames: most frames that there will be.
        background: a single thread that maps; None maps at once.
    """
    longest = spec.sequence_capacity
    if spec.groups.whole_pages:
        return _block_tables(spec, memory, table, frames)
    memories = [
        VirtualKv(
            VirtualTensorManager(
                memory,
                table,
                group.geometry,
                requests=requests,
                max_tokens=longest,
                background=background,
                frames_per_block=group.frames,
            )
        )
        for group in spec.groups.attention
    ]
    if spec.groups.alone:
        return memories[0]
    states: StateMemory | None = None
    if (state := spec.groups.state) is not None:
        size, kept = spec.groups.frame_bytes, -(-spec.step_tokens // spec.block_tokens)
        states = StateMemory(memory, table, state, size, requests=requests, kept=kept, background=background)
    cross: VirtualKv | None = None
    if (images := spec.groups.cross) is not None:
        cross = VirtualKv(
            VirtualTensorManager(
                memory,
                table,
                images.geometry,
                requests=requests,
                max_tokens=spec.image_capacity * images.geometry.block_tokens,
                background=background,
                frames_per_block=images.frames,
            )
        )
    kv = GroupedKv(
        spec.groups,
        memories,
        states,
        None if cross is None or images is None else CrossMemory(images, cross),
        window_margin=spec.window_margin,
        most_blocks=longest // spec.block_tokens,
    )
    _share_mappings(kv.managers)
    return kv


def make_embeddings(
    spec: ModelSpec,
    memory: VirtualMemory,
    table: FrameTable,
    kv: KvMemory,
    *,
    requests: int,
    background: Executor | None = None,
) -> EmbeddingMemory | None:
    """Memory for images' embeddings; None for a model that keeps none. `kv`: of `make_kv`, with the same arguments."""
    if spec.images is None or not spec.images.row_bytes:
        return None
    size, most = spec.groups.frame_bytes, spec.embedding_frames(spec.max_model_tokens) + spec.image_capacity
    element = ELEMENT_BYTES[spec.dtype]
    # A frame is mapped as the keys and values of one token.
    frame = KvGeometry(layers=1, kv_heads=1, head_dim=size // element // 2, dtype=spec.dtype, block_tokens=1)
    row_numbers = spec.images.row_bytes // element
    if spec.groups.whole_pages:
        of_text = kv.memories[0] if isinstance(kv, GroupedKv) else kv
        assert isinstance(of_text, PagedKv), "a model that reads images attends to text"
        return EmbeddingMemory(PagedKv(of_text.pages.window, frame, max_tokens=most), row_numbers)
    manager = VirtualTensorManager(memory, table, frame, requests=requests, max_tokens=most, background=background)
    others = kv.managers if isinstance(kv, GroupedKv) else [kv.manager] if isinstance(kv, VirtualKv) else []
    _share_mappings([*others, manager])
    return EmbeddingMemory(VirtualKv(manager), row_numbers)


def _block_tables(spec: ModelSpec, memory: VirtualMemory, table: FrameTable, frames: int) -> KvMemory:
    longest, groups = spec.sequence_capacity, spec.groups
    window = FrameWindow(memory, table, groups.frame_bytes, frames)
    memories = [PagedKv(window, group.geometry, max_tokens=longest) for group in groups.attention]
    if groups.alone:
        return memories[0]
    cross: CrossMemory | None = None
    if (images := groups.cross) is not None:
        most = spec.image_capacity * images.geometry.block_tokens
        cross = CrossMemory(images, PagedKv(window, images.geometry, max_tokens=most))
    return GroupedKv(
        groups,
        memories,
        None if groups.state is None else PagedStates(window, groups.state),
        cross,
        window_margin=spec.window_margin,
        most_blocks=longest // spec.block_tokens,
    )


def _share_mappings(managers: Sequence[VirtualTensorManager]) -> None:
    """One that has no mapping left unmaps idle rows of all."""
    mappings = [manager.mapping for manager in managers]
    for mapping in mappings:
        mapping.neighbours = mappings
