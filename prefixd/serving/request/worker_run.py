"""One run of a request on the worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixd.cache import Trie
from prefixd.worker_protocol.protocol import KeptState, StateFrames

_NOTHING = -1
_ANY = 1 << 40


@dataclass(slots=True)
class RunStates:
    """The frames of a run whose model has a state.

    Attributes:
        own: slots of the run's state.
        keep: slots of the states to be kept, by the number of the prompt's blocks before each.
        tail: slots of the state after the last full block; empty: it is not kept.
        resume: slots of the state from which the run resumes; empty: none.
        resuming: the worker may still read the state in `resume`.
        frames: number of frames of a state.
    """

    own: list[int]
    keep: dict[int, list[int]] = field(default_factory=dict)
    tail: list[int] = field(default_factory=list)
    resume: list[int] = field(default_factory=list)
    resuming: bool = True
    frames: int = 0

    @property
    def extra_states(self) -> int:
        """States that the run has besides its own: to its end, or until they are kept."""
        return len(self.keep) + bool(self.tail)

    @property
    def extra_frames(self) -> int:
        """Frames of the extra states."""
        return self.extra_states * self.frames

    def frames_for_worker(self) -> StateFrames:
        """These frames as a part of `Start`."""
        keep = [KeptState(blocks, frames) for blocks, frames in self.keep.items()]
        return StateFrames(own=self.own, resume=self.resume, keep=keep, tail=self.tail)


@dataclass(frozen=True, slots=True)
class Suspect:
    """The first block of a cached prefix that a run uses, known by its row and the row's generation."""

    trie: Trie
    row: int
    generation: int


@dataclass(slots=True)
class Run:
    """A run as the daemon sees it, from the hand-over to the worker until the worker has let go.

    Attributes:
        frames: the frame ids of block i, one for each slot, are frames[i * slots : (i + 1) * slots]; -1 for a slot
            without a frame.
        computes: the run computes the prompt's blocks up to this one, which are then cached for all requests.
        computed_tokens: tokens whose KV is in the run's memory, as the worker reported last, cached ones included.
        recording: filled blocks are entered into the trie; False after one could not be entered.
        widths: number of frames of each slot of a block.
        states: for a model with a state.
        suspects: the cached prefixes that it uses, which may be damaged.
        forked: it may have copied from another run.
        by_layers: it was handed over while layers of its prefix were on their way, and has reported nothing yet.
        load_failed: these did not come: its worker was told to end it, and it runs again.
    """

    frames: list[int]
    computes: int
    recording: bool
    widths: tuple[int, ...] = (1,)
    states: RunStates | None = None
    suspects: list[Suspect] = field(default_factory=list)
    forked: bool = False
    by_layers: bool = False
    load_failed: bool = False
    computed_tokens: int = 0
    _passed: dict[int, int] = field(default_factory=dict)  # by a group's first part, blocks that are passed
    _gone: int = field(init=False)  # frames of slots without one

    def __post_init__(self) -> None:
        self._gone = self._count(at for at, frame in enumerate(self.frames) if frame == _NOTHING)

    @property
    def blocks(self) -> int:
        """Blocks that have or had frames; a very large number if a block needs none."""
        return len(self.frames) // self.slots if self.slots else _ANY

    @property
    def slots(self) -> int:
        """Slots of a block."""
        return len(self.widths)

    @property
    def block_frames_taken(self) -> int:
        """Frames that its blocks have now."""
        return self.blocks * sum(self.widths) - self._gone if self.widths else 0

    def frame_ids(self, first: int, last: int) -> list[int]:
        """The frames of the blocks from `first` to `last`, one for each slot; -1 where there is none."""
        return self.frames[first * self.slots : last * self.slots]

    def pass_blocks(self, first_part: int, last_part: int, blocks: int) -> tuple[slice, list[int]]:
        """Gives up a group's parts of the first `blocks` blocks, which the run does not need any more.

        Returns the blocks whose parts were given up now, and the frames that these parts had.
        """
        before = self._passed.get(first_part, 0)
        blocks = min(blocks, self.blocks)
        if blocks <= before:
            return slice(before, before), []
        self._passed[first_part] = blocks
        passed: list[int] = []
        for block in range(before, blocks):
            for at in range(block * self.slots + first_part, block * self.slots + last_part):
                if self.frames[at] != _NOTHING:
                    passed.append(self.frames[at])
                    self.frames[at] = _NOTHING
                    self._gone += self.widths[at % self.slots]
        return slice(before, blocks), passed

    def _count(self, places: Iterable[int]) -> int:
        return sum(self.widths[at % self.slots] for at in places)
