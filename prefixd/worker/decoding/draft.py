"""Speculative decoding: a small model proposes tokens, the model checks them in one pass (Leviathan et al., ICML 2023).

The draft's layers are further KV groups of the same plan (Jenga, section 6.1): the frames of a block hold what both
models keep of its tokens, so a cached prefix serves both, and neither has memory of its own.

One round of a request, the draft proposing three tokens a, b and c, of which the model chooses a and b itself:

```
    position            0 1 2 3 4 5   6   7   8   9
    known before        p p p p p p   t
    draft, 3 passes                   t   a   b          proposes a, b, c
    model, 1 pass                     t   a   b   c      chooses a, b, d: two accepted, and d, the model's own
    known after         p p p p p p   t   a   b   d      d is the next round's t, and written where c lies
```

The choice of a token depends only on the request's seed, the token's number and the model's logits, so the tokens are
the same as without a draft. The draft chooses by the same rule with the same random number: if its logits resemble the
model's, it proposes the tokens that the model will choose, with sampling, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from prefixd.worker.decoding.run import Run
from prefixd.worker.decoding.token_choice import choose_tokens
from prefixd.worker.memory.grouped_kv import GroupedKv
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.model import CausalModel


class Fed(NamedTuple):
    """A request in a round: the draft computes its tokens up to `stop`, and proposes `most` of those that follow."""

    run: Run
    stop: int
    most: int


class Draft:
    """The draft model.

    kv: the memory of both models.
    most: how many tokens it proposes in a round.
    """

    def __init__(self, model: CausalModel, kv: GroupedKv, most: int) -> None:
        self.most = most
        self._model = model
        self._kv = kv

    def ahead(self, run: Run) -> int:
        """How many tokens can be proposed for a run that decodes, besides the one that the model chooses in any case.
        The run's limit and its mapped memory bound the number."""
        known = len(run.tokens)
        count = max(0, min(self.most, run.room - 1, run.memory_tokens - known))
        if self._kv.ready(run.memory, known + count):
            return count
        return min(count, run.block_end - known)

    def propose(self, fed: Sequence[Fed]) -> list[list[int]]:
        """The tokens proposed for each request; fewer if one of them would end the request.

        It stops at logits that are not finite: only the model's logits decide on an error.
        """
        tokens: list[int] = []
        rows: list[int] = []
        segments: list[Segment] = []
        for run, stop, _ in fed:
            start = run.computed - run.draft_behind
            tokens += run.tokens[start:stop]
            rows.append(len(tokens) - 1)
            segments.append(Segment(run.memory, start, stop))
        proposed: list[list[int]] = [[] for _ in fed]
        going = [index for index, each in enumerate(fed) if each.most > 0]
        logits = self._forward(tokens, segments, [rows[index] for index in going])
        while going:
            chosen = choose_tokens(logits, [fed[index].run.guess(proposed[index]) for index in going])
            for index, choice in zip(going, chosen, strict=True):
                if choice is not None:
                    proposed[index].append(choice.token)
            going = [
                index
                for index, choice in zip(going, chosen, strict=True)
                if choice is not None
                and choice.token not in fed[index].run.stop
                and len(proposed[index]) < fed[index].most
            ]
            if going:
                ends = [fed[index].stop + len(proposed[index]) for index in going]
                segments = [
                    Segment(fed[index].run.memory, end - 1, end) for index, end in zip(going, ends, strict=True)
                ]
                logits = self._forward([proposed[index][-1] for index in going], segments, range(len(going)))
        return proposed

    def catch_up(self, ended: Sequence[Run]) -> None:
        """Compute the last tokens of runs that have ended, if that fills a block; waits for the device."""
        fed = [Fed(run, run.computed, 0) for run in ended if run.draft_behind and run.computed == run.block_start]
        if fed:
            self.propose(fed)
            self._model.synchronize()
        for run, _, _ in fed:
            run.draft_behind = 0

    def _forward(self, tokens: Sequence[int], segments: Sequence[Segment], wanted: Sequence[int]) -> torch.Tensor:
        return self._model.forward(tokens, self._kv.draft_step(segments), wanted)
