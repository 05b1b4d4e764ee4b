"""One request that is searched with beams: its prompt, its beams, and the memory that they share."""

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

Home = tuple[int, ...]
"""The frames of one block, of all KV groups."""


class Beam:
    """A sequence that is continued by a token a step."""

    decoding = True

    def __init__(self, tokens: list[int], memory: KvSequence, homes: list[Home], images: PromptImages | None) -> None:
        self.tokens = tokens
        self.images = images
        self.memory = memory
        self.homes = homes

    @property
    def computed(self) -> int:
        """How many tokens have their KV in memory: all but the last."""
        return len(self.tokens) - 1

    @property
    def pending(self) -> int:
        """One token."""
        return 1

    def segment(self, count: int) -> Segment:
        """The token to compute."""
        stop = self.computed + count
        images = None if self.images is None else self.images.of_pass(self.computed, stop)
        return Segment(self.memory, self.computed, stop, images=images)


class BeamRun:
    """A request's prompt, then its beams, which share blocks by mapping them.

    ```
    prompt of 2.5 blocks     [4] [7] [8]
    beam 0                   [4] [7] [8]            goes on in the prompt's last block
    beam 1                   [4] [7] [9]            has a copy of the half
    beam 2, two steps on     [4] [7] [9] [12]       continues beam 1: shares its full blocks, copies what is not full
    ```

    The daemon hands out all frames at the start: those of the prompt, and for each beam those behind the prompt's full
    blocks (`blocks_needed`), so that a search never waits for memory. Homes that no beam has are used again.
    """

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
        homes = [tuple(start.frames[first : first + width]) for first in range(0, len(start.frames), width)]
        self._prompt_homes = homes[:used]
        self._spare = homes[used:]
        self._users: Counter[Home] = Counter()
        self._search = RunningSearch(search, self.prompt.room, self.prompt.stop)

    @property
    def members(self) -> Sequence[Run | Beam]:
        """What is computed: the prompt, until it is there, then the beams."""
        return self.beams or (self.prompt,)

    @property
    def memories(self) -> list[KvSequence]:
        """The memory of all members."""
        return [member.memory for member in self.members]

    @property
    def filled_blocks(self) -> int:
        """Full blocks of the prompt that are in memory."""
        return self.prompt.filled_blocks

    def advance(self, logits: torch.Tensor) -> Done | None:
        """Continue by a token; logits: a row for each member. Returns the end, if this was the last step.

        Raises OutOfMemoryError when there are no addresses for so many beams, and what `KvMemory` raises.
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
            homes = list(self._prompt_homes)
            self._users.update(homes)
            self.beams = [Beam(list(self.prompt.tokens), self.prompt.memory, homes, self.prompt.images)]
        self._continue(parents)
        for beam, hypothesis in zip(self.beams, self._search.running, strict=True):
            beam.tokens.append(hypothesis.tokens[-1])
            self._make_room(beam)
        return None

    def _continue(self, parents: list[int]) -> None:
        """Have beam i be a continuation of the former beam parents[i].

        A parent's first child goes on in its memory. The others take that of beams that nobody continues.
        """
        former, written = self.beams, len(self.beams[0].tokens)  # the last tokens are computed by now
        continued = set(parents)
        free = [beam for index, beam in enumerate(former) if index not in continued]
        for beam in free:
            self._drop(beam.homes)
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
            # All that have memory, each once: the request's end closes it.
            self.beams = list({id(beam.memory): beam for beam in [*former, *beams]}.values())
            raise
        self.beams = beams
        for beam in free:  # only when fewer beams than the width can go on
            self._kv.close(beam.memory, lambda: None)

    def _fork(self, source: Beam, into: Beam | None, written: int) -> Beam:
        """A beam with the KV of `source`: its full blocks shared, the rest copied, in the memory of `into` if given."""
        full = written // self._block_tokens
        homes = source.homes[:full]
        self._users.update(homes)
        if written % self._block_tokens:
            homes = [*homes, self._take()]
        tokens = list(source.tokens)
        frames = [frame for home in homes for frame in home]
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
        return Beam(tokens, memory, homes, source.images)

    def _make_room(self, beam: Beam) -> None:
        """Frames for the token that is computed next."""
        if len(beam.homes) * self._block_tokens < len(beam.tokens):
            home = self._take()
            beam.homes.append(home)
            self._kv.extend(beam.memory, home)

    def _take(self) -> Home:
        home = self._spare.pop()
        self._users[home] += 1
        return home

    def _drop(self, homes: list[Home]) -> None:
        for home in homes:
            self._users[home] -= 1
            if not self._users[home] and home not in self._prompt_homes:
                self._spare.append(home)


def not_finite(request: int) -> Done:
    """The end of a request for which no token can be chosen."""
    return Done(request, "error", "the model's logits are not finite; its weights may be damaged", not_finite=True)
