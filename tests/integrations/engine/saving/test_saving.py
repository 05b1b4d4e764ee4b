"""Which of vLLM's blocks are saved, and that none stays pinned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixd.base.rules.rules import RecurrentState, SlidingWindow
from prefixd.client import NamespaceSpec
from prefixd.integrations.engine.geometry import Geometry, Group
from prefixd.integrations.engine.jobs import SaveJob
from prefixd.integrations.engine.saving.save_queue import SaveQueue

RANKS = 2
GEOMETRY = Geometry((Group(0, 4, 400), Group(1, 8, 200)), block_tokens=16, unit_tokens=8, ranks=RANKS, layout="test")
WINDOWED = Geometry(
    (Group(0, 4, 400), Group(1, 8, 200, SlidingWindow(24))), block_tokens=16, unit_tokens=8, ranks=RANKS, layout="test"
)
WITH_STATES = Geometry(
    (Group(0, 16, 400), Group(1, 16, 100, RecurrentState())),
    block_tokens=16,
    unit_tokens=16,
    ranks=RANKS,
    layout="test",
)
ONE_GROUP = Geometry((Group(0, 4, 400),), block_tokens=16, unit_tokens=4, ranks=1, layout="test")
HASH_TOKENS = 8
NO_BLOCK = 0
SPECS = [GEOMETRY.spec("model", b""), GEOMETRY.spec("model", b"salt")]


class Pool:
    """Counts references as vLLM's block pool does."""

    def __init__(self) -> None:
        self.references: Counter[int] = Counter()

    def pin(self, ids: Sequence[int]) -> None:
        assert NO_BLOCK not in ids
        self.references.update(ids)

    def unpin(self, ids: Sequence[int]) -> None:
        self.references.subtract(ids)
        assert min(self.references.values()) >= 0, "given back more often than taken"

    @property
    def held(self) -> int:
        return self.references.total()


def a_request(tokens: Sequence[int]) -> SimpleNamespace:
    ends = range(HASH_TOKENS, len(tokens) + 1, HASH_TOKENS)
    return SimpleNamespace(all_token_ids=list(tokens), block_hashes=[tuple(tokens[:end]) for end in ends])


def queue(pool: Pool, geometry: Geometry = GEOMETRY, most_pinned: int = 1000, every: int = 1) -> SaveQueue:
    return SaveQueue(geometry, pool.pin, pool.unpin, HASH_TOKENS, most_pinned, NO_BLOCK, every)


@dataclass
class Running:
    """A request of the machine below, with the tables that vLLM keeps of it."""

    spec: NamespaceSpec
    tokens: list[int]
    computed: int
    next_block: int
    window: int
    tables: list[list[int]] = field(default_factory=lambda: [[], []])
    ever: list[list[int]] = field(default_factory=lambda: [[], []])
    """The tables without what has become null."""

    def slide(self) -> None:
        gone = max(0, self.computed - self.window) // 8
        self.tables[1][:gone] = [0] * min(gone, len(self.tables[1]))

    def cached(self, group: int, number: int) -> int:
        """The engine's own cache has forgotten nothing."""
        return self.ever[group][number]

    def grow(self, ids: Iterator[int]) -> None:
        for table, ever, each in zip(self.tables, self.ever, (4, 8), strict=True):
            while len(table) * each < self.computed:
                table.append(next(ids))
                ever.append(table[-1])


class AnyInterleaving(RuleBasedStateMachine):
    """Requests come, advance, lose blocks to their window and end, and ranks acknowledge, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.most_pinned = 40
        self.queue = queue(self.pool, WINDOWED, most_pinned=self.most_pinned, every=2)
        self.running: dict[str, Running] = {}
        self.unacknowledged: dict[int, int] = {}
        self.ids = iter(range(1, 1_000_000))
        self.names = iter(range(1_000_000))

    @rule(
        prompt=st.integers(0, 1),
        tokens=st.integers(1, 150),
        cached=st.integers(0, 3),
        late=st.integers(0, 40),
        window=st.sampled_from([1000, 8, 24]),
        salted=st.booleans(),
    )
    def begin(self, prompt: int, tokens: int, cached: int, late: int, window: int, salted: bool) -> None:
        """Few prompts, so that requests share them and one saves what another does already. Saving may begin late, when
        tokens that are not cached are computed already."""
        if len(self.running) == 4:
            self.end(min(self.running))
        name, spec = f"r{next(self.names)}", SPECS[salted]
        prompt_tokens = np.random.default_rng(prompt).integers(0, 256, tokens).tolist()
        computed = min(cached * 16 + late, tokens)
        self.running[name] = running = Running(spec, prompt_tokens, computed, cached, window)
        running.grow(self.ids)
        self.queue.begin(name, spec, cached * 16, tokens)

    @precondition(lambda self: self.running)
    @rule(steps=st.lists(st.integers(0, 40), min_size=4, max_size=4))
    def step(self, steps: list[int]) -> None:
        """Blocks that a window has left are null from then on, then those of the step come."""
        for (name, running), step in zip(list(self.running.items()), steps, strict=False):
            running.slide()
            running.computed = min(running.computed + step, len(running.tokens))
            running.grow(self.ids)
            self.queue.advance(name, a_request(running.tokens), running.tables, running.computed)
            self.take(running)

    def take(self, running: Running) -> None:
        for job in self.queue.take_jobs():
            self.check(job, running)
            self.unacknowledged[job.id] = RANKS

    def check(self, job: SaveJob, running: Running) -> None:
        end = (job.first_block + job.blocks) * 16
        assert job.blocks > 0 and end <= running.computed
        # What another request was saving at that moment is skipped. Of the window group more is, and its end may come
        # twice.
        assert job.groups == (1,) or job.first_block >= running.next_block
        if job.groups == (0,):
            running.next_block = job.first_block + job.blocks
        assert job.prefix.tokens == np.asarray(running.tokens[:end], "<u4").tobytes()
        assert job.prefix.spec == running.spec
        for group, ids in zip(job.groups, job.block_ids, strict=True):
            each = (4, 8)[group]
            assert list(ids) == running.ever[group][job.first_block * 16 // each : end // each]
            assert NO_BLOCK not in ids and all(self.pool.references[block] >= 1 for block in ids)

    @precondition(lambda self: self.unacknowledged)
    @rule(data=st.data(), ranks=st.integers(1, RANKS))
    def acknowledge(self, data: st.DataObject, ranks: int) -> None:
        job = data.draw(st.sampled_from(sorted(self.unacknowledged)))
        ranks = min(ranks, self.unacknowledged[job])
        self.unacknowledged[job] -= ranks
        self.queue.acknowledge(job, ranks)
        if not self.unacknowledged[job]:
            del self.unacknowledged[job]

    def end(self, name: str) -> None:
        running = self.running.pop(name)
        request = a_request(running.tokens)
        self.queue.finish(name, request, running.tables, running.computed, running.cached)
        self.take(running)
        assert name not in self.queue

    @precondition(lambda self: len(self.running) > 1)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        self.queue.stop(name)

    @invariant()
    def no_more_are_pinned_than_may_be(self) -> None:
        ends = 2 * 4  # of four requests that end at a time, each with 2 of the engine's blocks a block
        assert self.pool.held <= self.most_pinned + 2 * ends
        assert self.queue.under_way == bool(self.unacknowledged)

    def teardown(self) -> None:
        """When all is over, vLLM has every block back."""
        for name in list(self.running):
            self.end(name)
        for job, ranks in self.unacknowledged.items():
            self.queue.acknowledge(job, ranks)
        assert self.pool.held == 0
        assert not self.queue.under_way and not self.queue._keys


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=40, stateful_step_count=40)


def tables(tokens: int, start: int = 1) -> list[list[int]]:
    return [list(range(start, start + -(-tokens // each))) for each in (4, 8)]


def test_a_block_is_saved_when_all_its_tokens_are_computed() -> None:
    saves = queue(pool := Pool())
    request, blocks = a_request(range(40)), tables(40)
    saves.begin("r", SPECS[0], 0, 1000)
    saves.advance("r", request, blocks, 15)
    assert not saves.take_jobs() and pool.held == 0, "of a block that is not whole nothing is pinned"
    saves.advance("r", request, blocks, 40)
    (job,) = saves.take_jobs()
    assert (job.first_block, job.blocks) == (0, 2)
    assert job.block_ids == ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4))
    assert saves.take_jobs() == []


def test_what_is_cached_already_is_not_saved() -> None:
    saves = queue(pool := Pool(), ONE_GROUP)
    saves.begin("r", SPECS[0], 32, 1000)
    saves.advance("r", a_request(range(64)), tables(64)[:1], 63)
    (job,) = saves.take_jobs()
    assert (job.first_block, job.blocks) == (2, 1) and pool.held == 4


def test_saving_ends_where_the_engine_has_let_go_of_a_block() -> None:
    saves = queue(pool := Pool())
    request, blocks = a_request(range(96)), tables(96)
    saves.begin("r", SPECS[0], 0, 1000)
    saves.advance("r", request, blocks, 24)
    assert len(saves.take_jobs()) == 1
    blocks[1][3] = 0
    saves.advance("r", request, blocks, 96)
    assert saves.take_jobs() == []
    saves.acknowledge(0, RANKS)
    assert pool.held == 0


def test_what_a_window_has_passed_is_saved_without_its_group() -> None:
    saves = queue(pool := Pool(), WINDOWED)
    request, blocks = a_request(range(96)), tables(96)
    blocks[1][:5] = [NO_BLOCK] * 5
    saves.begin("r", SPECS[0], 0, 1000)
    saves.advance("r", request, blocks, 96)
    body, window = saves.take_jobs()
    assert (body.first_block, body.blocks, body.groups) == (0, 6, (0,))
    assert body.block_ids == (tuple(range(1, 25)),)
    assert (window.first_block, window.blocks, window.groups) == (3, 3, (1,))
    assert window.block_ids == (tuple(range(7, 13)),)
    for job in (body, window):
        saves.acknowledge(job.id, RANKS)
    assert pool.held == 0


def test_of_a_model_with_windows_only_nothing_is_saved_behind_a_block_without_bytes() -> None:
    only_windows = Geometry((Group(0, 4, 400, 24),), block_tokens=16, unit_tokens=4, ranks=1, layout="test")
    saves = queue(pool := Pool(), only_windows)
    blocks = tables(64)[:1]
    blocks[0][0] = NO_BLOCK
    saves.begin("r", SPECS[0], 0, 1000)
    saves.advance("r", a_request(range(64)), blocks, 64)
    assert saves.take_jobs() == [] and pool.held == 0, "the cache takes a block only with the blocks before it"


def saved_blocks(jobs: Sequence[SaveJob], group: int) -> list[int]:
    return [
        block for job in jobs if group in job.groups for block in range(job.first_block, job.first_block + job.blocks)
    ]


def finish(saves: SaveQueue, tokens: int, blocks: list[list[int]], prompt: int, forgotten: Sequence[int] = ()) -> None:
    """A request of which `prompt` tokens were asked has ended; of blocks that became null, some are forgotten."""
    ever = tables(tokens)

    def cached(group: int, number: int) -> int:
        return NO_BLOCK if number in forgotten else ever[group][number]

    saves.begin("r", SPECS[0], 0, prompt)
    saves.advance("r", a_request(range(tokens)), tables(tokens), prompt)
    saves.finish("r", a_request(range(tokens)), blocks, tokens, cached)


def test_of_a_window_the_ends_of_prompt_and_answer_are_saved_and_some_between() -> None:
    """A window of 24 tokens is 2 blocks of 16. With a point every 3 windows, lengths 6 and 12 are such."""
    saves = queue(pool := Pool(), WINDOWED, every=3)
    blocks = tables(400)
    blocks[1][:44] = [NO_BLOCK] * 44  # the answer's end begins with block 23, of 8 tokens each: 46 and 47 are there
    finish(saves, 400, blocks, prompt=15 * 16 + 1)
    jobs = saves.take_jobs()
    assert saved_blocks(jobs, 0) == list(range(25))
    assert saved_blocks(jobs, 1) == [4, 5, 10, 11, 13, 14, 23, 24]
    for job in jobs:
        saves.acknowledge(job.id, RANKS)
    assert pool.held == 0


def test_an_end_that_the_engine_has_in_part_is_not_saved() -> None:
    saves = queue(Pool(), WINDOWED, every=0)
    blocks = tables(160)
    blocks[1][:17] = [NO_BLOCK] * 17
    finish(saves, 160, blocks, prompt=65, forgotten=[16])
    assert saved_blocks(saves.take_jobs(), 1) == [2, 3], "the prompt's end"
    saves = queue(Pool(), WINDOWED, every=0)
    finish(saves, 160, blocks, prompt=65, forgotten=[15])
    assert saved_blocks(saves.take_jobs(), 1) == [2, 3, 8, 9], "block 16 is null and still in the engine's cache"


def test_where_a_prompt_left_others_its_window_is_saved() -> None:
    saves = queue(Pool(), WINDOWED, every=0)
    saves.begin("r", SPECS[0], 0, 161, branch_tokens=64)
    saves.advance("r", a_request(range(161)), tables(161), 161)
    assert saved_blocks(saves.take_jobs(), 1) == [2, 3, 8, 9]


def test_states_are_saved_where_the_engine_has_them_and_a_likely_prefix_ends() -> None:
    """What stands in the table of a group with states is not looked at: blocks there move."""
    saves = queue(pool := Pool(), WITH_STATES, every=3)
    request = a_request(range(200))
    blocks = [list(range(1, 13)), [90] * 12]
    saves.begin("r", SPECS[0], 32, 128)  # the prompt's end is at 7 blocks, and there is a point at 3 and at 6
    offered = [(1, 50 + blocks, 16 * blocks) for blocks in (1, 2, 3, 4, 6)]
    saves.advance("r", request, blocks, 96, [*offered, (1, 70, 40), (1, NO_BLOCK, 96), (5, 71, 96)])
    jobs = saves.take_jobs()
    assert saved_blocks(jobs, 0) == [2, 3, 4, 5]
    assert [(job.first_block, job.blocks, job.block_ids) for job in jobs if job.groups == (1,)] == [
        (2, 1, ((53,),)),
        (5, 1, ((56,),)),
    ]
    saves.advance("r", request, blocks, 112, [(1, 57, 112), (1, 58, 128)])
    assert saved_blocks(saves.take_jobs(), 1) == [6], "the state after block 7 comes before the block itself"
    saves.finish("r", request, blocks, 190, lambda group, number: 80 + number)
    jobs = saves.take_jobs()
    assert saved_blocks(jobs, 0) == [7, 8, 9, 10]
    assert [(job.first_block, job.block_ids) for job in jobs if job.groups == (1,)] == [(10, ((90,),))]
    for job in range(20):
        saves.acknowledge(job, RANKS)
    assert pool.held == 0


def test_an_end_is_not_saved_twice() -> None:
    """Nothing was generated that fills a block, or nothing at all was new."""
    saves = queue(Pool(), WINDOWED, every=0)
    finish(saves, 70, tables(70), prompt=65)
    assert saved_blocks(saves.take_jobs(), 1) == [2, 3]
    saves = queue(Pool(), WINDOWED, every=0)
    saves.begin("r", SPECS[0], 64, 65)
    saves.finish("r", a_request(range(70)), tables(70), 70, lambda group, number: NO_BLOCK)
    assert saves.take_jobs() == []


def test_a_save_with_the_window_is_not_left_to_one_without_it() -> None:
    saves = queue(pool := Pool(), WINDOWED)
    request, passed = a_request(range(16)), tables(16)
    passed[1][0] = NO_BLOCK
    saves.begin("late", SPECS[0], 0, 1000)
    saves.advance("late", request, passed, 16)
    saves.begin("early", SPECS[0], 0, 1000)
    saves.advance("early", request, tables(16, 100), 16)
    assert [job.groups for job in saves.take_jobs()] == [(0,), (1,)]
    assert pool.held == 4 + 2


def test_saving_waits_for_room_and_goes_on() -> None:
    saves = queue(pool := Pool(), ONE_GROUP, most_pinned=5)
    request, blocks = a_request(range(64)), tables(64)[:1]
    saves.begin("r", SPECS[0], 0, 1000)
    saves.advance("r", request, blocks, 64)
    (job,) = saves.take_jobs()
    assert job.blocks == 1 and pool.held == 4
    saves.acknowledge(job.id, 1)
    saves.advance("r", request, blocks, 64)
    assert [(job.first_block, job.blocks) for job in saves.take_jobs()] == [(1, 1)]


def test_of_two_requests_with_one_prompt_one_saves_it() -> None:
    saves = queue(pool := Pool())
    request = a_request(range(32))
    for name, start in (("a", 1), ("b", 100)):
        saves.begin(name, SPECS[0], 0, 1000)
        saves.advance(name, request, tables(32, start), 32)
    saves.begin("salted", SPECS[1], 0, 1000)
    saves.advance("salted", request, tables(32, 200), 32)
    first, salted = saves.take_jobs()
    assert (first.prefix.spec.salt, salted.prefix.spec.salt) == (b"", b"salt")
    assert not any(pool.references[block] for block in range(100, 108))
    saves.acknowledge(first.id, RANKS)
    saves.begin("later", SPECS[0], 0, 1000)
    saves.advance("later", request, tables(32, 300), 32)
    assert len(saves.take_jobs()) == 1, "once it has ended the next may try again: it may have been dropped"


def test_a_job_is_over_when_every_rank_has_ended_it() -> None:
    saves = queue(pool := Pool())
    saves.begin("r", SPECS[0], 0, 1000)
    saves.advance("r", a_request(range(16)), tables(16), 16)
    (job,) = saves.take_jobs()
    saves.stop("r")
    saves.acknowledge(job.id, 1)
    assert saves.under_way and pool.held == 6, "the request has ended, its blocks are still read"
    saves.acknowledge(job.id, 1)
    saves.acknowledge(job.id, 1)
    assert not saves.under_way and pool.held == 0


def test_blocks_are_given_back_from_the_end_of_the_prefix_on() -> None:
    """vLLM evicts what was freed first; without its first block the others would be of no use."""
    pool, freed = Pool(), list[int]()
    saves = SaveQueue(ONE_GROUP, pool.pin, freed.extend, HASH_TOKENS, 1000, NO_BLOCK)
    saves.begin("r", SPECS[0], 0, 1000)
    saves.advance("r", a_request(range(32)), tables(32)[:1], 32)
    (job,) = saves.take_jobs()
    saves.stop("r")
    saves.acknowledge(job.id, 1)
    assert freed == [8, 7, 6, 5, 4, 3, 2, 1]


def test_clearing_ends_every_request_and_no_job() -> None:
    saves = queue(pool := Pool())
    saves.begin("r", SPECS[0], 0, 1000)
    saves.advance("r", a_request(range(24)), tables(24), 24)
    saves.clear()
    (job,) = saves.take_jobs()
    assert pool.held == 6 and "r" not in saves
    saves.acknowledge(job.id, RANKS)
    assert pool.held == 0


def test_a_request_that_was_never_begun_is_nobodys_business() -> None:
    saves = queue(pool := Pool())
    saves.advance("r", a_request(range(16)), tables(16), 16)
    saves.stop("r")
    assert saves.take_jobs() == [] and pool.held == 0 and "r" not in saves
