"""The states of recurrent layers in frames: a sequence's own state, which changes with each pass, and copies of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import cast

import torch

from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.spec.kv_groups import StateGroup
from prefixd.worker_protocol.protocol import StateFrames
from prefixd_swap.errors import SwapError
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import FrameId, FrameTable, VirtualMemory
from prefixd_swap.vtensor import VirtualTensor, VirtualTensorManager

log = logging.getLogger(__name__)

_NUMBER_BYTES = 4  # of the float32 that a state's bytes are mapped as
Buffer = VirtualTensor | int
"""A state's memory: a virtual tensor, or a page."""


class SequenceState:
    """The state of one sequence.

    own: the buffer of its state, ``[nbytes]`` of uint8; see `StateLayout`. keep: which states are to be kept, as
    (blocks before it, frames), ascending. tail: the buffer of the state after the last full block, if that is kept.
    """

    def __init__(self, memory: States, frames: StateFrames) -> None:
        self._memory = memory
        self._tensors: list[Buffer] = [memory.map(frames.own)]
        self.keep = [(kept.blocks, kept.frames) for kept in frames.keep]
        self.tail_blocks = 0
        try:
            if frames.tail:
                self._tensors.append(memory.map(frames.tail))
            if frames.resume:
                memory.copy(frames.resume, self._tensors[0])
        except BaseException:
            self.close(lambda: None)
            raise

    @property
    def tensors(self) -> Sequence[Buffer]:
        """The buffers that it has mapped."""
        return self._tensors

    @property
    def keeps_tail(self) -> bool:
        """Whether the state after the last full block is kept."""
        return len(self._tensors) > 1

    @property
    def own(self) -> torch.Tensor:
        """The state after the tokens computed so far."""
        return self._memory.buffer(self._tensors[0])

    def keeps(self, start: int, stop: int, block_tokens: int) -> KeptInPass:
        """The states that a pass over tokens [start, stop) keeps. Call `end` when the pass is queued on the device."""
        due = [(blocks, frames) for blocks, frames in self.keep if start < blocks * block_tokens <= stop]
        mapped: list[tuple[int, Buffer]] = []
        positions: list[tuple[int, torch.Tensor]] = []
        for blocks, frames in due:
            try:
                buffer = self._memory.mapped(frames)
            except SwapError as error:  # without the state the request runs all the same
                log.warning("the state after %d blocks is not kept: %s", blocks, error)
                continue
            mapped.append((blocks, buffer[0]))
            positions.append((blocks * block_tokens, buffer[1]))
        tail = stop // block_tokens
        if self.keeps_tail and tail * block_tokens > start:
            positions.append((tail * block_tokens, self._memory.buffer(self._tensors[1])))
            self.tail_blocks = tail
        self.keep = [kept for kept in self.keep if kept[0] * block_tokens > stop]
        return KeptInPass(self._memory, positions, [blocks for blocks, _ in mapped], [tensor for _, tensor in mapped])

    def close(self, on_closed: Callable[[], None]) -> None:
        """Give the memory back; `on_closed` is called once for each of `tensors` when nothing uses it any more."""
        for tensor in self._tensors:
            self._memory.release(tensor, on_closed)


class KeptInPass:
    """The states that one pass keeps of one sequence.

    positions: (tokens before it, buffer) of each state. blocks: numbers of blocks before the requested states.
    """

    def __init__(
        self,
        memory: States,
        positions: list[tuple[int, torch.Tensor]],
        blocks: list[int],
        mapped: list[Buffer],
    ) -> None:
        self.positions = positions
        self.blocks = blocks
        self._memory = memory
        self._mapped = mapped

    def end(self) -> None:
        """Unmap the buffers of this pass, after the device's work on them."""
        for tensor in self._mapped:
            self._memory.release(tensor, lambda: None)
        self._mapped = []


class PagedStates:
    """The states of block tables: each lies in a page. See `StateMemory`.

    window: all frames.
    """

    def __init__(self, window: FrameWindow, group: StateGroup) -> None:
        self.pages = window.pages(group.frames)
        self._nbytes = group.layout.nbytes
        size = group.frames * window.frame_bytes
        self._pool = window.tensor((self.pages.count, size), torch.uint8, (window.frame_bytes, 1))

    def map(self, frames: Sequence[int]) -> int:
        """Map frames as one buffer; wait for it before it is used."""
        (page,) = frames
        self.pages.add([page])
        return page

    def mapped(self, frames: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Map frames and wait for it. Returns the page to release, and its buffer."""
        page = self.map(frames)
        return page, self.buffer(page)

    def buffer(self, buffer: Buffer) -> torch.Tensor:
        """``[nbytes]`` of uint8; waits until it is mapped."""
        return self._pool[cast(int, buffer), : self._nbytes]

    def copy(self, frames: Sequence[int], target: Buffer) -> None:
        """Copy the state in `frames`, queued on the device behind the passes so far."""
        page, source = self.mapped(frames)
        self.buffer(target).copy_(source)
        self.pages.remove([page])

    def release(self, buffer: Buffer, on_released: Callable[[], None]) -> None:
        """Give a buffer back once the device is done with it. Its next owner in this process is ordered behind on the
        same stream."""
        self.pages.remove([cast(int, buffer)])
        self.pages.window.retire(on_released)

    def ready(self, buffers: Sequence[Buffer]) -> bool:
        """True: nothing is mapped in the background."""
        del buffers
        return True

    def wait(self, buffers: Sequence[Buffer]) -> None:
        """Nothing to wait for."""
        del buffers

    def poll(self, wait: bool = False) -> int:
        """Finish what `release` began as far as the device is, or with `wait` all; returns how many are left."""
        return self.pages.window.poll(wait)

    def forget(self, frames: Sequence[int]) -> None:
        """Unmap frames that no sequence has and that are about to be no more."""
        self.pages.window.forget(frames)

    def end(self) -> None:
        """Give the addresses back."""
        self.pages.window.end()


class StateMemory:
    """Maps frames as buffers of states.

    Args:
        memory: the memory of all frames.
        table: the frames' chunks.
        group: the recurrent layers.
        frame_bytes: of a frame.
        requests: most sequences at a time.
        kept: blocks that all prompts fill in a pass, at most: a state may be kept after each.
        background: a single thread that maps; None maps at once.
    """

    def __init__(
        self,
        memory: VirtualMemory,
        table: FrameTable,
        group: StateGroup,
        frame_bytes: int,
        *,
        requests: int,
        kept: int,
        background: Executor | None = None,
    ) -> None:
        self._nbytes = group.layout.nbytes
        # A state is mapped as the keys and values of one token.
        numbers = group.frames * frame_bytes // _NUMBER_BYTES
        self.manager = VirtualTensorManager(
            memory,
            table,
            KvGeometry(layers=1, kv_heads=1, head_dim=numbers // 2, dtype="float32", block_tokens=1),
            # The state itself, its tail, what a pass goes on from, and what this one keeps and the last one kept.
            requests=4 * requests + 2 * kept,
            max_tokens=1,
            background=background,
            frames_per_block=group.frames,
        )

    def map(self, frames: Sequence[int]) -> VirtualTensor:
        """Map frames as one buffer; wait for it before it is used. Raises as `KvMemory.open`."""
        return self.manager.open([FrameId(frame) for frame in frames])

    def mapped(self, frames: Sequence[int]) -> tuple[VirtualTensor, torch.Tensor]:
        """Map frames and wait for it; the tensor to release, and its buffer. Raises as `KvMemory.open`, and `wait`."""
        tensor = self.map(frames)
        try:
            return tensor, self.buffer(tensor)
        except BaseException:
            self.release(tensor, lambda: None)
            raise

    def buffer(self, buffer: Buffer) -> torch.Tensor:
        """``[nbytes]`` of uint8; waits until it is mapped."""
        tensor = cast(VirtualTensor, buffer)
        self.manager.wait([tensor])
        return tensor.kv.view(-1).view(torch.uint8)[: self._nbytes]

    def copy(self, frames: Sequence[int], target: Buffer) -> None:
        """Copy the state in `frames`, queued on the device behind the passes so far."""
        source, buffer = self.mapped(frames)
        try:
            self.buffer(target).copy_(buffer)
        finally:
            self.release(source, lambda: None)

    def release(self, buffer: Buffer, on_released: Callable[[], None]) -> None:
        """Give a buffer back once the device is done with it."""
        device = self.manager.kv.device
        streams = [torch.cuda.current_stream(device).cuda_stream] if device.type == "cuda" else []
        self.manager.release(cast(VirtualTensor, buffer), streams=streams, on_released=on_released)

    def ready(self, buffers: Sequence[Buffer]) -> bool:
        """Whether these are mapped."""
        return not any(cast(VirtualTensor, buffer).mapping for buffer in buffers)

    def wait(self, buffers: Sequence[Buffer]) -> None:
        """Wait until these are mapped. Raises as `KvMemory.open`."""
        self.manager.wait([cast(VirtualTensor, buffer) for buffer in buffers])

    def poll(self, wait: bool = False) -> int:
        """Finish what `close` began as far as the device is, or with `wait` all of it; returns how many are left."""
        return self.manager.poll(wait)

    def forget(self, frames: Sequence[int]) -> None:
        """Unmap frames that no sequence has and that are about to be no more."""
        VirtualKv(self.manager).forget(frames)

    def end(self) -> None:
        """Give the addresses back."""
        self.manager.close()


States = StateMemory | PagedStates
