"""Continuous batching: runs requests side by side, pass by pass, and reports their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from prefixd.worker.decoding.beam_run import Beam, BeamRun
from prefixd.worker.decoding.draft import Draft
from prefixd.worker.decoding.run import Run, check_arrived
from prefixd.worker.graphs.captured import Span
from prefixd.worker.graphs.pass_graphs import PassGraphs
from prefixd.worker.layer_gate import LayerGate, Listen, PassDroppedError
from prefixd.worker.memory.embedding_memory import EmbeddingMemory
from prefixd.worker.memory.grouped_kv import places
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.model import CausalModel
from prefixd.worker.pass_queue import PassQueue, QueuedPass, pass_by
from prefixd.worker.runs import Runs, failure
from prefixd.worker.step_plan import StepPart, StepPlanner, with_proposals
from prefixd.worker_protocol.errors import RequestError
from prefixd.worker_protocol.protocol import Arrived, Cancel, Done, Expect, Extend, Layers, Start, Step
from prefixd_swap.errors import SwapError
from prefixd_swap.vtensor import VirtualTensor


class Engine:
    """Runs requests side by side. Every method returns the messages to send, in order.

    With `ahead`, `step` queues a pass before it reads the tokens that the pass before it has sampled, so that the
    device never waits for the host (vLLM's asynchronous scheduling, SGLang's overlap scheduler):

    ```
    host      plan 1 | plan 2, read 1 | plan 3, read 2 | ...
    device             pass 1           pass 2           ...      pass 2 takes pass 1's tokens from the device
    ```

    A token that ends its request is known a pass late, so its own KV is computed in vain: that is neither reported nor
    counted. Beam searches and drafts need the tokens at once; a pass of a beam search is read before the next is
    planned.

    kv: memory of the model's geometry, for `sequence_capacity` tokens a request.
    max_step_tokens: most tokens a pass computes; decoding goes first and is not limited by it.
    clock: seconds, monotonic.
    graphs: replay passes in which all requests decode, or with short prompts; only with KV in virtual tensors.
    draft: proposes tokens for sampled requests. Of a beam search it computes only the prompt.
    ahead: queue a pass before the tokens of the last one are read; not with a draft.
    embeddings: memory of images' embeddings, for a model that keeps them.

    Attributes:
        listen: waits for layers of cached blocks that are on their way. None: their request waits for all of them.
    """

    listen: Listen | None = None

    def __init__(
        self,
        model: CausalModel,
        kv: KvMemory,
        max_step_tokens: int,
        clock: Callable[[], float],
        graphs: PassGraphs | None = None,
        draft: Draft | None = None,
        *,
        ahead: bool = False,
        embeddings: EmbeddingMemory | None = None,
    ) -> None:
        self._model = model
        self._ahead = ahead and draft is None
        self._graphs = graphs
        self._draft = draft
        self._kv = kv
        self._block_tokens = model.spec.block_tokens
        self._keeps_states = model.spec.state_slots > 0
        self._clock = clock
        self._runs = Runs(model, kv, embeddings)
        self._planner = StepPlanner(model, kv, self._runs, max_step_tokens, draft)
        self._computing = False
        self._later: list[Done] = []  # for requests that end after the present pass
        self._passes = PassQueue(kv, self._runs, draft, clock)
        self._layer_places = {layer: place for layer, (_, place) in places(model.spec.groups.own.attention).items()}

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes while `step` calls its `meanwhile`."""
        return self._model.asynchronous

    @property
    def runnable(self) -> bool:
        """Whether `step` would compute or read something."""
        return bool(self._passes.sampled()) or any(member.pending > 0 for run in self._runs for member in run.members)

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
                messages: list[Step | Done] = []
                if run.unread:  # it may have ended before
                    messages += self._passes.report(self._passes.sampled())
                if not run.over:
                    self._end(run, failure(run.id, message.frames, error))
                return [*messages, *self.poll()]
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

    def layers(self, message: Layers) -> list[Step | Done]:
        """More layers of a request's cached blocks have come."""
        run = self._runs.get(message.id)
        if isinstance(run, Run) and run.loading:
            run.note_layers(message.layers)
        return self.poll()

    def expect(self, message: Expect) -> None:
        """Have frames mapped that a request will probably want."""
        self._kv.expect(message.frames)

    def cancel(self, message: Cancel) -> list[Step | Done]:
        """End a request; one that is being computed ends after the pass, whose results come before its end."""
        run = self._runs.get(message.id)
        if run is not None:
            self._end(run, Done(run.id, "cancelled"))
        return self.poll()

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Step | Done]:
        """One forward pass over the requests that can run now, if any.

        `meanwhile` is called while the device computes; it may call `start`, `extend`, `arrived` and `cancel`, so that
        the memory of the next pass is mapped beside this one.
        """
        if self._keeps_states and any(isinstance(run, Run) and run.must_be_read for run in self._runs):
            # Before another pass: `meanwhile` sends the ends of the requests that this report ends.
            return [*self._passes.report(self._passes.sampled()), *self.poll()]
        started = self._clock()
        parts = self._planner.plan()
        if not parts:
            return [*self._passes.report(self._passes.sampled()), *self.poll()]
        if parts[0].run.loading and (self.listen is None or self._passes.sampled()):
            # Its pass waits for layers, and tokens that were sampled before must not.
            return [*self._passes.report(self._passes.sampled()), *self.poll()]
        if self._draft is not None:
            parts = with_proposals(parts, self._draft)
        at_once = not self._ahead or any(isinstance(part.run, BeamRun) for part in parts)
        self._computing = at_once
        try:
            self._queue(parts, started)
        except PassDroppedError:
            self._computing = False
            self._runs.close(parts[0].run, Done(parts[0].run.id, "cancelled"))
            return self.poll()
        self._kv.map_ahead()
        if meanwhile is not None:
            meanwhile()
        if not at_once:
            # `meanwhile` may have reported this pass, too: a request of it was cancelled, and the device was done.
            count = self._passes.sampled(max(0, len(self._passes) - 1))
        else:
            # On a GPU a pass without a sampled token is reported with the next that has one.
            count = self._passes.sampled() if self._model.asynchronous else len(self._passes)
        messages: list[Step | Done] = [*self._passes.report(count)]
        self._computing = False
        for message in self._later:
            if message.id in self._runs:
                self._runs.close(self._runs[message.id], message)
        self._later.clear()
        return [*messages, *self.poll()]

    def flush(self) -> list[Step | Done]:
        """Wait for the device, and report everything that was computed."""
        if len(self._passes):
            self._model.synchronize()
        return [*self._passes.report(len(self._passes)), *self.poll(wait=True)]

    def poll(self, wait: bool = False) -> list[Step | Done]:
        """The ends of requests whose frames the device does not use any more; with `wait` of all that have ended."""
        messages: list[Step | Done] = []
        self._runs.poll(wait)
        while closed := self._runs.take_closed():
            # A request's passes are reported before its end. The device has computed them: it is done with the frames.
            count = self._passes.concerning({done.id for done in closed})
            messages += [*self._passes.report(count), *closed]
            self._runs.poll(wait)
        return messages

    def close(self) -> None:
        """End all requests without an answer."""
        for run in list(self._runs):
            self._runs.close(run, Done(run.id, "cancelled"))
        self._runs.poll(wait=True)

    def _queue(self, parts: list[StepPart], started_s: float) -> None:
        """Queue a pass and the choice of the tokens behind it; its runs are then as after the pass."""
        queued = QueuedPass(parts, started_s, self._forward(parts))
        queued.choose(count=self._draft is None)
        self._passes.append(queued)
        for part in parts:
            run, member = part.run, part.member
            if isinstance(member, Run):
                member.advance(part.count)
                member.draft_behind = 0
                if run is member:  # not a beam search's prompt
                    member.unread += part.followed
                pass_by(part, self._kv)
                if part.kept is not None:
                    part.kept.end()
                    queued.kept[run.id] = part.kept.blocks
            queued.filled[run.id] = run.filled_blocks
            if member.images is not None:
                queued.images[run.id] = member.images.take_filled()

    def _forward(self, parts: list[StepPart]) -> torch.Tensor:
        """Compute the parts; returns the logits of those that a token follows."""
        tokens, rows = list[int](), list[int]()
        for part in parts:
            tokens += part.tokens
            if part.wanted == 1:
                rows.append(len(tokens) - 1)
            else:
                rows += range(len(tokens) - part.wanted, len(tokens))
        unread = self._passes.unread_tokens(parts)
        embeds = self._model.images is not None and any(_embeds(part.member) for part in parts)
        gate = self._gate(parts[0].run)
        if (graphs := self._graphs) is not None and gate is None and not embeds:
            spans = [Span(cast(VirtualTensor, part.member.memory).row, part.start, part.rows) for part in parts]
            if (logits := graphs.run(tokens, spans, rows, unread)) is not None:
                return logits
        segments = [part.member.segment(part.rows) for part in parts]
        for index, part in enumerate(parts):
            if part.kept is not None:
                segments[index] = replace(segments[index], keep=part.kept.positions)
        return self._model.forward(tokens, self._kv.step(segments), rows, unread, None if gate is None else gate.wait)

    def _gate(self, run: Run | BeamRun) -> LayerGate | None:
        """Holds the pass of a run alone whose layers still come."""
        if not isinstance(run, Run) or not run.loading or self.listen is None:
            return None
        return LayerGate(run, self._layer_places, self.listen)

    def _end(self, run: Run | BeamRun, done: Done) -> None:
        if self._computing:
            self._later.append(done)
        else:
            self._runs.close(run, done)


def _embeds(member: Run | Beam) -> bool:
    """Whether a pass has rows of an image for it, which are not embeddings of tokens."""
    return member.images is not None and member.images.embeds
