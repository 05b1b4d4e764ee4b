"""The layout of a model's blocks and states in frames, and the number of frames that a request takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from prefixd.base.rules.rules import RecurrentState, Window
from prefixd.cache import PartSpec
from prefixd.cache.rules.in_blocks import in_blocks
from prefixd.serving.frame_shapes import frame_shape
from prefixd.worker_protocol.protocol import GroupShape, Hello, Need, passed_blocks
from prefixd_swap.block_layers import BlockLayers
from prefixd_swap.group_shape import STRIDE_BYTES, Layout
from prefixd_swap.padded_rows import PaddedRows


@dataclass(frozen=True)
class KvShape:
    """The KV groups of a model, in frames of one size.

    ```
    parts of a block    attention   window:0   window:1 | state:0   state:1
    frames              \\___________ block_frames ______/ \\_ state_frames _/

    whole pages         attention        window         |      state
    widths                  1              2                     2
    ```

    A part is one slot of the GPU tier: a frame, wherever it is; or, with block tables, all frames of a group, side by
    side, known by the first one.

    Attributes:
        groups: as `Hello.groups`.
        block_tokens: tokens of a block.
        window_margin: as `Hello.window_margin`.
        step_tokens: most tokens of a request that the worker computes at a time.
        needs: as `Hello.needs`.
        whole_pages: as `Hello.whole_pages`.
        image_frames: of the keys and values of an image, which are in no block of a prompt; see `Hello.image_group`.
        mapped_ahead: the worker maps memory beside its steps, so that it is told what will be wanted (`Expect`).
        embeds: images have embeddings, in frames each.
        layers: how the layers lie in a block, of a model whose prefixes can be loaded layer by layer. All its
            layers keep everything, and a block is one slot. None for others.
        dtype, layout: of the keys and values; without a dtype the parts state no shape.
    """

    groups: tuple[GroupShape, ...]
    block_tokens: int
    window_margin: int = 0
    step_tokens: int = 0
    needs: tuple[Need, ...] = ()
    whole_pages: bool = False
    image_frames: int = 0
    mapped_ahead: bool = False
    embeds: bool = False
    layers: BlockLayers | None = None
    dtype: str = ""
    layout: Layout = "token"

    @classmethod
    def of(cls, hello: Hello, step_tokens: int) -> KvShape:
        """The shape of the model that a worker has described."""
        image_frames = 0 if hello.image_group is None else hello.image_group.frames
        margin, pages = hello.window_margin, hello.whole_pages
        ahead = hello.device != "cpu" and not pages
        embeds = hello.images is not None and hello.image_group is None
        return cls(
            *(hello.groups, hello.block_tokens, margin, step_tokens, hello.needs, pages, image_frames, ahead, embeds),
            *(_layers_of(hello), hello.dtype, hello.layout),
        )

    @cached_property
    def token_groups(self) -> tuple[GroupShape, ...]:
        """The groups that keep something of every token."""
        return tuple(group for group in self.groups if not isinstance(group.rule, RecurrentState))

    @cached_property
    def block_frames(self) -> int:
        """Frames of a block."""
        return sum(group.frames for group in self.token_groups)

    @cached_property
    def state_frames(self) -> int:
        """Frames of a state; 0 for a model without."""
        return sum(group.frames for group in self.groups) - self.block_frames

    def widths(self, group: GroupShape) -> tuple[int, ...]:
        """Frames per slot of a group's bytes of a block, or of a state, in slot order."""
        return (group.frames,) if self.whole_pages else (1,) * group.frames

    @cached_property
    def block_widths(self) -> tuple[int, ...]:
        """Frames per slot of a block, in slot order."""
        return tuple(width for group in self.token_groups for width in self.widths(group))

    @cached_property
    def state_widths(self) -> tuple[int, ...]:
        """Frames per slot of a state, in slot order."""
        states = (group for group in self.groups if isinstance(group.rule, RecurrentState))
        return tuple(width for group in states for width in self.widths(group))

    @cached_property
    def image_widths(self) -> tuple[int, ...]:
        """Frames per slot of an image that is in no block of a prompt, in slot order."""
        return (self.image_frames,) if self.whole_pages and self.image_frames else (1,) * self.image_frames

    @property
    def all_widths(self) -> set[int]:
        """How many frames a slot may have."""
        return {*self.block_widths, *self.state_widths, *self.image_widths, *((1,) if self.embeds else ())}

    @cached_property
    def windowed(self) -> bool:
        """Whether blocks of some group are passed while a request runs."""
        return any(isinstance(group.rule, Window) for group in self.groups)

    @cached_property
    def plain(self) -> bool:
        """Whether every token is needed to the end, in every group."""
        return all(group.rule is None for group in self.groups)

    @property
    def least_frames(self) -> int:
        """Frames of the smallest request: a block for its prompt, one to go on, and a state of its own and one that it
        resumes from."""
        return 2 * self.block_frames + 2 * self.state_frames + self._rests

    @cached_property
    def _rests(self) -> int:
        """Extra frames that a request is given room for, because a large page has parts of one size at a time: for each
        size two parts of the largest size. It is an estimate, not a bound. If large pages are much larger, or no
        multiple of a size, even a request that runs alone may lack a page; it then ends like one that gets no frame.
        """
        sizes = self.all_widths
        return 2 * len(sizes) * max(sizes) if len(sizes) > 1 else 0

    def ahead_blocks(self, computed_tokens: int) -> int:
        """The most blocks that a run of a model with windows has after `computed_tokens` tokens.

        They are enough for one step, and for a second one while more frames are on their way.
        """
        return -(-(computed_tokens + 2 * self.step_tokens) // self.block_tokens) + 1

    def most_frames(self, blocks: int) -> int:
        """The most frames that a run of `blocks` blocks has at a time."""
        frames = 2 * self.state_frames + self._rests
        for group in self.token_groups:
            most = blocks
            if isinstance(group.rule, Window):
                window_tokens = group.rule.tokens + self.window_margin + 2 * self.step_tokens
                most = min(blocks, -(-window_tokens // self.block_tokens) + 3)
            frames += most * group.frames
        return frames

    def beam_frames(self, blocks: int) -> int:
        """Frames of a beam search of `blocks` blocks, which it has from its start."""
        return blocks * self.block_frames + self._rests

    def passed(self, computed_tokens: int) -> Iterator[tuple[int, int, int]]:
        """For each group of tokens: its first part, the part behind its last one, and how many blocks are passed.

        Windows that need the same blocks are one group of the trie and are held together: none of them releases a block
        before the largest window has passed it.
        """
        first = 0
        for group in self.token_groups:
            rule = in_blocks(group.rule, self.block_tokens)
            alike = [other for other in self.token_groups if in_blocks(other.rule, self.block_tokens) == rule]
            blocks = min(
                passed_blocks(other, computed_tokens, self.block_tokens, self.window_margin) for other in alike
            )
            slots = len(self.widths(group))
            yield first, first + slots, blocks
            first += slots

    def parts(self, frame_bytes: int) -> tuple[PartSpec, ...]:
        """The parts of a block, a slot each.

        Where tokens are padded, other tiers than the GPU tier have the parts packed; pages of block tables as they are.
        Of a frame of padding alone they have 16 bytes, since a part has bytes. The name of the part of a model whose
        layers are all alike is part of the identity of caches on disk.
        """
        return tuple(self._parts(frame_bytes))

    def _parts(self, frame_bytes: int) -> Iterator[PartSpec]:
        for group in self.groups:
            widths = self.widths(group)
            for piece, width in enumerate(widths):
                name = group.name if len(widths) == 1 else f"{group.name}.{piece}"
                if self.plain and self.block_frames == 1:
                    name = "attention"
                nbytes, rows = width * frame_bytes, None
                if group.token_stride and not self.whole_pages:
                    offset = piece * frame_bytes % group.token_stride
                    rows = PaddedRows(group.token_stride, group.token_bytes, frame_bytes, offset)
                    if not rows.packed_bytes:
                        rows = PaddedRows(frame_bytes, STRIDE_BYTES, frame_bytes)
                    nbytes = rows.packed_bytes
                shape = frame_shape(group, self.dtype, self.layout, self.block_tokens, nbytes, rows)
                yield PartSpec(name, 0, nbytes, group.rule, rows, shape)


def _layers_of(hello: Hello) -> BlockLayers | None:
    """As `KvShape.layers`."""
    group = hello.groups[0]
    if len(hello.groups) > 1 or group.rule is not None or hello.images is not None or not hello.token_bytes:
        return None
    if group.frames > 1 and not hello.whole_pages:
        return None
    layer_bytes = hello.token_bytes // group.layers
    stride = group.token_stride or (hello.token_bytes if hello.layout == "token" else layer_bytes)
    return BlockLayers(group.layers, hello.block_tokens, layer_bytes, stride, hello.layout)


ONE_FRAME = KvShape((GroupShape("attention", None, 1, 1),), 1)
"""A block is one frame."""
