"""The memory of models with several KV groups: one memory for each group, over the same frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch

from prefixd.worker.memory.cross_kv import CrossMemory
from prefixd.worker.memory.kv_memory import ChunkableStep, KvSequence, Segment, Spans, StepKv, cut_at_chunks
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.memory.state_memory import SequenceState, StateMemory, States
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.spec.kv_groups import AttentionGroup, KvGroups
from prefixd.worker_protocol.protocol import KvUsage, StateFrames, passed_blocks
from prefixd_swap.vtensor import VirtualTensorManager


class GroupedSequence:
    """One sequence in the memory of every group.

    parts: its memory in each group of attention layers.
    state: of its recurrent layers; None for a model without.
    """

    def __init__(self, parts: Sequence[KvSequence], state: SequenceState | None, most_blocks: int) -> None:
        self.parts = tuple(parts)
        self.state = state
        self._most_blocks = most_blocks

    @property
    def blocks(self) -> int:
        """How many blocks have or had memory; without attention layers, the most that a sequence may have."""
        return min((part.blocks for part in self.parts), default=self._most_blocks)


class GroupedKv:
    """Sequences that have a virtual tensor, or a block table, in each group.

    Any frame serves any group. For each block, a sequence is given the frames of all groups, one group after the other.

    Args:
        groups: the model's.
        memories: of each group of attention layers.
        states: of the recurrent layers, if the model has any.
        cross: of the layers that attend to images, if it has any.
        window_margin: see `Hello.window_margin`.
        most_blocks: of the longest sequence.
    """

    def __init__(
        self,
        groups: KvGroups,
        memories: Sequence[VirtualKv] | Sequence[PagedKv],
        states: States | None,
        cross: CrossMemory | None = None,
        *,
        window_margin: int,
        most_blocks: int,
    ) -> None:
        self.cross = cross
        self._groups = groups
        self._memories: tuple[VirtualKv | PagedKv, ...] = tuple(memories)
        self._states = states
        self._margin = window_margin
        self._most_blocks = most_blocks
        self._own, self._draft = groups.own, groups.draft

    @property
    def memories(self) -> Sequence[VirtualKv | PagedKv]:
        """Those of the groups of attention layers."""
        return self._memories

    @property
    def managers(self) -> list[VirtualTensorManager]:
        """Those of its virtual tensors, all groups'; none with block tables."""
        cross = [] if self.cross is None else [self.cross.memory]
        tensors = [each.manager for each in (*self._memories, *cross) if isinstance(each, VirtualKv)]
        return [*tensors, self._states.manager] if isinstance(self._states, StateMemory) else tensors

    def open(self, frames: Sequence[int], state: StateFrames | None = None) -> GroupedSequence:
        """A sequence with these frames as its first blocks; -1 where a block has none."""
        parts: list[KvSequence] = []
        try:
            for memory, own in zip(self._memories, self._split(frames), strict=True):
                parts.append(memory.open(own))
            of_state = None if state is None or self._states is None else SequenceState(self._states, state)
        except BaseException:
            for memory, part in zip(self._memories, parts, strict=False):
                memory.close(part, lambda: None)
            raise
        return GroupedSequence(parts, of_state, self._most_blocks)

    def extend(self, sequence: KvSequence, frames: Sequence[int]) -> None:
        """More frames for a sequence."""
        for memory, part, own in zip(self._memories, _parts(sequence), self._split(frames), strict=True):
            memory.extend(part, own)

    def assign(self, sequence: KvSequence, frames: Sequence[int]) -> None:
        """Give a sequence, which no pass uses now, these frames in place of those it has."""
        for memory, part, own in zip(self._memories, _parts(sequence), self._split(frames), strict=True):
            memory.assign(part, own)

    def copy(self, source: KvSequence, target: KvSequence, first: int, stop: int) -> None:
        """Copy the KV of tokens [first, stop), queued on the device behind the passes so far. States are not copied."""
        for memory, out, into in zip(self._memories, _parts(source), _parts(target), strict=True):
            memory.copy(out, into, first, stop)

    def pass_by(self, sequence: KvSequence, tokens: int) -> None:
        """Give up the blocks that windows have passed after `tokens` tokens (`passed_blocks`)."""
        for group, memory, part in zip(self._groups.attention, self._memories, _parts(sequence), strict=True):
            blocks = passed_blocks(group.shape, tokens, self._groups.block_tokens, self._margin)
            memory.give_up(part, blocks * self._groups.slots(group))

    def ready(self, sequence: KvSequence, tokens: int) -> bool:
        """Whether the memory of a sequence's first `tokens` tokens can be used now without waiting."""
        state = _grouped(sequence).state
        return all(
            memory.ready(part, tokens) for memory, part in zip(self._memories, _parts(sequence), strict=True)
        ) and (state is None or self._states is None or self._states.ready(state.tensors))

    def wait(self, sequence: KvSequence, tokens: int) -> None:
        """Wait until the memory of a sequence's first `tokens` tokens can be used."""
        for memory, part in zip(self._memories, _parts(sequence), strict=True):
            memory.wait(part, tokens)
        if (state := _grouped(sequence).state) is not None and self._states is not None:
            self._states.wait(state.tensors)

    def close(self, sequence: KvSequence, on_closed: Callable[[], None]) -> None:
        """End a sequence; `on_closed` is called, now or by `poll`, when nothing reads or writes its frames any more."""
        state = _grouped(sequence).state
        left = len(self._memories) + (0 if state is None else len(state.tensors))

        def closed() -> None:
            nonlocal left
            left -= 1
            if not left:
                on_closed()

        for memory, part in zip(self._memories, _parts(sequence), strict=True):
            memory.close(part, closed)
        if state is not None:
            state.close(closed)

    def poll(self, wait: bool = False) -> int:
        """Finish what `close` began as far as the device is, or with `wait` all of it; returns how many are left."""
        left = 0 if self._states is None else self._states.poll(wait)
        left += 0 if self.cross is None else self.cross.memory.poll(wait)
        return left + sum(memory.poll(wait) for memory in self._memories)

    def forget(self, frames: Sequence[int]) -> None:
        """Unmap frames that no sequence has and that are about to be no more. Any group may have them mapped."""
        for memory in self._memories:
            memory.forget(frames)
        if self._states is not None:
            self._states.forget(frames)
        if self.cross is not None:
            self.cross.memory.forget(frames)

    def expect(self, frames: Sequence[int]) -> None:
        """A sequence with these frames as its first blocks will probably be opened. Of the frames of its states nothing
        is mapped ahead: they are few."""
        for memory, own in zip(self._memories, self._split(frames), strict=True):
            memory.expect(own)

    def map_ahead(self) -> None:
        """Map and unmap ahead of need, in the background."""
        for memory in self._memories:
            memory.map_ahead()

    def step(self, segments: Sequence[Segment]) -> StepKv:
        """The memory of a forward pass over these segments. The groups of the model itself."""
        return self._step(segments, self._own, 0)

    def draft_step(self, segments: Sequence[Segment]) -> StepKv:
        """As `step`, the groups of its draft."""
        return self._step(segments, self._draft, len(self._own.attention))

    def usage(self) -> KvUsage:
        """The usage of all groups together."""
        memories = self._memories if self.cross is None else (*self._memories, self.cross.memory)
        each = [memory.usage() for memory in memories]
        return KvUsage(
            sum(usage.shared_blocks for usage in each),
            sum(usage.mapped_blocks for usage in each),
            sum(usage.reused_blocks for usage in each),
            sum(usage.copied_blocks for usage in each),
        )

    def end(self) -> None:
        """Give everything back."""
        for memory in self._memories:
            memory.end()
        if self._states is not None:
            self._states.end()
        if self.cross is not None:
            self.cross.memory.end()

    def _step(self, segments: Sequence[Segment], groups: KvGroups, first: int) -> StepKv:
        """A pass over the memory's groups from `first` on, as many as `groups` has."""
        steps = [
            self._memories[number].step([replace(part, sequence=_parts(part.sequence)[number]) for part in segments])
            for number in range(first, first + len(groups.attention))
        ]
        return steps[0] if groups.alone else GroupedStep(segments, steps, places(groups.attention))

    def _split(self, frames: Sequence[int]) -> list[list[int]]:
        """Each group's frames of each block."""
        width = self._groups.block_slots
        parts: list[list[int]] = []
        first = 0
        for group in self._groups.attention:
            own = range(first, first + self._groups.slots(group))
            parts.append([frames[block + at] for block in range(0, len(frames), width) for at in own])
            first = own.stop
        return parts


class GroupedStep:
    """A pass over the memory of several groups. `steps`: one for each group; `places`: each layer's group and place."""

    def __init__(
        self, segments: Sequence[Segment], steps: Sequence[StepKv], places: dict[int, tuple[int, int]]
    ) -> None:
        self.segments = tuple(segments)
        self.steps = tuple(steps)
        self.places = places

    def write(self, layer: int, pairs: torch.Tensor) -> None:
        """Write a layer's keys and values of the segments' tokens, ``[tokens, 2, kv_heads, head_dim]``."""
        group, index = self.places[layer]
        self.steps[group].write(index, pairs)

    def scrub(self, segment: int, end: int) -> None:
        """Zero a segment's memory from its last token to token `end`, which lies in the same block."""
        for step in self.steps:
            step.scrub(segment, end)

    def read(self, layer: int, spans: Spans) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each segment's keys and values in its span, both ``[kv_heads, end - start, head_dim]``."""
        group, index = self.places[layer]
        return self.steps[group].read(index, spans)

    def in_chunks(self, tokens: int) -> GroupedStep:
        """As `ChunkableStep.in_chunks`."""
        parts = [part for _, _, part in cut_at_chunks(self.segments, tokens)]
        steps = [cast(ChunkableStep, step).in_chunks(tokens) for step in self.steps]
        return GroupedStep(parts, steps, self.places)

    def varlen_arguments(self) -> tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], dict[str, object]]:
        """Never called: `GroupedAttention` asks the groups' steps."""
        raise NotImplementedError("each group has arguments of its own")


def places(groups: Sequence[AttentionGroup]) -> dict[int, tuple[int, int]]:
    """By a layer's number, its group and the place there of the keys and values that it reads."""
    found = {layer: (number, index) for number, group in enumerate(groups) for index, layer in enumerate(group.layers)}
    return found | {layer: found[source] for group in groups for layer, source in group.readers}


def _grouped(sequence: KvSequence) -> GroupedSequence:
    return cast(GroupedSequence, sequence)


def _parts(sequence: KvSequence) -> tuple[KvSequence, ...]:
    return _grouped(sequence).parts
