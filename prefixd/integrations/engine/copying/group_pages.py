"""Lists the addresses of an engine's KV blocks and of their copies in the daemon's arena.

A prefixd block consists of several of the engine's blocks; a part is the bytes of one KV group of them on one rank. In
the arena a part lies layer by layer, within a layer one engine's block after the other. The bytes inside a page are
never interpreted (on a CPU vLLM packs keys and values as its instruction set wants them).

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

    `layers` has the runs of pages of each layer, in the order in which the model computes its layers.
    """

    layers: tuple[tuple[PageRun, ...], ...]
    on_device: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one of the engine's blocks in all layers."""
        return sum(run.nbytes for layer in self.layers for run in layer)

    def packed(self, layers: range | None = None) -> tuple[int, tuple[PageRun, ...]]:
        """For one of the engine's blocks: bytes of the layers before `layers` (None: all), and the runs of `layers`."""
        wanted = range(len(self.layers)) if layers is None else layers
        before = sum(run.nbytes for layer in self.layers[: wanted.start] for run in layer)
        return before, tuple(run for layer in self.layers[wanted.start : wanted.stop] for run in layer)

    def pairs(
        self, arena_address: int, block_ids: Sequence[int], layers: range | None = None
    ) -> Iterator[tuple[Span, Span]]:
        """Pairs (the engine's span, the arena's span) for one part of one prefixd block.

        Args:
            arena_address: the first byte of the part.
            block_ids: the engine's blocks of the part, in order; `NO_BLOCK` leaves one out.
            layers: the layers to copy; None: all.
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
