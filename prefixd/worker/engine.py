"""Continuous batching: which tokens of which requests each forward pass computes, and what came of it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec
import torch

from prefixd.worker.attention.decode_graphs import DecodeGraphs
from prefixd.worker.decoding.beam_run import Beam, BeamRun, not_finite
from prefixd.worker.decoding.draft import Draft, Fed
from prefixd.worker.decoding.run import Run, check_arrived, check_start
from prefixd.worker.decoding.sampling import Choice, Chosen, choose_tokens
from prefixd.worker.images import PromptImages
from prefixd.worker.memory.cross_kv import CrossKv
from prefixd.worker.memory.grouped_kv import GroupedKv
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.memory.state_memory import KeptInPass
from prefixd.worker.model import CausalModel
from prefixd.worker_protocol.errors import RequestError
from prefixd.worker_protocol.protocol import Arrived, Cancel, Done, Extend, Start, Step, Update
from prefixd_swap.errors import OutOfMemoryError, SwapError
from prefixd_swap.vtensor import VirtualTensor

_NAMED = 8


@dataclass(frozen=True, slots=True)
class _Part:
    """The next `count` tokens of a member of a run, and those that the draft proposes behind them.

    followed: whether a token follows the last of them. ahead: how many tokens the draft may propose.
    kept: the states that the pass keeps of it; None without recurrent layers.
    """

    run: Run | BeamRun
    member: Run | Beam
    count: int
    followed: bool
    ahead: int = 0
    kept: KeptInPass | None = None
    proposed: Sequence[int] = ()

    @property
    def tokens(self) -> list[int]:
        """What the pass computes of it."""
        first = self.member.computed
        return [*self.member.tokens[first : first + self.count], *self.proposed]

    @property
    def rows(self) -> int:
        """How many tokens these are."""
        return self.count + len(self.proposed)

    @property
    def wanted(self) -> int:
        """Of how many of them, the last ones, the logits are wanted."""
        return 1 + len(self.proposed) if self.followed else 0


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass that has been handed to the device. context: of all its tokens, how many come before them."""

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
    draft: proposes tokens for requests that are sampled. A search with beams has its prompt computed by it alone.
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
        self._block_slots = model.spec.block_slots
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._runs: dict[int, Run | BeamRun] = {}
        self._cross: dict[int, CrossKv] = {}  # of runs whose model has layers that attend to images
        self._closed: list[Done] = []  # requests that nothing on the device uses any more
        self._computing = False
        self._later: list[Done] = []  # for requests to be ended after the pass that is being computed
        self._unreported: list[_Pass] = []  # those that nobody has waited for yet

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes while `step` calls its `meanwhile`."""
        return self._model.asynchronous

    @property
    def runnable(self) -> bool:
        """Whether `step` would compute something."""
        return any(member.pending > 0 for run in self._runs.values() for member in run.members)

    def start(self, message: Start) -> list[Step | Done]:
        """Take a request. One that cannot run answers with Done at once."""
        if message.id in self._runs:
            return [Done(message.id, "error", f"request {message.id} is already running; use another id")]
        cross: CrossKv | None = None
        try:
            check_start(message, self._block_tokens, self._model.spec)
            blocks = -(-len(message.tokens) // 4 // self._block_tokens)
            own = message.frames[: blocks * self._block_slots] if message.sampling.beams else message.frames
            images = self._images(message)
            cross = self._open_images(message)
            memory = self._kv.open(own, message.state)
        except (RequestError, SwapError) as error:
            if cross is not None:
                self._close_images(cross, lambda: None)
            if isinstance(error, RequestError):
                return [Done(message.id, "error", str(error))]
            return [_failed(message.id, message.frames, error)]
        run: Run | BeamRun
        if (search := message.sampling.beam_search) is not None:
            run = BeamRun(message, search, self._kv, memory, self._block_tokens, self._model.spec, images)
        else:
            run = Run(message, memory, self._block_tokens, self._model.spec, images)
        self._runs[run.id] = run
        if cross is not None and images is not None:
            images.memory = self._cross[run.id] = cross
        try:
            self._fork(run, self._runs.get(message.fork_of))
        except SwapError as error:
            self._finish(run, _failed(run.id, message.frames, error))
        else:
            if isinstance(run, Run) and run.ended:
                self._finish(run, Done(run.id, run.ended))
        return self.poll()

    def extend(self, message: Extend) -> list[Step | Done]:
        """Give a request more frames."""
        run = self._runs.get(message.id)
        if isinstance(run, Run):
            try:
                self._kv.extend(run.memory, message.frames)
            except SwapError as error:
                self._end(run, _failed(run.id, message.frames, error))
        return self.poll()

    def arrived(self, message: Arrived) -> list[Step | Done]:
        """Have a request pass over tokens whose KV has come."""
        run = self._runs.get(message.id)
        if isinstance(run, Run):
            try:
                blocks = check_arrived(message, run, self._block_tokens, self._model.spec)
                self._kv.extend(run.memory, message.frames)
            except RequestError as error:
                self._end(run, Done(run.id, "error", str(error)))
            except SwapError as error:
                self._end(run, _failed(run.id, message.frames, error))
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
        """One forward pass over what can run now; nothing if nothing can.

        `meanwhile` is called while the device computes; it may call `start`, `extend`, `arrived` and `cancel`, so that
        the memory of the next pass is mapped beside this one.
        """
        started = self._clock()
        parts = self._plan()
        if not parts:
            return self.poll()
        if self._draft is not None:
            parts = _with_proposals(parts, self._draft)
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
                further = max(0, len(chosen) - 1)  # of the tokens proposed, those that are now known and computed
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
        # A sampled token has waited for all that came before it. A pass without one is reported with the next that has.
        messages: list[Step | Done] = []
        if followed or not self._model.asynchronous:
            messages += self._report()
        for message in [*done, *self._later]:
            if message.id in self._runs:
                self._finish(self._runs[message.id], message)
        self._later.clear()
        return [*messages, *self.poll()]

    def flush(self) -> list[Step | Done]:
        """Wait for the device, and report what has been computed: nothing is left to wait for then."""
        if self._unreported:
            self._model.synchronize()
        return [*self._report(), *self.poll(wait=True)]

    def poll(self, wait: bool = False) -> list[Step | Done]:
        """The requests that have ended and whose frames nothing uses any more; with `wait` all that have ended."""
        self._kv.poll(wait)
        closed, self._closed = self._closed, []
        if not closed or not self._unreported:
            return [*closed]
        self._model.synchronize()  # what a request's last pass filled is told before its end
        return [*self._report(), *closed]

    def close(self) -> None:
        """Let go of everything; the requests get no answer."""
        for run in list(self._runs.values()):
            self._finish(run, Done(run.id, "cancelled"))
        self._kv.poll(wait=True)

    def _forward(self, parts: list[_Part], tokens: list[int]) -> torch.Tensor:
        """Compute the parts; the logits of those that a token follows."""
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

    def _images(self, message: Start) -> PromptImages | None:
        """The images of a request that has been checked. Raises RequestError."""
        encoder = self._model.images
        if encoder is None or not message.images:
            return None
        return PromptImages(message.images, len(message.tokens) // 4, encoder)

    def _open_images(self, message: Start) -> CrossKv | None:
        """The memory of a request's images; None without layers that attend to them. Raises as `KvMemory.open`."""
        if not message.image_frames or not isinstance(self._kv, GroupedKv) or self._kv.cross is None:
            return None
        return self._kv.cross.open(message.image_frames)

    def _close_images(self, cross: CrossKv, on_closed: Callable[[], None]) -> None:
        assert isinstance(self._kv, GroupedKv) and self._kv.cross is not None, "it has opened it"
        self._kv.cross.close(cross, on_closed)

    def _fork(self, run: Run | BeamRun, parent: Run | BeamRun | None) -> None:
        """Copy what `parent` has computed of the tokens that both have in common, behind the cached blocks."""
        if parent is None or not self._model.spec.groups.plain:
            return  # a state cannot be cut to what both have in common, and windows may have left it behind
        child = run if isinstance(run, Run) else run.prompt
        source = parent if isinstance(parent, Run) else parent.prompt
        first = child.computed
        last = min(source.kept_tokens, len(child.tokens) - 1, child.memory.blocks * self._block_tokens)
        common = first
        while common < last and child.tokens[common] == source.tokens[common]:
            common += 1
        if child.images is not None:
            common = child.images.common(source.images, common)
        elif source.images is not None:
            common = source.images.common(None, common)
        if common > first and child.tokens[:first] == source.tokens[:first]:
            self._kv.copy(source.memory, child.memory, first, common)
            child.computed = common

    def _follow(self, parts: list[_Part], logits: torch.Tensor) -> tuple[dict[int, list[Chosen]], list[Done]]:
        """Choose the tokens that follow the parts, of `part.wanted` rows of logits each.

        Returns what was sampled, by run, and the ends.
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
                end = _failed(search.id, [], error)
            if end is not None:
                done.append(end)
        return news, done

    def _plan(self) -> list[_Part]:
        """Members that decode first, a token each; then prompts, as they came, with what is left."""
        ready = self._ready()
        counts = [(run, member, 1, self._ahead(run)) for run, member in ready if member.decoding]
        # However many decode, a prompt moves on by a block, so that it cannot starve.
        decoding = len(counts)
        budget = max(self._max_step_tokens - sum(1 + ahead for *_, ahead in counts), self._block_tokens)
        for run, member in ready:
            if not member.decoding and budget > 0:
                count = self._whole_cells(member, min(member.pending, budget))
                if member.images is not None:
                    count = _whole_images(member, count, first=len(counts) == decoding)
                budget -= count
                if count:
                    counts.append((run, member, count, 0))
        counts = self._with_embeddings(counts)
        parts = []
        for run, member, count, ahead in counts:
            stop = member.computed + count
            state = run.state if isinstance(run, Run) else None
            kept = None if state is None else state.keeps(member.computed, stop, self._block_tokens)
            parts.append(_Part(run, member, count, stop == len(member.tokens), ahead, kept))
        return parts

    def _with_embeddings(
        self, counts: list[tuple[Run | BeamRun, Run | Beam, int, int]]
    ) -> list[tuple[Run | BeamRun, Run | Beam, int, int]]:
        """What is left to compute when the images of it are embedded: a run whose image cannot be read ends."""
        usable = []
        for run, member, count, ahead in counts:
            try:
                if member.images is not None:
                    member.images.hold(member.computed, member.computed + count)
            except RequestError as error:
                self._finish(run, Done(run.id, "error", str(error)))
            except SwapError as error:
                self._finish(run, _failed(run.id, [], error))
            except torch.OutOfMemoryError as error:
                why = str(error).partition("\n")[0]
                self._finish(run, Done(run.id, "no_memory", f"an image could not be embedded: {why}"))
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
            return count
        return max(0, stop // self._model.cell_tokens * self._model.cell_tokens - member.computed)

    def _ready(self) -> list[tuple[Run | BeamRun, Run | Beam]]:
        """The members with tokens to compute, of runs that have memory for them; waits for a mapping if no run has.

        A request that decodes goes on while memory for later tokens is being mapped.
        """
        pending = [run for run in self._runs.values() if any(member.pending > 0 for member in run.members)]
        ready = [run for run in pending if all(self._kv.ready(m.memory, m.computed + m.pending) for m in run.members)]
        usable: list[tuple[Run | BeamRun, Run | Beam]] = []
        for run in ready or pending:
            try:
                for member in run.members:
                    self._kv.wait(member.memory, member.computed + member.pending)
                usable += [(run, member) for member in run.members if member.pending > 0]
            except SwapError as error:
                self._finish(run, _failed(run.id, [], error))
        return usable

    def _report(self) -> list[Step]:
        """What the passes did of which the device has computed all, as one step."""
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
            self._finish(run, done)

    def _finish(self, run: Run | BeamRun, done: Done) -> None:
        """Let go of the run's memory; `done` is sent once nothing on the device uses it any more."""
        del self._runs[run.id]
        if isinstance(run, Run) and run.state is not None and done.reason != "error":  # else it may be damaged
            done = msgspec.structs.replace(done, tail_blocks=run.state.tail_blocks)
        images = run.images if isinstance(run, Run) else run.prompt.images
        if images is not None:
            done = msgspec.structs.replace(done, encoded_images=images.encoded)
        cross = self._cross.pop(run.id, None)
        open_memories = len(run.memories) + (cross is not None)

        def closed() -> None:
            nonlocal open_memories
            open_memories -= 1
            if not open_memories:
                self._closed.append(done)

        for memory in run.memories:
            self._kv.close(memory, closed)
        if cross is not None:
            self._close_images(cross, closed)


def _failed(request: int, frames: list[int], error: SwapError) -> Done:
    if isinstance(error, OutOfMemoryError):
        return Done(request, "no_memory", str(error))
    return Done(request, "error", _unmappable(frames, error))


def _unmappable(frames: list[int], error: SwapError) -> str:
    named = f"frames {frames[:_NAMED]}{'...' * (len(frames) > _NAMED)}" if frames else "its frames"
    return f"{named} cannot be mapped: {error}"


def _embeds(member: Run | Beam) -> bool:
    """Whether a pass has rows of an image for it, which are no tokens' embeddings."""
    return member.images is not None and member.images.embeds


def _whole_images(member: Run | Beam, count: int, *, first: bool) -> int:
    """Of the next `count` tokens those that end in no image whose tokens attend both ways.

    first: the pass computes no other prompt, so that an image goes first that fits into no pass.
    """
    images, start = member.images, member.computed
    if images is None:
        return count
    whole = images.last_cut(start + count) - start
    return whole if whole or not first or not count else images.first_cut(start) - start


def _with_proposals(parts: list[_Part], draft: Draft) -> list[_Part]:
    """Has the draft compute what a pass is about to, and propose what follows; beams it knows nothing of."""
    fed = [
        Fed(part.member, part.member.computed + part.count, part.ahead)
        for part in parts
        if isinstance(part.member, Run)
    ]
    proposed = iter(draft.propose(fed) if fed else ())
    return [replace(part, proposed=next(proposed)) if isinstance(part.member, Run) else part for part in parts]


def _accept(run: Run, proposed: Sequence[int], chosen: Sequence[Chosen | None]) -> list[Chosen]:
    """Append what the model has chosen to a run, up to the first token that is not the one proposed, that included.

    chosen: behind the known tokens, and behind each of those proposed. Returns what was appended; nothing if the first
    logits are not finite. Where later ones are not, they are computed again.
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
