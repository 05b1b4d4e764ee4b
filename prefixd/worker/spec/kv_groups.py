"""Groups a model's layers by the KV that they keep; the groups share one memory (Jenga, section 4).

Layers with one shape and one rule are a group. A block of a group takes a number of frames, and all frames have one
size, so that any frame serves any group: with virtual memory the compatible page is the frame, and there is no second
level.

Gemma 2, 46 layers, half with a window      full: 23 layers, a frame a block; window-4096: 23 layers, a frame a block
Jamba, 4 layers with attention, 28 without  full: 4 layers, a frame a block; state: 28 layers, 8 frames a sequence
Llama 3 8B with a 1B beside it as a draft   full: 32 layers, 4 frames a block; draft-full: 16 layers, a frame a block
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from prefixd.base.rules.rules import ChunkedWindow, RecurrentState, SlidingWindow, Window
from prefixd.worker.recurrent import StateLayout
from prefixd.worker.spec.probe import AttentionLayer
from prefixd.worker_protocol.errors import ModelError
from prefixd.worker_protocol.protocol import GroupShape, ImageGroup, Need, frames_each
from prefixd_swap.block_size import CUDA_CHUNK_BYTES as CUDA_CHUNK_BYTES
from prefixd_swap.block_size import Padding, choose_blocks, explain_blocks
from prefixd_swap.group_shape import KvGeometry, Layout

READ_BLOCK = 128
"""A GPU's kernels read keys in blocks of at most this many tokens, so all of the block that a window begins in needs
memory: `_kept`."""
_MOST_ROUNDING = 1 / 16
"""The largest share of a state that rounding up to whole frames may waste, if frames can be small enough."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers that keep something of every token.

    rule: of the tokens that are kept: on a GPU somewhat more than the layers see (`_kept`).
    layers: their numbers in transformers' cache, ascending; the place of a layer in it is its place in the geometry.
    geometry: the shape of a block.
    frames: frames that a block takes.
    rules: of each layer; all the group's own, unless `worker.groups` is "one".
    readers: the layers that keep nothing themselves, and the layer of the group whose keys and values each reads.
    latents: what is kept of a token is no keys and values, but what the model makes them of.
    """

    name: str
    rule: Window | None
    layers: tuple[int, ...]
    geometry: KvGeometry
    frames: int
    rules: tuple[Window | None, ...]
    readers: tuple[tuple[int, int], ...] = ()
    latents: bool = False

    @property
    def shape(self) -> GroupShape:
        """As the daemon is told."""
        geometry = self.geometry
        padded = (geometry.piece_token_bytes, geometry.stride) if geometry.token_stride else (0, 0)
        heads = (0, 0) if self.latents else (geometry.kv_heads, geometry.head_dim)
        return GroupShape(self.name, self.rule, len(self.layers), self.frames, *padded, *heads)

    def needs(self, group: int) -> tuple[Need, ...]:
        """What its layers need, as the daemon is told; `group` is its place among all groups."""
        layer_bytes = self.geometry.kv_bytes // len(self.layers)
        return tuple(Need(group, rule, count * layer_bytes) for rule, count in Counter(self.rules).items())


@dataclass(frozen=True, slots=True)
class StateGroup:
    """All recurrent layers of a model: a state of `layout.nbytes` bytes in `frames` frames.

    rule: with checkpoints if a state is kept after every block.
    """

    layout: StateLayout
    frames: int
    rule: RecurrentState

    @property
    def shape(self) -> GroupShape:
        """As the daemon is told."""
        return GroupShape("state", self.rule, len(self.layout.shapes), self.frames)


@dataclass(frozen=True, slots=True)
class CrossGroup:
    """All layers of a model that attend to images and to nothing else. An image is a block of `frames` frames.

    layers: their numbers in the model, ascending; the place of a layer in it is its place in the geometry.
    geometry: of the block of an image: its tokens are the image's patches, and padding to the end of the last frame.
    patches: of an image, whatever its size: those of as many tiles as the largest has.
    """

    layers: tuple[int, ...]
    geometry: KvGeometry
    patches: int
    frames: int

    @property
    def shape(self) -> ImageGroup:
        """As the daemon is told."""
        return ImageGroup(len(self.layers), self.frames)


@dataclass(frozen=True, slots=True)
class KvGroups:
    """The KV groups of a model, and the sizes of blocks, frames and chunks.

    attention: its groups, in the order of their first layers. state: its recurrent layers, if it has any.
    block_tokens: of all groups. frame_bytes: of all groups. chunk_bytes: of the memory below.
    of_draft: how many of the last groups in `attention` are those of a draft model beside it; its layers are numbered
        anew.
    whole_pages: as `Hello.whole_pages`: a block's frames in a group, or a state's, lie side by side.
    cross: the layers that attend to images, if there are any: their blocks are images, not tokens.
    """

    attention: tuple[AttentionGroup, ...]
    state: StateGroup | None
    block_tokens: int
    frame_bytes: int
    chunk_bytes: int
    of_draft: int = 0
    whole_pages: bool = False
    cross: CrossGroup | None = None

    @property
    def alone(self) -> bool:
        """Whether all layers have full attention, one shape, and keys and values of their own, as in most models."""
        first = self.attention[0].layers if self.attention else ()
        numbered = first == tuple(range(len(first)))  # else layers without KV lie between them
        shared = any(group.readers for group in self.attention)
        return self.plain and len(self.attention) == 1 and numbered and not shared and self.cross is None

    @property
    def plain(self) -> bool:
        """Whether every token is needed to the end, in every group."""
        return self.state is None and all(group.rule is None for group in self.attention)

    @property
    def own(self) -> KvGroups:
        """Those of the model itself, without its draft's."""
        return replace(self, attention=self.attention[: len(self.attention) - self.of_draft], of_draft=0)

    @property
    def draft(self) -> KvGroups:
        """Those of its draft alone."""
        return replace(self, attention=self.attention[len(self.attention) - self.of_draft :], state=None, of_draft=0)

    @property
    def shapes(self) -> tuple[GroupShape, ...]:
        """As the daemon is told."""
        states = () if self.state is None else (self.state.shape,)
        return (*(group.shape for group in self.attention), *states)

    @property
    def needs(self) -> tuple[Need, ...]:
        """As the daemon is told."""
        needs = [need for number, group in enumerate(self.attention) for need in group.needs(number)]
        if self.state is not None:
            needs.append(Need(len(self.attention), RecurrentState(), self.state.layout.nbytes))
        return tuple(needs)

    @property
    def block_frames(self) -> int:
        """Frames that a block takes in all groups but a state's."""
        return sum(group.frames for group in self.attention)

    def slots(self, group: AttentionGroup | StateGroup | CrossGroup) -> int:
        """How many numbers name the frames of a group's block, of a state or of an image: with whole pages only the
        first frame is named."""
        return 1 if self.whole_pages else group.frames

    @property
    def block_slots(self) -> int:
        """Numbers that name the frames of a block in all groups but a state's."""
        return sum(self.slots(group) for group in self.attention)

    def in_frames(self, frame_bytes: int, chunk_bytes: int) -> KvGroups:
        """The same groups in smaller frames, which the model shares with others, as `Hello.in_frames` has them.

        chunk_bytes: of the memory that they share. Raises ProtocolError.
        """
        times = frames_each(self.frame_bytes, frame_bytes)
        return replace(
            self,
            attention=tuple(replace(group, frames=times * group.frames) for group in self.attention),
            state=None if self.state is None else replace(self.state, frames=times * self.state.frames),
            cross=None if self.cross is None else replace(self.cross, frames=times * self.cross.frames),
            frame_bytes=frame_bytes,
            chunk_bytes=chunk_bytes,
        )

    def explain_block_tokens(self, asked: int) -> str:
        """Why a block has another number of tokens than the settings ask for, or padding; empty if it has neither."""
        if not self.attention:
            return ""
        if asked != self.block_tokens and self.state is not None and self.state.rule.checkpoint_tokens:
            return (
                f'{asked} tokens asked, {self.block_tokens} used: with worker.groups = "one" a page holds the block of '
                f"an attention layer or the state of a recurrent one, of up to {self.state.layout.layer_bytes} bytes"
            )
        return explain_blocks(asked, [(group.name, group.geometry) for group in self.attention], self.chunk_bytes)


def plan_groups(
    attention: Sequence[AttentionLayer],
    states: StateLayout | None,
    *,
    dtype: str,
    block_tokens: int,
    layout: Layout,
    max_tokens: int,
    chunk_bytes: int | None,
    on_cuda: bool,
    padding: Padding = "auto",
    by_rule: bool = True,
    draft: Sequence[AttentionLayer] = (),
    whole_pages: bool = False,
) -> KvGroups:
    """The groups of a model, with blocks of at least `block_tokens` tokens that fill whole chunks in each.

    attention: its attention layers. states: its recurrent ones', None without.
    max_tokens: a window that reaches so far is none, nor are chunks of so many tokens.
    chunk_bytes: None for what suits the device: 2 MiB on CUDA; on a CPU, where any number of pages will do, the largest
        that needs no rounding.
    padding: see `choose_blocks`.
    by_rule: False is the baseline: one page size and one rule for all layers (Jenga, sections 3.2 and 4.4, "MAX page").
        A layer with a window keeps everything. A page holds a block of an attention layer or the state of a recurrent
        one; the blocks are enlarged until the largest state fits, and a state is kept after each of them. Recurrent
        layers share block numbers in groups of as many layers as have attention, as in vLLM, and a page each. Attention
        layers of several shapes are groups of their own all the same, and states are then as by rule, but for how many.
    draft: the attention layers of a draft model, which are further groups.
    whole_pages: as `Hello.whole_pages`.
    Raises ModelError for a layout that several groups cannot share.
    """
    grouped: dict[_Alike, list[AttentionLayer]] = {}
    for model, of_model in (("", attention), ("draft-", draft)):
        for layer in of_model:
            rule = _rule(layer, max_tokens) if by_rule else None
            grouped.setdefault(_Alike(model, rule, layer.kv_heads, layer.head_dim), []).append(layer)
    alone = len(grouped) == 1 and states is None
    plain = alone and next(iter(grouped)).rule is None
    if layout != "token" and not alone:
        raise ModelError(
            f"has {len(grouped) + (states is not None)} groups of layers that keep different things, which cannot lie "
            'layer by layer; set worker.layout to "token"'
        )
    asked = [
        KvGeometry(len(_keep(layers)), alike.kv_heads, alike.head_dim, dtype, block_tokens, layout)
        for alike, layers in grouped.items()
    ]
    automatic = _page_bytes(asked) if alone else mmap.PAGESIZE
    granule = chunk_bytes or (CUDA_CHUNK_BYTES if on_cuda else automatic)
    paged_states = not by_rule and states is not None and len(asked) == 1
    if paged_states and states is not None:
        block_tokens = max(block_tokens, -(-states.layer_bytes * asked[0].layers // asked[0].token_bytes))
        asked = [replace(geometry, block_tokens=block_tokens) for geometry in asked]
        padding = "none"
    shapes = choose_blocks(asked, granule, padding) if asked else []
    tokens = shapes[0].block_tokens if shapes else block_tokens
    for rule in {_rule(layer, max_tokens) for layer in (*attention, *draft)}:
        if isinstance(rule, ChunkedWindow) and rule.tokens % tokens:
            raise ModelError(
                f"has {rule}, no multiple of the {tokens} tokens of a block; set worker.block_tokens to a "
                "divisor, or to a smaller one"
            )
    frame_bytes = _frame_bytes([shape.block_bytes for shape in shapes], None if paged_states else states, granule)
    if not (chunk_bytes or on_cuda or alone):
        granule = math.gcd(frame_bytes, CUDA_CHUNK_BYTES)
    groups = []
    for alike, layers, shape in zip(grouped, grouped.values(), shapes, strict=True):
        twice = [other[:2] for other in grouped].count(alike[:2]) > 1
        name = alike.model + _name(alike.rule, plain, twice, layers[0].layer)
        numbers = tuple(layer.layer for layer in _keep(layers))
        seen = [alike.rule, *(_rule(layer, max_tokens) for layer in _keep(layers))]
        rule, *rules = (_kept(each, tokens) for each in seen) if on_cuda else seen
        readers = tuple((layer.layer, layer.reads) for layer in layers if layer.reads is not None)
        frames = shape.block_bytes // frame_bytes
        latents = any(layer.expanded for layer in layers)
        groups.append(AttentionGroup(name, rule, numbers, shape, frames, tuple(rules), readers, latents))
    state = None
    if states is not None:
        pages = -(-len(states.shapes) // asked[0].layers) if paged_states else -(-states.nbytes // frame_bytes)
        state = StateGroup(states, pages, RecurrentState(0 if by_rule else tokens))
    of_draft = sum(alike.model != "" for alike in grouped)
    return KvGroups(tuple(groups), state, tokens, frame_bytes, granule, of_draft, whole_pages)


def with_images(groups: KvGroups, layers: Sequence[int], image: KvGeometry) -> KvGroups:
    """The groups of a model that has layers with cross-attention besides.

    layers: their numbers in the model, ascending.
    image: what they keep of an image, whose patches are its tokens.

    Example, Llama 3.2 11B in bfloat16: 6,404 patches of 32 KiB in 101 frames of 2 MiB, with 60 patches of padding.
    """
    step = math.lcm(image.token_bytes, groups.frame_bytes) // image.token_bytes
    padded = replace(image, block_tokens=-(-image.block_tokens // step) * step)
    frames = padded.block_bytes // groups.frame_bytes
    return replace(groups, cross=CrossGroup(tuple(layers), padded, image.block_tokens, frames))


class _Alike(NamedTuple):
    """The properties that the layers of a group share; model: prefix of the group's name."""

    model: str
    rule: Window | None
    kv_heads: int
    head_dim: int


def _rule(layer: AttentionLayer, max_tokens: int) -> Window | None:
    if layer.chunk is not None and layer.chunk < max_tokens:
        return ChunkedWindow(layer.chunk)
    return SlidingWindow(layer.window) if layer.window is not None and layer.window < max_tokens else None


def _keep(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """Those that have keys and values of their own."""
    return [layer for layer in layers if layer.reads is None]


def _kept(rule: Window | None, block_tokens: int) -> Window | None:
    """The rule of what a GPU keeps for a window: its kernels read from a multiple of `READ_BLOCK` tokens on.

    Blocks that divide `READ_BLOCK` may end between that multiple and the window. Example, window and blocks of 64:

    ```
    0        64       128      192  200
    | gone   | gone   | read   | seen by the token at 200: 137 to 200; 128 tokens are kept
    ```
    """
    if not isinstance(rule, SlidingWindow):
        return rule
    return SlidingWindow(rule.tokens + READ_BLOCK - math.gcd(READ_BLOCK, block_tokens))


def _page_bytes(asked: Sequence[KvGeometry]) -> int:
    """The largest unit on a CPU, up to 2 MiB, of which every piece of a block is a multiple; else a page."""
    fitting = math.gcd(*(geometry.piece_bytes for geometry in asked), CUDA_CHUNK_BYTES)
    return fitting if asked and fitting % mmap.PAGESIZE == 0 else mmap.PAGESIZE


def _frame_bytes(blocks: Sequence[int], states: StateLayout | None, granule: int) -> int:
    """The largest frame of which blocks are multiples, and states nearly so."""
    if not blocks:
        assert states is not None
        return -(-states.nbytes // granule) * granule
    largest = math.gcd(*blocks)
    if states is None:
        return largest
    parts = largest // granule
    for count in (count for count in range(1, parts + 1) if parts % count == 0):
        frame = largest // count
        if -states.nbytes % frame <= _MOST_ROUNDING * states.nbytes:
            return frame
    return granule


def _name(rule: Window | None, plain: bool, twice: bool, layer: int) -> str:
    """`attention` for a model of full attention alone; else what the rule is, and the first layer if two groups share
    it."""
    if plain:
        return "attention"
    kind = "chunks" if isinstance(rule, ChunkedWindow) else "window"
    name = "full" if rule is None else f"{kind}-{rule.tokens}"
    return f"{name}-layer-{layer}" if twice else name
