"""A generation request from its arrival to its last token; `states` draws its life."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixd.cache import NONE, Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.placement.retention import RetentionGrant
from prefixd.cache.rules import GroupMask
from prefixd.observability.request_record import RequestRecord, Stage, StageName, Value
from prefixd.serving.images.image_kv import ImageHolds
from prefixd.serving.loading.load_choice import LoadChoice
from prefixd.serving.loading.tail_load import TailLoad, TailPlan
from prefixd.serving.request.footprint import Footprint
from prefixd.serving.request.prompt import Prompt
from prefixd.serving.request.request_events import Ended, Event, EventSink
from prefixd.serving.request.states import ON_WORKER, TRANSITIONS, IllegalTransitionError, RequestState
from prefixd.serving.request.worker_run import Run, Suspect
from prefixd_scheduler import Distance, QueuedRequest

_NO_ROWS = np.empty(0, np.int64)
_NO_GENERATIONS = np.empty(0, np.int32)
_NO_TIERS = np.empty(0, np.int8)


@dataclass(slots=True, eq=False, kw_only=True)
class Request(Prompt):
    """A request: its prompt and its state.

    Attributes:
        queued: the request as the queue sees it.
        record: of the call, for all its sequences.
        phase: the stage of the record that it is in: QUEUE, PREFILL or DECODE.
        load_stage: the stage of the load under way for it, if any.
        encoded_images: embeddings of images that the worker has computed for it.
        found: while it has no footprint, the cached blocks of its prompt as of the last look.
        generations: the rows' generations at that look.
        farthest: the farthest tier of the found blocks at that look; `NONE` when nothing was found.
        seen_epoch: the cache's epoch (`Mover.epoch`) at that look; -1 when a new look is due in any case.
        cut: `rows` is shorter than the cached prefix, on purpose or because the rest could not be brought up.
        beside: the blocks to load behind `rows` while it runs, if any.
        choice: the decision about loading its prefix, until it is judged.
        outcome: while CANCELLING, the last event.
        arrival_tiers: where each block of its prefix lay when the request arrived, before anything was moved for it.
        hit_tiers: until it runs first, the tier in which each block of `rows` counts as found: the tier at the
            request's arrival or, if the block was not cached then, at the look-up for its turn.
        hit_tokens: prompt tokens found, by tier; None before it runs.
        retention: the retention that its caller requested for the blocks of its prompt, once granted.
        fork_of: a request that may have the same prompt: the worker copies the tokens behind the full blocks that that
            request has computed.
        others_blocks: blocks from the first on that were cached when it ran first: other requests computed them.
        used_blocks: cached blocks, from the first on, that were counted as used by it, however often it is staged.
        stands_alone: requests that lack the same block next do not stand behind it in the queue.
        turn: its number in the order of the last hand-overs of all requests; 0 before its first.
        suspects: cached blocks that it used before it ran `uncached`, until it is known whether they were damaged.
        lost_tokens: tokens that had been computed when it was preempted; 0 if it was not, or runs again.
        whole_loads: its blocks are not loaded layer by layer any more, since that has failed.
    """

    queued: QueuedRequest
    record: RequestRecord = field(default_factory=RequestRecord)
    phase: Stage | None = None
    load_stage: Stage | None = None
    encoded_images: int = 0
    events: EventSink = field(default_factory=asyncio.Queue[Event])
    state: RequestState = RequestState.NEW
    found: Rows = field(default_factory=lambda: _NO_ROWS)
    generations: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_GENERATIONS)
    farthest: Distance = Distance.NONE
    seen_epoch: int = -1
    cut: bool = False
    beside: TailPlan | None = None
    choice: LoadChoice | None = None
    outcome: Event = field(default_factory=lambda: Ended("cancelled"))
    arrival_tiers: npt.NDArray[np.int8] = field(default_factory=lambda: _NO_TIERS)
    hit_tiers: npt.NDArray[np.int8] = field(default_factory=lambda: _NO_TIERS)
    hit_tokens: list[int] | None = None
    handed_over_s: float | None = None
    first_token_s: float | None = None
    resumed: int = 0
    attempts: int = 0
    setbacks: int = 0
    used_blocks: int = 0
    others_blocks: int | None = None
    retention: RetentionGrant | None = None
    fork_of: int = -1
    lost_tokens: int = 0
    stands_alone: bool = False
    whole_loads: bool = False
    turn: int = 0
    suspects: list[Suspect] = field(default_factory=list)
    expected_frames: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_ROWS)
    _footprint: Footprint | None = None
    _run: Run | None = None

    # -- what it is and has -------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """Remembers, after the first look-up, the tiers in which its blocks count as found."""
        self.arrival_tiers = hit_tiers(self.trie, self.found, self.trie.distances(self.found))
        found = np.bincount(self.arrival_tiers, minlength=NONE)[:NONE] * self.trie.block_tokens
        self.record.found_tokens = found.tolist()

    def enter_phase(self, name: StageName | None, now_s: float, **attributes: Value) -> None:
        """Ends the stage that it is in, and begins the next one, if any."""
        if self.phase is not None:
            self.phase.end(now_s)
        self.phase = None if name is None else self.record.begin(name, now_s, **attributes)

    def tiers_at_arrival(self, tiers: npt.NDArray[np.int8], first_block: int = 0) -> npt.NDArray[np.int8]:
        """[blocks]: the tiers, at its arrival, of the blocks of its prefix from `first_block` on. Blocks that were not
        cached then have the tier in `tiers`, which is that of now."""
        before = self.arrival_tiers[first_block : first_block + len(tiers)]
        found = tiers.copy()
        np.copyto(found[: len(before)], before, where=before != NONE)
        return found

    @property
    def first_blocks(self) -> int:
        """Blocks that a run starts with, the cached ones included.

        With sliding windows, a long prompt gets its blocks in portions, so that it never has all of them at once.
        """
        if self.beside is not None:
            return len(self.rows) + self.beside.first_blocks(self.trie.block_tokens)
        if not self.kv.windowed or self.sampling.beam_search is not None:
            return self.blocks
        return min(self.blocks, self.kv.ahead_blocks(len(self.rows) * self.trie.block_tokens))

    @property
    def first_frames(self) -> int:
        """Frames that a run needs at its start, besides those of its cached blocks and of its images."""
        return (self.first_blocks - len(self.rows)) * self.kv.block_frames + self.kv.state_frames

    @property
    def most_frames(self) -> int:
        """The most frames that it may need at a time."""
        of_images = 0 if self.image_kv is None else self.image_kv.frames
        if self.sampling.beam_search is not None:
            return self.kv.beam_frames(self.most_blocks) + of_images
        states = None if self._run is None else self._run.states
        extra = 0 if states is None else states.extra_frames
        return self.kv.most_frames(self.most_blocks) + extra + of_images

    @property
    def growth_frames(self) -> int:
        """The most frames that its run may still ask for. It has those of states from its start."""
        if self.sampling.beam_search is not None:
            return 0
        states = 2 * self.kv.state_frames
        return max(0, self.kv.most_frames(self.most_blocks) - states - self.run.block_frames_taken)

    @property
    def wanted_blocks(self) -> int:
        """While it runs, how many blocks it should have: a block ahead of need."""
        if self.tail is not None and not self.tail.joined:
            return self.tail.reach(self.run.blocks, self.filled_blocks)
        block_tokens = self.trie.block_tokens
        left = max(0, self.sampling.max_tokens - self.generated)
        blocks = -(-(self.chain.tokens + min(left, block_tokens)) // block_tokens)
        if self.kv.windowed:
            return min(blocks, self.kv.ahead_blocks(self.run.computed_tokens))
        return blocks

    @property
    def filled_blocks(self) -> int:
        """While it runs, its full blocks in memory, as the worker reported last."""
        return max(len(self.rows), self.run.computed_tokens // self.trie.block_tokens)

    @property
    def tail(self) -> TailLoad | None:
        """The load beside its run, if any."""
        return None if self._footprint is None else self._footprint.tail

    @property
    def rows(self) -> Rows:
        """The cached blocks from the first on: those held in the GPU tier or, without a footprint, `found`."""
        return self.found if self._footprint is None else self._footprint.hold.rows

    @property
    def wanted(self) -> GroupMask | None:
        """The KV groups of each of these blocks that its prefix needs; None for all."""
        if self._footprint is not None:
            return self._footprint.hold.wanted
        return self.trie.needed(len(self.found)) if self.trie.has_rules else None

    @property
    def next_key(self) -> bytes | None:
        """Key of the first usable block that is not cached."""
        blocks = len(self.rows)
        return self.chain.key(blocks) if blocks < self.usable_blocks else None

    @property
    def on_worker(self) -> bool:
        """Whether the worker has it and its caller still listens."""
        return self.state in ON_WORKER

    @property
    def image_holds(self) -> ImageHolds | None:
        """Its images in the GPU tier; None while it has no footprint, and without `image_kv`."""
        return None if self._footprint is None else self._footprint.images

    @property
    def footprint(self) -> Footprint:
        """Its footprint. Raises IllegalTransitionError in a state in which it has none."""
        if self._footprint is None:
            raise IllegalTransitionError(f"request {self.name} has no footprint while it is {self.state.name}")
        return self._footprint

    @property
    def run(self) -> Run:
        """Its run. Raises IllegalTransitionError in a state in which the worker does not have it."""
        if self._run is None:
            raise IllegalTransitionError(f"request {self.name} has no run while it is {self.state.name}")
        return self._run

    def count_use(self, blocks: int) -> int:
        """Counts the use of its first `blocks` cached blocks; returns how many of them were counted before."""
        counted, self.used_blocks = self.used_blocks, max(self.used_blocks, blocks)
        return counted

    # -- transitions --------------------------------------------------------------------------------------------
    # Each raises IllegalTransitionError, and changes nothing, in a state that does not allow it.

    def enqueue(self) -> None:
        """It is put into the queue."""
        self._change_state("enqueue")
        if self.images is not None:
            self.images.enter()

    def stage(self, footprint: Footprint) -> None:
        """Its prefix is held in the GPU tier; the missing blocks are on their way."""
        self._change_state("stage")
        self._footprint = footprint

    def staged(self) -> None:
        """Its prefix is in the GPU tier. From now on it can be made to give its frames up."""
        self._change_state("staged")
        self.footprint.yield_frames()

    def unstage(self) -> None:
        """It loses its hold; its blocks stay where they are, and are `found`."""
        self._change_state("unstage")
        self._end_footprint()

    def hand_over(self, run: Run, own: Iterable[int]) -> None:
        """The worker gets it, with `own` frames behind those of its prefix."""
        self._change_state("hand_over")
        self._run = run
        self.footprint.claim_frames(own)

    def starve(self) -> None:
        """It needs another frame soon."""
        self._change_state("starve")

    def extend(self, frames: list[int]) -> None:
        """It gets frames."""
        self._change_state("extend")
        self.run.frames += frames
        self.footprint.extend(frames)

    def preempt(self) -> None:
        """The worker is told to end it, and it will be put back."""
        self._change_state("preempt")

    def cancel(self, outcome: Event) -> None:
        """The worker is told to end it, and its caller will get `outcome`."""
        self._change_state("cancel")
        self.outcome = outcome

    def put_back(self) -> None:
        """The worker has let go; it waits for another run."""
        self._change_state("put_back")
        self.resumed += 1
        self._end_footprint()

    def end(self, event: Event) -> None:
        """The last event: no copy and no run uses its frames any more."""
        self._change_state("end")
        self.events.put_nowait(event)
        self._end_footprint()

    def withdraw(self, event: Event) -> None:
        """The last event, while a copy or the worker still uses its frames."""
        self._change_state("withdraw")
        self.events.put_nowait(event)

    def let_go(self) -> None:
        """The copy or the worker has let go of a withdrawn request."""
        self._change_state("let_go")
        self._end_footprint()

    def _change_state(self, transition: str) -> None:
        sources, target = TRANSITIONS[transition]
        if self.state not in sources:
            allowed = ", ".join(state.name for state in RequestState if state in sources)
            raise IllegalTransitionError(
                f"`{transition}` of request {self.name} while it is {self.state.name}; only allowed from {allowed}"
            )
        self.state = target
        if target is RequestState.ENDED and self.images is not None:
            self.images.leave()

    def _end_footprint(self) -> None:
        if self._footprint is None:
            return
        footprint, self._footprint, self._run = self._footprint, None, None
        self.beside = None
        self.found = footprint.hold.rows
        self.generations = self.trie.generation[self.found]
        self.seen_epoch = -1
        footprint.end()


def hit_tiers(trie: Trie, rows: Rows, tiers: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """The tier in which each block of a usable prefix counts as found. A block of which no bytes are needed counts
    where the next needed block is: a state or a window there stands for the blocks before it."""
    if not trie.has_rules or not len(rows):
        return tiers
    needed = trie.needed(len(rows)) != 0
    following = np.where(needed, np.arange(len(rows)), len(rows) - 1)
    found: npt.NDArray[np.int8] = tiers[np.minimum.accumulate(following[::-1])[::-1]]
    return found
