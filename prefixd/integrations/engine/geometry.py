"""How prefixd blocks are made of an engine's KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

from prefixd.client import NamespaceSpec, PartSpec, SlidingWindow


@dataclass(frozen=True, slots=True)
class Group:
    """One of the engine's KV groups whose blocks prefixd keeps."""

    index: int
    """Its place in the engine's tables of block ids."""
    block_tokens: int
    """Tokens of one of the engine's blocks."""
    part_bytes: int
    """Bytes of a prefixd block that belong to the group, on one rank."""
    window_tokens: int | None = None
    """Tokens that a token of the group's layers attends to, itself included; None: all before it. So a reader of a
    prefix needs the last `window_tokens - 1` tokens of it, and prefixd keeps the blocks that these lie in."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How prefixd blocks are made of the engine's blocks."""

    groups: tuple[Group, ...]
    block_tokens: int
    """Tokens of a prefixd block."""
    unit_tokens: int
    """Tokens after which every group has a whole number of the engine's blocks; the engine counts cached tokens so."""
    ranks: int
    layout: str
    """The engine that packs the bytes, part of the namespace: "vllm"."""
    by_block: bool = True
    """Whether a load that fails may name the engine's blocks that have no bytes. Else the whole request is computed
    again: a block id does not say which of several groups it belongs to."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a prefixd block, all groups and ranks."""
        return self.ranks * sum(group.part_bytes for group in self.groups)

    @property
    def windowed(self) -> bool:
        """Whether there are groups of which a reader needs the end of a prefix only. A lease then serves a prefix of
        its own length, not a shorter one."""
        return any(group.window_tokens is not None for group in self.groups)

    def most_loadable(self, tokens: int) -> int:
        """Of a prompt of so many tokens, how many can be loaded: at least one has to be computed for the next one to be
        sampled, and with windows a lease has to end where computing begins."""
        step = self.block_tokens if self.windowed else self.unit_tokens
        return max(0, tokens - 1) // step * step

    def nbytes(self, blocks: int) -> int:
        """Bytes of a prefix's last `blocks` blocks that a reader of it needs, all ranks."""
        total = 0
        for group in self.groups:
            needed = blocks
            if group.window_tokens is not None:
                needed = min(blocks, max(1, -(-(group.window_tokens - 1) // self.block_tokens)))
            total += needed * group.part_bytes
        return self.ranks * total

    def spec(self, name: str, salt: bytes) -> NamespaceSpec:
        """The namespace: rank-major, one part per (rank, group)."""
        return NamespaceSpec(
            name=name,
            salt=salt,
            layout=self.layout,
            block_tokens=self.block_tokens,
            parts=tuple(
                PartSpec(
                    f"group{group.index}",
                    rank,
                    group.part_bytes,
                    None if group.window_tokens is None else SlidingWindow(group.window_tokens),
                )
                for rank in range(self.ranks)
                for group in self.groups
            ),
        )

    def parts_of(self, rank: int) -> list[int]:
        """Indexes of a rank's parts in `spec`."""
        return list(range(rank * len(self.groups), (rank + 1) * len(self.groups)))
