"""Where the bytes of an engine's KV blocks are, and the copies between them and the daemon's arena.

A prefixd block is several of the engine's blocks, and a part of it is what one KV group has of them on one rank. Its
bytes lie in the arena layer by layer, within a layer one engine's block after the other; what is inside a block's page
is never looked at (on a CPU vLLM packs keys and values as its instruction set wants them).

        arena, one part of a prefixd block of 4 engine's blocks    layer 0: b0 b1 b2 b3    layer 1: b0 b1 b2 b3    ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefixd_swap import NO_BLOCK, PageRun, Span

__all__ = ["NO_BLOCK", "GroupPages", "PageRun"]


@dataclass(frozen=True, slots=True)
class GroupPages:
    """One KV group's memory on this rank.

    `layers` has a layer's runs of pages, in the order in which the model computes its layers.
    """

    layers: tuple[tuple[PageRun, ...], ...]
    on_device: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes that one of the engine's blocks has in all layers."""
        return sum(run.nbytes for layer in self.layers for run in layer)

    def packed(self, layers: range | None = None) -> tuple[int, tuple[PageRun, ...]]:
        """Bytes that one of the engine's blocks has in a part before `layers` (None: all), and the runs of these."""
        wanted = range(len(self.layers)) if layers is None else layers
        before = sum(run.nbytes for layer in self.layers[: wanted.start] for run in layer)
        return before, tuple(run for layer in self.layers[wanted.start : wanted.stop] for run in layer)

    def pairs(
        self, arena_address: int, block_ids: Sequence[int], layers: range | None = None
    ) -> Iterator[tuple[Span, Span]]:
        """(the engine's bytes, the arena's bytes) for one part of one prefixd block.

        Args:
            arena_address: where the part begins.
            block_ids: the engine's blocks of it, in order; `NO_BLOCK` leaves one out.
            layers: which layers; None: all.
        """
        wanted = range(len(self.layers)) if layers is None else layers
        at = arena_address
        for index, layer in enumerate(self.layers):
            for run in layer:
                if index in wanted:
                    for place, block in enumerate(block_ids):
                        if block != NO_BLOCK:
                            yield (
                                Span(run.address + block * run.stride, run.nbytes, self.on_device),
                                Span(at + place * run.nbytes, run.nbytes),
                            )
                at += run.nbytes * len(block_ids)
