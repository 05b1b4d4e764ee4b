"""How prefixd blocks are made of an engine's KV blocks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from prefixd.client import NamespaceSpec, PartShape, PartSpec, RecurrentState, SlidingWindow
from prefixd_swap.codecs import part_shape as swap


@dataclass(frozen=True, slots=True)
class Group:
    """One of the engine's KV groups with blocks that prefixd keeps."""

    index: int
    """Its place in the engine's tables of block ids."""
    block_tokens: int
    """Tokens of one of the engine's blocks."""
    part_bytes: int
    """Bytes of a prefixd block that belong to the group, on one rank, as the daemon keeps them."""
    rule: SlidingWindow | RecurrentState | None = None
    """Which part of a prefix its layers need; None: all of it. The engine has states after some blocks only."""

    replicated: bool = False
    """Every rank has the same bytes (latents of MLA). One rank saves them, all ranks load them."""
    coded_shape: swap.PartShape | None = None
    """A part is an int8 object that is made of the engine's pages on the device, and this is the shape of its numbers.
    None: a part has the bytes of the pages."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a part's pages in the engine."""
        return self.part_bytes if self.coded_shape is None else self.coded_shape.nbytes

    @property
    def state(self) -> bool:
        """Whether a block's bytes are the recurrent state after it."""
        return isinstance(self.rule, RecurrentState)

    def span(self, block_tokens: int) -> int | None:
        """How many last blocks of a prefix, of `block_tokens` tokens each, a reader needs; None: all blocks."""
        if self.state:
            return 1
        return self.rule.blocks(block_tokens) if isinstance(self.rule, SlidingWindow) else None


@dataclass(frozen=True, slots=True)
class Tail:
    """KV groups of which a reader of a prefix needs the same last blocks."""

    groups: tuple[int, ...]
    """Indexes in `Geometry.groups`."""
    span: int
    """How many last blocks a reader needs."""
    state: bool
    """True: groups with recurrent states; False: with windows."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How prefixd blocks are made of the engine's blocks."""

    groups: tuple[Group, ...]
    block_tokens: int
    """Tokens of a prefixd block."""
    unit_tokens: int
    """Tokens after which every group has a whole number of the engine's blocks: the engine's unit of cached tokens."""
    ranks: int
    layout: str
    """The engine that packs the bytes, part of the namespace: "vllm"."""
    by_block: bool = True
    """Whether a failed load reports the engine's blocks without bytes. Else the engine computes the whole request
    again: a block id does not tell its group where there are several."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a prefixd block, all groups and ranks."""
        return sum(self._copies(group) * group.part_bytes for group in self.groups)

    @property
    def needs_end(self) -> bool:
        """Whether a reader needs only the end of a prefix in some groups. A lease then serves no shorter prefix."""
        return any(group.rule is not None for group in self.groups)

    @property
    def body(self) -> tuple[int, ...]:
        """Indexes of the groups of which every block is saved: the ones that a prefix needs whole. Without any of these
        it is all groups, since a block without saved bytes ends every prefix."""
        places = tuple(place for place, group in enumerate(self.groups) if group.span(self.block_tokens) is None)
        return places or tuple(range(len(self.groups)))

    @property
    def tails(self) -> tuple[Tail, ...]:
        """The groups that are not in `body`, with those of equal needs together."""
        alike: dict[tuple[int, bool], list[int]] = {}
        for place, group in enumerate(self.groups):
            span = group.span(self.block_tokens)
            if span is not None and place not in self.body:
                alike.setdefault((span, group.state), []).append(place)
        return tuple(Tail(tuple(places), span, state) for (span, state), places in alike.items())

    def most_loadable(self, tokens: int) -> int:
        """How many tokens of a prompt of `tokens` tokens can be loaded at most. The engine computes at least one, to
        sample the next; with windows or states a lease has to end where computing begins."""
        step = self.block_tokens if self.needs_end else self.unit_tokens
        return max(0, tokens - 1) // step * step

    def nbytes(self, blocks: int) -> int:
        """Bytes of a prefix's last `blocks` blocks that a reader of it needs, all ranks."""
        total = 0
        for group in self.groups:
            span = group.span(self.block_tokens)
            total += (blocks if span is None else min(blocks, span)) * self._copies(group) * group.part_bytes
        return total

    def spec(self, name: str, salt: bytes, shapes: Sequence[PartShape | None] = (), codec: str = "") -> NamespaceSpec:
        """The namespace, with one part per (rank, group), rank by rank; replicated groups have a part on rank 0 alone.

        2 ranks, group 0 replicated: (rank 0, group 0) (rank 0, group 1) (rank 1, group 1)

        Args:
            name: of the model, and of all that its KV depends on.
            salt: of the prompts.
            shapes: how keys and values lie in a part, by group; empty: not known.
            codec: as the connector's option; "": the daemon's settings decide.
        """
        return NamespaceSpec(
            name=name,
            salt=salt,
            layout=self.layout,
            block_tokens=self.block_tokens,
            parts=tuple(
                PartSpec(f"group{group.index}", rank, group.part_bytes, group.rule, shape)
                for rank in range(self.ranks)
                for group, shape in zip(self.groups, shapes or [None] * len(self.groups), strict=True)
                if rank == 0 or not group.replicated
            ),
            codec=codec,
        )

    def parts_of(self, rank: int) -> list[int]:
        """Indexes in `spec` of the parts that a rank loads, in the order of the groups."""
        if rank == 0:
            return list(range(len(self.groups)))
        own = [place for place, group in enumerate(self.groups) if not group.replicated]
        first = len(self.groups) + (rank - 1) * len(own)
        return [first + own.index(place) if place in own else place for place in range(len(self.groups))]

    def saved_by(self, rank: int, tokens: bytes, groups: tuple[int, ...]) -> tuple[int, ...]:
        """The members of `groups` that a rank saves of a prompt.

        One rank saves the replicated groups of all prompts that begin with the same block, so that blocks are saved in
        the order of the prefix. Prompts with other first blocks have other ranks, which shares the work.

        Args:
            tokens: the prompt's, as in `Namespaced`; at least one block.
        """
        writer = zlib.crc32(tokens[: 4 * self.block_tokens]) % self.ranks
        return tuple(place for place in groups if rank == writer or not self.groups[place].replicated)

    def _copies(self, group: Group) -> int:
        return 1 if group.replicated else self.ranks
