"""The forward passes that are queued on the device, until their results are reported."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from prefixd.worker.decoding.beam_run import BeamRun, not_finite
from prefixd.worker.decoding.draft import Draft
from prefixd.worker.decoding.run import Run
from prefixd.worker.decoding.token_choice import Choice, Chosen, QueuedChoices, queue_choices
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.runs import Runs, failure
from prefixd.worker.step_plan import StepPart
from prefixd.worker.to_device import UnreadTokens
from prefixd.worker_protocol.protocol import Done, Step, Update
from prefixd_swap.errors import SwapError


@dataclass(slots=True)
class QueuedPass:
    """The parts of a pass, and what is known of them before the device has computed it.

    logits: of the parts that a token follows, `StepPart.wanted` rows each.
    choices: the tokens that follow sampled runs; None if none does.
    filled: by request, the full blocks in memory after the pass. kept: by request, the states that it has kept, as
        numbers of blocks before them. images: by request, the images whose frames it has filled.
    """

    parts: Sequence[StepPart]
    started_s: float
    logits: torch.Tensor
    choices: QueuedChoices | None = None
    filled: dict[int, int] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)
    images: dict[int, list[int]] = field(default_factory=dict)
    followed: list[tuple[StepPart, int]] = field(init=False)
    """The parts that a token follows, and the first of their rows of the logits."""

    def __post_init__(self) -> None:
        self.followed = []
        first = 0
        for part in self.parts:
            if part.followed:
                self.followed.append((part, first))
                first += part.wanted

    def choose(self, *, count: bool) -> None:
        """Queue the choice of the tokens that follow sampled runs; `count` as in `queue_choices`."""
        rows: list[int] = []
        choices: list[Choice] = []
        for part, first in self.followed:
            if isinstance(part.run, Run):
                rows.append(first)
                choices.append(part.run.choice())
                for number in range(1, part.wanted):
                    rows.append(first + number)
                    choices.append(part.run.choice(part.proposed[:number]))
        if choices:
            self.choices = queue_choices(self.logits, rows, choices, count=count)

    def searched(self) -> dict[int, list[int]]:
        """By request, the rows of the logits of beam searches."""
        rows: dict[int, list[int]] = {}
        for part, first in self.followed:
            if isinstance(part.run, BeamRun):
                rows.setdefault(part.run.id, []).extend(range(first, first + part.wanted))
        return rows

    @property
    def sampled(self) -> bool:
        """Whether tokens follow it, which are not read yet."""
        return bool(self.followed)

    def read(self) -> Iterator[tuple[Run, StepPart, Sequence[Chosen | None]]]:
        """The choices behind each sampled run's part and its proposals; waits until the device has made them."""
        if self.choices is None:
            return
        chosen = self.choices.read()
        first = 0
        for part, _ in self.followed:
            if isinstance(part.run, Run):
                yield part.run, part, chosen[first : first + part.wanted]
                first += part.wanted

    def live(self) -> list[StepPart]:
        """The parts that count: those of sampled runs that had not ended before."""
        return [part for part in self.parts if not (isinstance(part.run, Run) and part.run.over)]

    def concerns(self, requests: Container[int]) -> bool:
        """Whether it has something to report of one of these requests."""
        return any(part.run.id in requests for part in self.live())

    def tokens_for(self, parts: Sequence[StepPart]) -> UnreadTokens | None:
        """The unread tokens of the pass behind this one, which sampled them; its parts compute a token each there."""
        sampled = [part.run.id for part, _ in self.followed if isinstance(part.run, Run)]
        place = {request: number for number, request in enumerate(sampled)}
        rows, sources = list[int](), list[int]()
        row = 0
        for part in parts:
            if part.unread:
                rows.append(row)
                sources.append(place[part.run.id])
            row += part.rows
        if not rows:
            return None
        assert self.choices is not None, "an unread token was sampled in this pass"
        return UnreadTokens(self.choices.ids, rows, sources)


class _Result(NamedTuple):
    """What a pass has done. context: the sum, over its tokens, of the tokens before."""

    updates: list[Update]
    tokens: int
    proposed: int
    accepted: int
    context: int


class PassQueue:
    """The passes that are not reported yet, in the order in which the device computes them.

    Args:
        kv: memory of the runs.
        runs: what the passes compute; a run that has ended is closed there.
        draft: the model that proposes tokens, if there is one.
        clock: seconds, monotonic.
    """

    def __init__(self, kv: KvMemory, runs: Runs, draft: Draft | None, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._runs = runs
        self._draft = draft
        self._clock = clock
        self._passes: deque[QueuedPass] = deque()
        self._read_s = -math.inf  # when the last pass was read

    def __len__(self) -> int:
        return len(self._passes)

    def append(self, queued: QueuedPass) -> None:
        """Enter a pass that has been queued on the device."""
        self._passes.append(queued)

    def unread_tokens(self, parts: Sequence[StepPart]) -> UnreadTokens | None:
        """Where the unread tokens of the next pass are, which the last one with tokens has sampled."""
        count = self.sampled()
        return self._passes[count - 1].tokens_for(parts) if count else None

    def concerning(self, requests: Container[int]) -> int:
        """How many passes there are up to the last one with something to report of these requests."""
        return max((number for number, each in enumerate(self._passes, start=1) if each.concerns(requests)), default=0)

    def sampled(self, most: int | None = None) -> int:
        """How many of the first `most` queued passes there are up to the last one with tokens to read."""
        passes = itertools.islice(self._passes, most)
        return max((number for number, each in enumerate(passes, start=1) if each.sampled), default=0)

    def report(self, count: int) -> list[Step]:
        """The first `count` queued passes as one step; waits until the device has computed them."""
        passes = [self._passes.popleft() for _ in range(count)]
        all_results = [self._read(each) for each in passes]
        results = [result for result in all_results if result is not None]
        at_once = not self._passes and bool(all_results) and all_results[-1] is not None
        started_s, self._read_s = max(self._read_s, passes[0].started_s if passes else 0), self._clock()
        if not results:
            return []
        tokens = sum(result.tokens for result in results)
        return [
            Step(
                [update for result in results for update in result.updates],
                tokens,
                self._read_s - started_s,
                self._kv.usage(),
                len(results),
                sum(result.proposed for result in results),
                sum(result.accepted for result in results),
                sum(result.context for result in results) // max(tokens, 1),
                int(at_once),
            )
        ]

    def _read(self, queued: QueuedPass) -> _Result | None:
        """Take a pass's tokens, and end the requests that they end; None if no part of it counts."""
        parts = queued.live()
        news: dict[int, list[Chosen]] = {}
        done: list[Done] = []
        accepted = 0
        for run, part, chosen in queued.read():
            run.unread -= 1
            if run.over:
                continue
            taken = self._accept(run, part.proposed, chosen)
            if not taken:
                run.failed = True
                done.append(not_finite(run.id))
                continue
            news[run.id] = taken
            if run.ended:
                done.append(Done(run.id, run.ended))
            if self._draft is not None:
                accepted += sum(map(operator.eq, part.proposed, (choice.token for choice in taken)))
                further = len(taken) - 1  # proposed tokens that were accepted, so they are computed
                run.advance(further)
                run.draft_behind = int(0 < further == len(part.proposed))
                pass_by(part, self._kv)
        done += self._search(queued)
        if self._draft is not None:
            self._draft.catch_up([part.run for part in parts if isinstance(part.run, Run) and part.run.ended])
            queued.filled = {part.run.id: part.run.filled_blocks for part in parts}
        broken = {message.id for message in done if message.reason == "error"}
        updates = _updates({part.run.id: part.run for part in parts if part.run.id not in broken}, news, queued)
        for message in done:
            if message.id in self._runs:
                self._runs.close(self._runs[message.id], message)
        if not parts:
            return None
        tokens = proposed = context = 0
        for part in parts:
            tokens += part.rows
            proposed += len(part.proposed)
            context += part.rows * part.start
        return _Result(updates, tokens, proposed, accepted, context)

    def _accept(self, run: Run, proposed: Sequence[int], chosen: Sequence[Chosen | None]) -> list[Chosen]:
        """Append the model's choices to a run, up to and including the first that differs from the proposed token.

        chosen: behind the known tokens, and behind each proposed one. Returns the appended ones; none if the first
        logits are not finite. If later ones are not finite, they are computed again in the next pass.
        """
        if not proposed and chosen[0] is not None and self._draft is None:  # the usual case, for its speed
            run.append(chosen[0].token)
            return [chosen[0]]
        accepted: list[Chosen] = []
        for choice, guess in itertools.zip_longest(chosen, proposed):
            if choice is None:
                break
            run.append(choice.token)
            if self._draft is not None:
                run.count(choice.token)
            accepted.append(choice)
            if run.ended or choice.token != guess:
                break
        return accepted

    def _search(self, queued: QueuedPass) -> list[Done]:
        """Advance the beam searches of a pass; returns their ends."""
        done: list[Done] = []
        for request, rows in queued.searched().items():
            search = self._runs[request]
            assert isinstance(search, BeamRun)
            try:
                end = search.advance(queued.logits[rows])
            except SwapError as error:
                end = failure(search.id, [], error)
            if end is not None:
                done.append(end)
        return done


def pass_by(part: StepPart, kv: KvMemory) -> None:
    """Give up memory that no further token of the part's sequence needs."""
    if part.member.images is not None:
        part.member.images.pass_by(part.member.computed)
    if isinstance(part.run, Run):  # beams begin with all of their prompt
        kv.pass_by(part.run.memory, part.run.kept_tokens)


def _updates(runs: dict[int, Run | BeamRun], news: dict[int, list[Chosen]], queued: QueuedPass) -> list[Update]:
    """One for every run with new tokens, a newly filled block, or a new image."""
    updates = []
    for request, run in runs.items():
        filled, images, new = queued.filled[request], queued.images.get(request, []), news.get(request, ())
        if new or filled > run.reported_blocks or images:
            run.reported_blocks = filled
            logprobs = [choice.logprobs for choice in new if choice.logprobs]
            kept = queued.kept.get(request, [])
            updates.append(Update(request, [choice.token for choice in new], filled, logprobs, kept, images))
    return updates
