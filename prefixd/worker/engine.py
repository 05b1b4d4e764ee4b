"""Continuous batching: runs requests side by side, pass by pass, and reports their results."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from prefixd.worker.attention.decode_graphs import DecodeGraphs
from prefixd.worker.decoding.beam_run import Beam, BeamRun, not_finite
from prefixd.worker.decoding.draft import Draft
from prefixd.worker.decoding.run import Run, check_arrived
from prefixd.worker.decoding.token_choice import Choice, Chosen, choose_tokens
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.model import CausalModel
from prefixd.worker.runs import Runs, failure
from prefixd.worker.step_plan import StepPart, StepPlanner, with_proposals
from prefixd.worker_protocol.errors import RequestError
from prefixd.worker_protocol.protocol import Arrived, Cancel, Done, Extend, Start, Step, Update
from prefixd_swap.errors import SwapError
from prefixd_swap.vtensor import VirtualTensor


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass that has been queued on the device. context: the sum, over its tokens, of the tokens before."""

    updates: list[Update]
    tokens: int
    started_s: float
    proposed: int
    accepted: int
    context: int


class Engine:
    """Runs requests side by side. Every method returns the messages to send, in order.

    kv: memory of the model's geometry, for `sequence_capacity` tokens a request.
    max_step_tokens: most tokens a pass computes; decoding goes first and is not limited by it.
    clock: seconds, monotonic.
    graphs: replay passes in which all requests decode; only with KV in virtual tensors.
    draft: proposes tokens for sampled requests. Of a beam search it computes only the prompt.
    """

    def __init__(
        self,
        model: CausalModel,
        kv: KvMemory,
        max_step_tokens: int,
        clock: Callable[[], float],
        graphs: DecodeGraphs | None = None,
        draft: Draft | None = None,
    ) -> None:
        self._model = model
        self._graphs = graphs
        self._draft = draft
        self._kv = kv
        self._block_tokens = model.spec.block_tokens
        self._clock = clock
        self._runs = Runs(model, kv)
        self._planner = StepPlanner(model, kv, self._runs, max_step_tokens, draft)
        self._computing = False
        self._later: list[Done] = []  # for requests that end after the present pass
        self._unreported: list[_Pass] = []  # passes that were not waited for yet

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes while `step` calls its `meanwhile`."""
        return self._model.asynchronous

    @property
    def runnable(self) -> bool:
        """Whether `step` would compute something."""
        return any(member.pending > 0 for run in self._runs for member in run.members)

    def start(self, message: Start) -> list[Step | Done]:
        """Take a request. One that cannot run answers with Done at once."""
        refusal = self._runs.open(message)
        return self.poll() if refusal is None else [refusal]

    def extend(self, message: Extend) -> list[Step | Done]:
        """Give a request more frames."""
        run = self._runs.get(message.id)
        if isinstance(run, Run):
            try:
                self._kv.extend(run.memory, message.frames)
            except SwapError as error:
                self._end(run, failure(run.id, message.frames, error))
        return self.poll()

    def arrived(self, message: Arrived) -> list[Step | Done]:
        """Have a request skip tokens whose KV has come."""
        run = self._runs.get(message.id)
        if isinstance(run, Run):
            try:
                blocks = check_arrived(message, run, self._block_tokens, self._model.spec)
                self._kv.extend(run.memory, message.frames)
            except RequestError as error:
                self._end(run, Done(run.id, "error", str(error)))
            except SwapError as error:
                self._end(run, failure(run.id, message.frames, error))
            else:
                first = message.first * self._block_tokens
                run.arrive(first, first + blocks * self._block_tokens)
        return self.poll()

    def cancel(self, message: Cancel) -> list[Step | Done]:
        """End a request; one that is being computed ends after the pass."""
        run = self._runs.get(message.id)
        if run is not None:
            self._end(run, Done(run.id, "cancelled"))
        return self.poll()

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Step | Done]:
        """One forward pass over the requests that can run now, if any.

        `meanwhile` is called while the device computes; it may call `start`, `extend`, `arrived` and `cancel`, so that
        the memory of the next pass is mapped beside this one.
        """
        started = self._clock()
        parts = self._planner.plan()
        if not parts:
            return self.poll()
        if self._draft is not None:
            parts = with_proposals(parts, self._draft)
        tokens = [token for part in parts for token in part.tokens]
        followed = [part for part in parts if part.followed]
        context = sum(part.rows * part.member.computed for part in parts)
        self._computing = True
        logits = self._forward(parts, tokens)
        if meanwhile is not None:
            meanwhile()
        news, done = self._follow(followed, logits)
        self._computing = False
        accepted = 0
        for part in parts:
            if isinstance(part.member, Run):
                chosen = [choice.token for choice in news.get(part.run.id, ())]
                accepted += sum(map(operator.eq, part.proposed, chosen))
                further = max(0, len(chosen) - 1)  # proposed tokens that were accepted, so they are computed
                part.member.advance(part.count + further)
                part.member.draft_behind = int(0 < further == len(part.proposed))
                if part.member.images is not None:
                    part.member.images.pass_by(part.member.computed)
                if isinstance(part.run, Run):  # beams begin with all of their prompt
                    self._kv.pass_by(part.member.memory, part.member.kept_tokens)
                if part.kept is not None:
                    part.kept.end()
                    part.member.kept += part.kept.blocks
        if self._draft is not None:
            self._draft.catch_up([part.run for part in parts if isinstance(part.run, Run) and part.run.ended])
        broken = {message.id for message in done if message.reason == "error"}
        updates = _updates({part.run.id: part.run for part in parts if part.run.id not in broken}, news)
        proposed = sum(len(part.proposed) for part in parts)
        self._unreported.append(_Pass(updates, len(tokens), started, proposed, accepted, context))
        # A sampled token waits for all earlier passes. A pass without one is reported with the next that has one.
        messages: list[Step | Done] = []
        if followed or not self._model.asynchronous:
            messages += self._report()
        for message in [*done, *self._later]:
            if message.id in self._runs:
                self._runs.close(self._runs[message.id], message)
        self._later.clear()
        return [*messages, *self.poll()]

    def flush(self) -> list[Step | Done]:
        """Wait for the device, and report everything that was computed."""
        if self._unreported:
            self._model.synchronize()
        return [*self._report(), *self.poll(wait=True)]

    def poll(self, wait: bool = False) -> list[Step | Done]:
        """The ends of requests whose frames the device does not use any more; with `wait` of all that have ended."""
        self._kv.poll(wait)
        closed = self._runs.take_closed()
        if not closed or not self._unreported:
            return [*closed]
        self._model.synchronize()  # a request's last pass is reported before its end
        return [*self._report(), *closed]

    def close(self) -> None:
        """End all requests without an answer."""
        for run in list(self._runs):
            self._runs.close(run, Done(run.id, "cancelled"))
        self._kv.poll(wait=True)

    def _forward(self, parts: list[StepPart], tokens: list[int]) -> torch.Tensor:
        """Compute the parts; returns the logits of those that a token follows."""
        graphs, rows = self._graphs, list[int]()
        computed = 0
        for part in parts:
            computed += part.rows
            rows += range(computed - part.wanted, computed)
        decodes = len(rows) == len(tokens) and not any(_embeds(part.member) for part in parts)
        if graphs is not None and decodes and graphs.fits(len(tokens)):
            memories = [cast(VirtualTensor, part.member.memory) for part in parts]
            return graphs.run(tokens, [memory.row for memory in memories], [part.member.computed for part in parts])
        segments = [part.member.segment(part.rows) for part in parts]
        for index, part in enumerate(parts):
            if part.kept is not None:
                segments[index] = replace(segments[index], keep=part.kept.positions)
        return self._model.forward(tokens, self._kv.step(segments), rows)

    def _follow(self, parts: list[StepPart], logits: torch.Tensor) -> tuple[dict[int, list[Chosen]], list[Done]]:
        """Choose the tokens that follow the parts, each with `part.wanted` rows of logits.

        Returns the sampled tokens by run, and the ends of requests.
        """
        news: dict[int, list[Chosen]] = {}
        done: list[Done] = []
        rows: list[int] = []
        choices: list[Choice] = []
        sampled: list[tuple[Run, Sequence[int]]] = []
        searched: dict[int, list[int]] = {}
        first = 0
        for part in parts:
            own = range(first, first + part.wanted)
            first += part.wanted
            if isinstance(part.run, BeamRun):
                searched.setdefault(part.run.id, []).extend(own)
            else:
                rows += own
                choices += [part.run.choice(part.proposed[:count]) for count in range(part.wanted)]
                sampled.append((part.run, part.proposed))
        chosen = iter(choose_tokens(logits if len(rows) == len(logits) else logits[rows], choices))
        for run, proposed in sampled:
            accepted = _accept(run, proposed, list(itertools.islice(chosen, 1 + len(proposed))))
            if not accepted:
                done.append(not_finite(run.id))
                continue
            news[run.id] = accepted
            if run.ended:
                done.append(Done(run.id, run.ended))
        for request, indices in searched.items():
            search = self._runs[request]
            assert isinstance(search, BeamRun)
            try:
                end = search.advance(logits[indices])
            except SwapError as error:
                end = failure(search.id, [], error)
            if end is not None:
                done.append(end)
        return news, done

    def _report(self) -> list[Step]:
        """All unreported passes as one step; the device has computed them."""
        passes, self._unreported = self._unreported, []
        if not passes:
            return []
        updates = [update for each in passes for update in each.updates]
        tokens, elapsed_s = sum(each.tokens for each in passes), self._clock() - passes[0].started_s
        proposed, accepted = sum(each.proposed for each in passes), sum(each.accepted for each in passes)
        context = sum(each.context for each in passes) // max(tokens, 1)
        return [Step(updates, tokens, elapsed_s, self._kv.usage(), len(passes), proposed, accepted, context)]

    def _end(self, run: Run | BeamRun, done: Done) -> None:
        if self._computing:
            self._later.append(done)
        else:
            self._runs.close(run, done)


def _embeds(member: Run | Beam) -> bool:
    """Whether a pass has rows of an image for it, which are not embeddings of tokens."""
    return member.images is not None and member.images.embeds


def _accept(run: Run, proposed: Sequence[int], chosen: Sequence[Chosen | None]) -> list[Chosen]:
    """Append the model's choices to a run, up to and including the first that differs from the proposed token.

    chosen: behind the known tokens, and behind each proposed one. Returns the appended ones; none if the first logits
    are not finite. If later ones are not finite, they are computed again in the next pass.
    """
    accepted: list[Chosen] = []
    for choice, guess in itertools.zip_longest(chosen, proposed):
        if choice is None:
            break
        run.append(choice.token)
        accepted.append(choice)
        if run.ended or choice.token != guess:
            break
    return accepted


def _updates(runs: dict[int, Run | BeamRun], news: dict[int, list[Chosen]]) -> list[Update]:
    """One for every run with new tokens or a newly filled block."""
    updates = []
    for run in runs.values():
        filled = run.filled_blocks
        if run.id in news or filled > run.reported_blocks:
            run.reported_blocks = filled
            new = news.get(run.id, [])
            logprobs = [choice.logprobs for choice in new if choice.logprobs]
            kept: list[int] = []
            if isinstance(run, Run):
                kept, run.kept = run.kept, []
            updates.append(Update(run.id, [choice.token for choice in new], filled, logprobs, kept))
    return updates
