"""How prefixd blocks are made of an engine's KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

from prefixd.client import NamespaceSpec, PartSpec


@dataclass(frozen=True, slots=True)
class Group:
    """One of the engine's KV groups whose blocks prefixd keeps."""

    index: int
    """Its place in the engine's tables of block ids."""
    block_tokens: int
    """Tokens of one of the engine's blocks."""
    part_bytes: int
    """Bytes of a prefixd block that belong to the group, on one rank."""


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

    def spec(self, name: str, salt: bytes) -> NamespaceSpec:
        """The namespace: rank-major, one part per (rank, group)."""
        return NamespaceSpec(
            name=name,
            salt=salt,
            layout=self.layout,
            block_tokens=self.block_tokens,
            parts=tuple(
                PartSpec(f"group{group.index}", rank, group.part_bytes)
                for rank in range(self.ranks)
                for group in self.groups
            ),
        )

    def parts_of(self, rank: int) -> list[int]:
        """Indexes of a rank's parts in `spec`."""
        return list(range(rank * len(self.groups), (rank + 1) * len(self.groups)))
