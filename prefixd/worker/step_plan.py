"""Chooses the tokens of the requests that a forward pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from prefixd.worker.decoding.beam_run import Beam, BeamRun
from prefixd.worker.decoding.draft import Draft, Fed
from prefixd.worker.decoding.run import Run
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.memory.state_memory import KeptInPass
from prefixd.worker.model import CausalModel
from prefixd.worker.runs import Runs, failure
from prefixd.worker_protocol.errors import RequestError
from prefixd.worker_protocol.protocol import Done
from prefixd_swap.errors import SwapError

_Wanted = tuple[Run | BeamRun, Run | Beam, int]
"""A run, one of its members, and how many tokens of it can be computed."""
_Planned = tuple[Run | BeamRun, Run | Beam, int, int]
"""The same, how many are, and how many the draft may propose behind them."""


@dataclass(slots=True)  # not frozen: that takes three times as long, 64 times a step
class StepPart:
    """`count` tokens of a member of a run from its token `start` on, and the draft's proposals behind them.

    followed: whether a token follows the last of them. ahead: how many tokens the draft may propose.
    kept: the states that the pass keeps of it; None without recurrent layers.
    """

    run: Run | BeamRun
    member: Run | Beam
    start: int
    count: int
    followed: bool
    ahead: int = 0
    kept: KeptInPass | None = None
    proposed: Sequence[int] = ()
    unread: bool = field(init=False)
    """Whether its token is on the device alone: what the last pass has sampled for the run."""
    rows: int = field(init=False)
    """Number of its tokens, proposed ones included."""
    wanted: int = field(init=False)
    """Number of the last of these tokens whose logits are wanted."""

    def __post_init__(self) -> None:
        # Fields, not properties: a step asks for them a dozen times.
        self.unread = self.start + self.count > len(self.member.tokens)
        self.rows = self.count + len(self.proposed)
        self.wanted = 1 + len(self.proposed) if self.followed else 0

    @property
    def tokens(self) -> list[int]:
        """The tokens that the pass computes; 0 in place of an unread one."""
        if self.unread:
            return [0]
        return [*self.member.tokens[self.start : self.start + self.count], *self.proposed]


class StepPlanner:
    """Chooses the tokens of each forward pass. A run for which there is no memory, or no image, ends here.

    Args:
        model: computes them.
        kv: memory of the runs.
        runs: what there is to compute.
        max_step_tokens: most tokens of a pass; decoding goes first and is not limited by it.
        draft: proposes tokens for requests that are sampled.
    """

    def __init__(self, model: CausalModel, kv: KvMemory, runs: Runs, max_step_tokens: int, draft: Draft | None) -> None:
        self._model = model
        self._kv = kv
        self._runs = runs
        self._max_step_tokens = max_step_tokens
        self._draft = draft
        self._block_tokens = model.spec.block_tokens
        self._keeps_states = model.spec.state_slots > 0

    def plan(self) -> list[StepPart]:
        """First the members that decode, a token each; then prompts, in the order of arrival, with the tokens left."""
        counts: list[_Planned] = []
        prompts = []
        for each in self._ready():
            run, member, _ = each
            if member.decoding:
                counts.append((run, member, 1, self._ahead(run)))
            else:
                prompts.append(each)
        # A prompt advances by a block, however many requests decode, so that it cannot starve.
        decoding = len(counts)
        budget = max(self._max_step_tokens - decoding - sum(ahead for *_, ahead in counts), self._block_tokens)
        for run, member, pending in prompts:
            if budget > 0:
                count = self._whole_cells(member, min(pending, budget))
                if member.images is not None:
                    count = _whole_images(member, count, first=len(counts) == decoding)
                budget -= count
                if count:
                    counts.append((run, member, count, 0))
        if self._model.images is not None:
            counts = self._with_embeddings(counts)
        parts = []
        for run, member, count, ahead in counts:
            start = member.computed
            stop = start + count
            state = run.state if self._keeps_states and isinstance(run, Run) else None
            kept = None if state is None else state.keeps(start, stop, self._block_tokens)
            followed = stop == len(member.tokens) + member.unread
            parts.append(StepPart(run, member, start, count, followed, ahead, kept))
        return parts

    def _with_embeddings(self, counts: list[_Planned]) -> list[_Planned]:
        """Embeds the images that the pass needs. Returns the entries without those of runs whose image failed."""
        usable = []
        for run, member, count, ahead in counts:
            try:
                if member.images is not None:
                    member.images.hold(member.computed, member.computed + count)
            except RequestError as error:
                self._runs.close(run, Done(run.id, "error", str(error)))
            except SwapError as error:
                self._runs.close(run, failure(run.id, [], error))
            except torch.OutOfMemoryError as error:
                why = str(error).partition("\n")[0]
                self._runs.close(run, Done(run.id, "no_memory", f"an image could not be embedded: {why}"))
            else:
                usable.append((run, member, count, ahead))
        return usable

    def _ahead(self, run: Run | BeamRun) -> int:
        """How many tokens the draft may propose for a run that decodes."""
        return 0 if self._draft is None or isinstance(run, BeamRun) else self._draft.ahead(run)

    def _whole_cells(self, member: Run | Beam, count: int) -> int:
        """Of the next `count` tokens of a prompt those that end a cell, or the prompt: see `recurrent.pieces`."""
        stop = member.computed + count
        if stop == len(member.tokens):
            return count  # an unread token is a member's only one, and it decodes
        return max(0, stop // self._model.cell_tokens * self._model.cell_tokens - member.computed)

    def _ready(self) -> list[_Wanted]:
        """The members with tokens to compute, and how many, of runs that have memory for them; waits for a mapping if
        no run has. A run whose layers still come is alone, and only if there is no other: its pass waits for them.

        A request that decodes goes on while memory for later tokens is being mapped.
        """
        kv = self._kv
        ready: list[list[_Wanted]] = []
        waiting: list[list[_Wanted]] = []
        loading: list[list[_Wanted]] = []
        for run in self._runs:
            counts, mapped = [], True
            for member in run.members:
                if (count := member.pending) > 0:
                    counts.append((run, member, count))
                    mapped = mapped and kv.ready(member.memory, member.computed + count)
            if counts:
                (loading if run.loading else ready if mapped else waiting).append(counts)
        usable: list[_Wanted] = []
        for counts in ready or waiting or loading[:1]:
            try:
                for _, member, count in counts:
                    kv.wait(member.memory, member.computed + count)
            except SwapError as error:
                run = counts[0][0]
                if not any(member.unread for member in run.members):  # else it may have ended before
                    self._runs.close(run, failure(run.id, [], error))
            else:
                usable += counts
        return usable


def _whole_images(member: Run | Beam, count: int, *, first: bool) -> int:
    """Of the next `count` tokens those that end in no image whose tokens attend both ways.

    first: the pass computes no other prompt, so that an image goes first that fits into no pass.
    """
    images, start = member.images, member.computed
    if images is None:
        return count
    whole = images.last_cut(start + count) - start
    return whole if whole or not first or not count else images.first_cut(start) - start


def with_proposals(parts: list[StepPart], draft: Draft) -> list[StepPart]:
    """Has the draft compute the tokens of a pass, and propose those behind them; not for beams."""
    fed = [
        Fed(part.member, part.member.computed + part.count, part.ahead)
        for part in parts
        if isinstance(part.member, Run)
    ]
    proposed = iter(draft.propose(fed) if fed else ())
    return [replace(part, proposed=next(proposed)) if isinstance(part.member, Run) else part for part in parts]
