"""FastestPrefixFirstScheduler step by step: vLLM's own scheduler, caches and queues, with no model behind them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from prefixd.base.errors import ConfigError
from prefixd.integrations.engine.waiting.arrival_times import FRONT_END_S
from prefixd.integrations.engine.waiting.seen_prefix import NOTHING_SEEN, SeenPrefix
from prefixd.integrations.vllm import FastestPrefixFirstScheduler
from prefixd.integrations.vllm.options import ConnectorOptions
from prefixd_scheduler import Distance
from tests.vllm.schedulers import BLOCK, SHAPE, computed, make_config, make_scheduler
from tests.vllm.served import make_prompt

OURS = "prefixd.integrations.vllm.FastestPrefixFirstScheduler"


class Stub(KVConnectorBase_V1):
    """Says of a prompt what the test says, and has nothing to load."""

    requires_kv_delivery = False

    def __init__(self, seen: dict[str, SeenPrefix], options: ConnectorOptions) -> None:
        self.seen = seen
        self.options = options
        self.late: set[str] = set()
        self.most_prepared = 0
        self.prepared: list[tuple[str, int]] = []

    def seen_prefix(self, request_id: str) -> SeenPrefix | None:
        return self.seen.get(request_id)

    def prepared_requests(self) -> int:
        return self.most_prepared

    def prepare(self, request: Request, local_tokens: int) -> None:
        self.prepared.append((request.request_id, local_tokens))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (None if request.request_id in self.late else 0), False

    def update_state_after_alloc(self, *args: Any) -> None: ...

    def build_connector_meta(self, *args: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, *args: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, *args: Any) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def shutdown(self) -> None: ...
    def has_pending_push_work(self) -> bool:
        return False


class Drive:
    """A scheduler and the model's part, which is to say 7 whenever a token is due."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.began: list[str] = []
        self._pending: list[Any] = []
        self._clock = 0.0

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 1,
        priority: int = 0,
        deadline_s: object = None,
        arrival_time: float | None = None,
    ) -> Request:
        self._clock += 1e-3
        stamp_s = self._clock if arrival_time is None else arrival_time
        extra = None if deadline_s is None else {"deadline_s": deadline_s}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra)
        request = Request(
            name, prompt, sampling, None, arrival_time=stamp_s, priority=priority, block_hasher=self.hasher
        )
        self.scheduler.add_request(request)
        return request

    def step(self, *, lag: int = 0) -> list[str]:
        """The requests of one step, those that begin in it last; with `lag` outputs come that many steps later."""
        output = self.scheduler.schedule()
        self.began += [new.req_id for new in output.scheduled_new_reqs if new.req_id not in self.began]
        if output.num_scheduled_tokens:
            self._pending.append((output, computed(self.scheduler, output)))
        while len(self._pending) > (lag if output.num_scheduled_tokens else 0):
            self.scheduler.update_from_output(*self._pending.pop(0))
        return list(output.num_scheduled_tokens)

    def run(self, *, lag: int = 0) -> str:
        """Until nothing is left; the requests in the order in which they began."""
        for _ in range(1000):
            if not self.scheduler.requests:
                return "".join(self.began)
            self.step(lag=lag)
        raise AssertionError(f"{list(self.scheduler.requests)} were never finished")


MakeDrive = Callable[..., Drive]


@pytest.fixture
def drive(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDrive]:
    """Makes one; arguments are those of vLLM, `seen` is what the connector says, `options` are the connector's."""
    init_none_hash(sha256)
    made: list[Any] = []

    def make(
        scheduler_cls: str | None = OURS,
        blocks: int = 400,
        seen: dict[str, SeenPrefix] | None = None,
        options: dict[str, object] | None = None,
        hybrid: bool = False,
        asynchronous: bool = False,
        **arguments: Any,
    ) -> Drive:
        arguments = {"max_num_seqs": 1, "scheduler_cls": scheduler_cls, **arguments}
        config = make_config(llama, asynchronous=asynchronous, blocks=blocks, **arguments)
        transfer = None
        if seen is not None or options is not None:
            transfer = KVTransferConfig(
                kv_connector="PrefixdConnector", kv_role="kv_both", kv_connector_extra_config=options or {}
            )
            stub = Stub(seen or {}, ConnectorOptions.parse(options))
            monkeypatch.setattr(KVConnectorFactory, "create_connector", lambda **_: stub)
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**SHAPE))]
        if hybrid:
            groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**SHAPE, sliding_window=2 * BLOCK)))
        scheduler = make_scheduler(config, groups, transfer=transfer)
        made.append(scheduler)
        return Drive(scheduler)

    yield make
    for scheduler in made:
        scheduler.shutdown()


def cpu(blocks: int) -> SeenPrefix:
    return SeenPrefix.of([Distance.CPU] * blocks, BLOCK)


def test_the_log_says_when_there_is_no_connector(
    drive: MakeDrive, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive()  # vLLM sets up its logging with the first
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("INFO", "vllm.prefixd"):
        caplog.clear()  # pytest hears a logger that does not propagate, where it is set up before the test
        drive(seen={}, options={"policy": "lpm", "starvation_bound_s": 9.0})
        assert "there is no PrefixdConnector" not in caplog.text and "in the order of lpm" in caplog.text
        drive()
    assert "there is no PrefixdConnector" in caplog.text


def test_what_vllm_itself_holds_goes_first(drive: MakeDrive) -> None:
    hot = make_prompt(1, 200)
    for scheduler_cls, order in ((None, "wabcde"), (OURS, "wcdabe")):
        engine = drive(scheduler_cls)
        engine.add("w", hot)
        engine.run()
        for name in "ab":
            engine.add(name, make_prompt(ord(name), 200))
        for name in "cd":
            engine.add(name, hot + make_prompt(ord(name), 20))
        engine.add("e", make_prompt(9, 200))
        assert engine.run() == order


def test_nearest_first_with_what_the_connector_says(drive: MakeDrive) -> None:
    seen = {"b": SeenPrefix.of([Distance.DISK] * 4, BLOCK), "c": cpu(4), "e": cpu(9)}
    engine = drive(seen=seen, options={"policy": "fpf"})
    for name in "abcde":
        engine.add(name, make_prompt(ord(name), 200))
    assert engine.run() == "ecbad"


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", "abcd"),
        ("fpf", "dabc"),
        ("relaxed-fpf", "dabc"),
        ("lpm", "dabc"),
        ("shortest-ready", "dabc"),
        ("deadline", "abcd"),
    ],
)
def test_the_policy_is_an_option(drive: MakeDrive, policy: str, order: str) -> None:
    engine = drive(seen={"d": cpu(4)}, options={"policy": policy})
    for name in "abcd":
        engine.add(name, make_prompt(ord(name), 100))
    assert engine.run() == order


def test_what_is_cached_is_looked_at_again_in_turn(drive: MakeDrive) -> None:
    seen: dict[str, SeenPrefix] = dict.fromkeys("abcdefgh", NOTHING_SEEN)
    engine = drive(seen=seen, options={"look_ahead": 2, "policy": "fpf"})
    for name in "abcdefgh":
        engine.add(name, make_prompt(ord(name), 100))
    seen["h"] = cpu(4)
    assert engine.run() == "abchdefg", "a step looks at the next one, and at two others in turn"


def test_a_deadline_comes_with_the_request(drive: MakeDrive) -> None:
    engine = drive(options={"policy": "deadline"})
    for name, due in zip("abcde", (None, 9, "2.5", "soon", 2**64 - 1), strict=True):
        engine.add(name, make_prompt(ord(name), 100), deadline_s=due)
    assert engine.run() == "cbead"


def test_leases_are_got_ahead_of_the_turn(drive: MakeDrive) -> None:
    """A long prompt in chunks leaves vLLM no tokens in a step: it does not ask about others until that is done."""
    seen = {name: cpu(4) for name in "cdef"}
    engine = drive(seen=seen, max_num_seqs=2, max_num_batched_tokens=64)
    engine.scheduler.connector.most_prepared = 3
    engine.add("a", make_prompt(1, 200))
    engine.step()
    for name in "bcdef":
        engine.add(name, make_prompt(ord(name), 200))
    engine.step()
    assert engine.began == ["a"]
    assert engine.scheduler.connector.prepared == [("c", 0), ("d", 0), ("e", 0)]


def test_a_connector_that_has_not_answered_yet_holds_up_nobody(drive: MakeDrive) -> None:
    engine = drive(seen={"c": cpu(4)})
    engine.scheduler.connector.late = {"c"}
    for name in "abc":
        engine.add(name, make_prompt(ord(name), 100))
    engine.step()
    assert engine.began == ["a"]
    engine.scheduler.connector.late = set()
    assert engine.run() == "acb"


def test_a_grammar_that_is_not_ready_holds_up_nobody(drive: MakeDrive) -> None:
    engine = drive(seen={"c": cpu(4)})
    for name in "ab":
        engine.add(name, make_prompt(ord(name), 100))
    late = engine.add("c", make_prompt(3, 100))
    late.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.step()
    assert engine.began == ["a"]
    assert [r.request_id for r in engine.scheduler.waiting] == ["c", "b"], "it was the first, and passed over"
    late.status = RequestStatus.WAITING
    assert engine.run() == "acb"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted_requests_stay_in_front(drive: MakeDrive, asynchronous: bool) -> None:
    """Two requests outgrow the blocks and the younger is preempted, while one with a near prefix waits behind it."""
    engine = drive(blocks=14, seen={}, options={"policy": "fpf"}, max_num_seqs=2, asynchronous=asynchronous)
    lag = 1 if asynchronous else 0
    first = engine.add("a", make_prompt(1, 64), max_tokens=60)
    second = engine.add("b", make_prompt(2, 64), max_tokens=60)
    second.skip_reading_prefix_cache = True  # or its own blocks, left behind, would make it the nearest
    engine.step(lag=lag)
    engine.scheduler.connector.seen["c"] = cpu(2)
    third = engine.add("c", make_prompt(3, 40))
    while second.status == RequestStatus.RUNNING:
        engine.step(lag=lag)
    assert second.status == RequestStatus.PREEMPTED
    assert [r.request_id for r in engine.scheduler.waiting] == ["b", "c"]
    while not first.is_finished():
        engine.step(lag=lag)
        assert third.status == RequestStatus.WAITING, "it may not pass one that was begun"
    engine.run(lag=lag)
    assert second.num_preemptions >= 1
    assert len(first.output_token_ids) == len(second.output_token_ids) == 60


@pytest.mark.parametrize(
    ("scheduling", "order"), [("priority", "gfedcab"), ("fcfs", "cegabdf")], ids=["priority", "fcfs"]
)
def test_priorities_mean_what_they_mean_in_vllm(drive: MakeDrive, scheduling: str, order: str) -> None:
    engine = drive(seen={name: cpu(4) for name in "ceg"}, options={"policy": "fpf"}, scheduling_policy=scheduling)
    for name, priority in zip("abcdefg", (2, 2, 2, 1, 1, 0, 0), strict=True):
        engine.add(name, make_prompt(ord(name), 100), priority=priority)
    assert engine.run() == order


def test_a_preempted_request_does_not_pass_a_class_above_it(drive: MakeDrive) -> None:
    engine = drive(blocks=14, seen={}, scheduling_policy="priority", max_num_seqs=2)
    engine.add("a", make_prompt(1, 64), max_tokens=60, priority=0)
    low = engine.add("b", make_prompt(2, 64), max_tokens=60, priority=5)
    engine.step()
    while low.status == RequestStatus.RUNNING:
        engine.step()
    engine.add("c", make_prompt(3, 20), priority=1)
    engine.add("d", make_prompt(4, 20), priority=5)
    engine.step()
    assert "c" in engine.began and "d" not in engine.began
    assert engine.run() == "abcd"


def test_the_choice_of_asynchronous_scheduling_stays_vllms(drive: MakeDrive) -> None:
    for asynchronous in (False, True):
        ours = drive(asynchronous=asynchronous).scheduler
        vllms = drive(None, asynchronous=asynchronous).scheduler
        assert isinstance(ours, FastestPrefixFirstScheduler)
        assert isinstance(ours, AsyncScheduler) is isinstance(vllms, AsyncScheduler) is asynchronous


@pytest.mark.parametrize("lag", [0, 1])
def test_every_request_is_served_once_whatever_comes_and_goes(drive: MakeDrive, lag: int) -> None:
    rng = random.Random(lag)
    seen: dict[str, SeenPrefix] = {}
    engine = drive(blocks=16, seen=seen, options={"look_ahead": 5}, max_num_seqs=3, asynchronous=bool(lag))
    alive: dict[str, Request] = {}
    aborted = set()
    for number in range(120):
        name = f"{number}."
        if rng.random() < 0.5:
            seen[name] = cpu(rng.randrange(1, 4))
        shared = make_prompt(rng.randrange(3), 48)
        alive[name] = engine.add(name, shared + make_prompt(number, rng.randrange(1, 60)), rng.randrange(1, 30))
        for _ in range(rng.randrange(4)):
            engine.step(lag=lag)
        if rng.random() < 0.1:
            victim = rng.choice(sorted(alive))
            if not alive[victim].is_finished():
                engine.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
                aborted.add(victim)
        waiting = [r.request_id for r in engine.scheduler.waiting]
        assert len(set(waiting)) == len(waiting)
    engine.run(lag=lag)
    assert sum(r.num_preemptions for r in alive.values()) > 0
    for name, request in alive.items():
        assert name in aborted or len(request.output_token_ids) == request.max_tokens
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 15


def test_asking_leaves_no_trace(drive: MakeDrive) -> None:
    engine = drive(max_num_seqs=1)
    hot = make_prompt(1, 640)
    engine.add("w", hot)
    engine.run()
    manager = engine.scheduler.kv_cache_manager
    manager.make_prefix_cache_stats()
    free = [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]
    engine.add("a", hot)
    engine.add("b", make_prompt(2, 640))
    order = engine.scheduler._order
    order.refresh(1.0, 1)
    assert [r.request_id for r in engine.scheduler.waiting] == ["a", "b"]
    held = {known.request.request_id: known.local_tokens for known in order._known.values()}
    assert held == {"a": 624, "b": 0}, "the last token of a prompt is always computed"
    assert [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()] == free
    assert manager.make_prefix_cache_stats().requests == 0


def test_what_vllm_holds_agrees_with_its_own_look_up(drive: MakeDrive) -> None:
    engine = drive(blocks=60)
    rng = random.Random(5)
    prompts = [make_prompt(seed, 300) for seed in range(4)]
    for number in range(40):
        prompt = rng.choice(prompts)[: rng.randrange(20, 300)] + make_prompt(100 + number, rng.randrange(1, 100))
        engine.add(f"{number}.", prompt)
        engine.run()
        probe = Request("p", rng.choice(prompts), SamplingParams(), None, block_hasher=engine.hasher)
        manager = engine.scheduler.kv_cache_manager
        _, exact, _ = manager.get_computed_blocks(probe)
        for last in (0, exact, 160):
            assert engine.scheduler._local.tokens(probe, last) == exact


def test_a_window_that_is_gone_means_nothing_held(drive: MakeDrive) -> None:
    engine = drive(hybrid=True)
    hot = make_prompt(1, 320)
    engine.add("w", hot)
    engine.run()
    scheduler = engine.scheduler
    probe = Request("p", hot, SamplingParams(), None, block_hasher=engine.hasher)
    held = scheduler._local.tokens(probe)
    assert held == scheduler.kv_cache_manager.get_computed_blocks(probe)[1] == 304
    window = scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    pool = window.block_pool
    gone = pool.get_cached_block(probe.block_hashes[held // BLOCK - 1], [window.kv_cache_group_id])
    pool.evict_blocks({gone[0].block_id})
    assert scheduler._local.tokens(probe, held) == 0


def test_a_request_that_may_not_read_caches_has_no_prefix(drive: MakeDrive) -> None:
    engine = drive(seen={"b": cpu(4), "c": cpu(4)}, options={"policy": "fpf"})
    hot = make_prompt(1, 200)
    engine.add("w", hot)
    engine.run()
    engine.add("a", make_prompt(2, 200))
    engine.add("b", hot).skip_reading_prefix_cache = True
    engine.add("c", make_prompt(3, 200))
    assert engine.run() == "wcab"


def test_a_wrong_option_is_one_line(drive: MakeDrive) -> None:
    with pytest.raises(ConfigError, match=r"look_ahead = 0"):
        drive(options={"look_ahead": 0})
    with pytest.raises(ConfigError, match=r"fcfs starves nobody; leave starvation_bound_s out"):
        drive(options={"policy": "fcfs", "starvation_bound_s": 3})
    with pytest.raises(ConfigError, match=r"policy = 'sjf'"):
        drive(options={"policy": "sjf"})


def test_waits_are_measured(drive: MakeDrive) -> None:
    engine = drive()
    for name in "abc":
        engine.add(name, make_prompt(ord(name), 100))
    engine.run()
    waits = engine.scheduler.waits
    assert waits.most == 3 and FRONT_END_S < waits.longest_s < FRONT_END_S + 100 and 0 < waits.slowest_s < 100


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0, -30 * 86400.0, 30 * 86400.0])
def test_steps_of_the_wall_clock_change_neither_order_nor_promise(
    drive: MakeDrive, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """An old request with nothing cached goes before a young one whose prefix is near, whatever time they say it is."""
    now_s, ahead_s = 1000.0, 0.0
    monkeypatch.setattr(FastestPrefixFirstScheduler, "clock", staticmethod(lambda: now_s))
    monkeypatch.setattr(FastestPrefixFirstScheduler, "wall", staticmethod(lambda: 1.7e9 + now_s + ahead_s))
    engine = drive(seen={"b": cpu(4)}, options={"policy": "relaxed-fpf"})

    def add(name: str) -> None:
        engine.add(name, make_prompt(ord(name), 100), arrival_time=engine.scheduler.wall())

    add("a")
    engine.scheduler.waits.waiting(1, now_s)
    now_s += 10
    ahead_s = step_s
    add("b")
    now_s += 1
    assert engine.run() == "ab"
    waits = engine.scheduler.waits
    assert waits.longest_s == 11 and waits.slowest_s == 11 and waits.longest_s <= waits.bound_s
