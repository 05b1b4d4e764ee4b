"""One request with beam search: its prompt, its beams, and the memory that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from prefixd.base.sampling import BeamSearch
from prefixd.worker.decoding.beam_search import RunningSearch
from prefixd.worker.decoding.run import Limits, Run
from prefixd.worker.images import PromptImages
from prefixd.worker.memory.kv_memory import KvMemory, KvSequence, Segment
from prefixd.worker_protocol.protocol import BeamResult, Done, Start
from prefixd_swap.errors import SwapError

BlockFrames = tuple[int, ...]
"""The frames of one block, of all KV groups."""


class Beam:
    """A sequence that grows by one token a step."""

    decoding = True
    unread = 0

    def __init__(
        self, tokens: list[int], memory: KvSequence, blocks: list[BlockFrames], images: PromptImages | None
    ) -> None:
        self.tokens = tokens
        self.images = images
        self.memory = memory
        self.blocks = blocks

    @property
    def computed(self) -> int:
        """Number of tokens with KV in memory: all but the last."""
        return len(self.tokens) - 1

    @property
    def pending(self) -> int:
        return 1

    def segment(self, count: int) -> Segment:
        stop = self.computed + count
        images = None if self.images is None else self.images.of_pass(self.computed, stop)
        return Segment(self.memory, self.computed, stop, images=images)


class BeamRun:
    """A request's prompt, then its beams, which share blocks by mapping them.

    ```
    prompt of 2.5 blocks     [4] [7] [8]
    beam 0                   [4] [7] [8]            continues in the prompt's last block
    beam 1                   [4] [7] [9]            has a copy of the half block
    beam 2, two steps on     [4] [7] [9] [12]       continues beam 1: shares its full blocks, copies what is not full
    ```

    The daemon gives all frames at the start: those of the prompt, and for each beam those behind the prompt's full
    blocks (`blocks_needed`), so that a search never waits for memory. Frames that no beam uses are reused.
    """

    loading = False

    def __init__(
        self,
        start: Start,
        search: BeamSearch,
        kv: KvMemory,
        memory: KvSequence,
        block_tokens: int,
        limits: Limits,
        images: PromptImages | None = None,
    ) -> None:
        self.prompt = Run(start, memory, block_tokens, limits, images)
        self.id = start.id
        self.beams: list[Beam] = []
        self.reported_blocks = start.cached_blocks
        self._kv = kv
        self._block_tokens = block_tokens
        used = -(-len(self.prompt.tokens) // block_tokens)
        width = limits.block_slots
        blocks = [tuple(start.frames[first : first + width]) for first in range(0, len(start.frames), width)]
        self._prompt_blocks = blocks[:used]
        self._spare = blocks[used:]
        self._users: Counter[BlockFrames] = Counter()
        self._search = RunningSearch(search, self.prompt.room, self.prompt.stop)

    @property
    def members(self) -> Sequence[Run | Beam]:
        """The prompt until it is computed, then the beams."""
        return self.beams or (self.prompt,)

    @property
    def memories(self) -> list[KvSequence]:
        return [member.memory for member in self.members]

    @property
    def filled_blocks(self) -> int:
        """Number of full blocks of the prompt in memory."""
        return self.prompt.filled_blocks

    def advance(self, logits: torch.Tensor) -> Done | None:
        """Append a token to each beam; logits: [len(members), vocab_size]. Returns Done after the last step, else None.

        Raises OutOfMemoryError if no addresses are left for a beam, and as `KvMemory`.
        """
        parents = self._search.advance(logits)
        if parents is None:
            return not_finite(self.id)
        if self._search.ended:
            results = [
                BeamResult(list(best.tokens), best.score, best.ended or "length") for best in self._search.finished
            ]
            return Done(self.id, results[0].reason, beams=results)
        if not self.beams:
            blocks = list(self._prompt_blocks)
            self._users.update(blocks)
            self.beams = [Beam(list(self.prompt.tokens), self.prompt.memory, blocks, self.prompt.images)]
        self._replace_beams(parents)
        for beam, hypothesis in zip(self.beams, self._search.running, strict=True):
            beam.tokens.append(hypothesis.tokens[-1])
            self._extend(beam)
        return None

    def _replace_beams(self, parents: list[int]) -> None:
        """Make beam i a continuation of the former beam parents[i].

        A parent's first child keeps its memory. The others reuse the memory of beams without a child.
        """
        former, written = self.beams, len(self.beams[0].tokens)  # the last tokens are computed by now
        continued = set(parents)
        free = [beam for index, beam in enumerate(former) if index not in continued]
        for beam in free:
            self._release(beam.blocks)
        first: set[int] = set()
        beams: list[Beam] = []
        try:
            for parent in parents:
                source = former[parent]
                if parent not in first:
                    first.add(parent)
                    beams.append(source)
                else:
                    beams.append(self._fork(source, free.pop() if free else None, written))
        except SwapError:
            # All beams with memory, each once, so that the request's end closes it.
            self.beams = list({id(beam.memory): beam for beam in [*former, *beams]}.values())
            raise
        self.beams = beams
        for beam in free:  # only when fewer beams than the width can continue
            self._kv.close(beam.memory, lambda: None)

    def _fork(self, source: Beam, into: Beam | None, written: int) -> Beam:
        """A beam with the KV of `source`: full blocks shared, the rest copied. Reuses the memory of `into` if given."""
        full = written // self._block_tokens
        blocks = source.blocks[:full]
        self._users.update(blocks)
        if written % self._block_tokens:
            blocks = [*blocks, self._allocate()]
        tokens = list(source.tokens)
        frames = [frame for block in blocks for frame in block]
        if into is None:
            memory = self._kv.open(frames)
        else:
            memory = into.memory
            self._kv.assign(memory, frames)
        try:
            self._kv.copy(source.memory, memory, full * self._block_tokens, written)
        except SwapError:
            if into is None:
                self._kv.close(memory, lambda: None)
            raise
        return Beam(tokens, memory, blocks, source.images)

    def _extend(self, beam: Beam) -> None:
        """Give a beam frames for its next token if it has none."""
        if len(beam.blocks) * self._block_tokens < len(beam.tokens):
            block = self._allocate()
            beam.blocks.append(block)
            self._kv.extend(beam.memory, block)

    def _allocate(self) -> BlockFrames:
        block = self._spare.pop()
        self._users[block] += 1
        return block

    def _release(self, blocks: list[BlockFrames]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block] and block not in self._prompt_blocks:
                self._spare.append(block)


def not_finite(request: int) -> Done:
    """The end of a request whose logits are not finite."""
    return Done(request, "error", "the model's logits are not finite; its weights may be damaged", not_finite=True)
