"""Makes the memory for a model: of one group or of several, in virtual tensors or block tables."""

from __future__ import annotations

from concurrent.futures import Executor

from prefixd.worker.memory.cross_kv import CrossMemory
from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.grouped_kv import GroupedKv
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.memory.state_memory import PagedStates, StateMemory
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.spec.model_spec import ModelSpec
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
    managers = [memory.manager for memory in memories]
    if cross is not None:
        managers.append(cross.manager)
    if states is not None:
        managers.append(states.manager)
    for manager in managers:
        manager.neighbours = managers
    return GroupedKv(
        spec.groups,
        memories,
        states,
        None if cross is None or images is None else CrossMemory(images, cross),
        window_margin=spec.window_margin,
        most_blocks=longest // spec.block_tokens,
    )


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
