"""What is asked about waiting prompts, what is leased for them, and that no lease is kept."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.base.rules.rules import SlidingWindow
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import ExhaustedError, MatchResult, NamespaceSpec, PartSpec, Tier, TierRun
from prefixd.integrations.engine.daemon_link import Link, LinkDown
from prefixd.integrations.engine.geometry import Geometry, Group
from prefixd.integrations.engine.waiting.prefix_lookups import _LEASES, Lookups
from prefixd.integrations.engine.waiting.seen_prefix import SeenPrefix
from prefixd_scheduler import CostModel, Distance, LookAhead
from tests.integrations.engine.conftest import DEADLINE_S, LOG, PATIENT_S
from tests.waiting import wait_until

BLOCK = 16
GEOMETRY = Geometry((Group(0, 4, 64),), block_tokens=BLOCK, unit_tokens=4, ranks=1, layout="test")
WINDOWED = Geometry(
    (Group(0, 4, 64), Group(1, 4, 64, SlidingWindow(20))), block_tokens=BLOCK, unit_tokens=4, ranks=1, layout="test"
)
SPEC = NamespaceSpec("model", BLOCK, (PartSpec("all", 0, 64),))


class Lease:
    """A lease that the test's daemon has granted."""

    def __init__(self, link: ScriptedLink, first_block: int, blocks: int, cached_blocks: int = 0) -> None:
        self.link = link
        self.first_block = first_block
        self.blocks = blocks
        self.cached_blocks = cached_blocks
        self.expires_s = link.now_s + 30.0
        self.lost = False

    @property
    def remaining_s(self) -> float:
        return 0.0 if self.lost else max(0.0, self.expires_s - self.link.now_s)


@dataclass
class Call:
    """A question that waits for the test's answer."""

    kind: str
    answer: Future[Any]
    first_block: int = 0
    max_blocks: int = 0
    work: Any = None


@dataclass
class ScriptedLink:
    """Stands for `Link`: nothing is answered before the test says what."""

    up: bool = True
    log: logging.Logger = LOG
    timeout_s: float = 1.0
    now_s: float = 1000.0
    calls: deque[Call] = field(default_factory=deque)
    granted: list[Lease] = field(default_factory=list)
    given_back: list[Lease] = field(default_factory=list)
    prefetched: list[int] = field(default_factory=list)
    answers_at_once: Callable[[Call], Any] | None = None
    slice_of: int = 1000

    def slice_blocks(self, block_bytes: int) -> int:
        return self.slice_of

    def limit_s(self, nbytes: int) -> float:
        return self.timeout_s

    def start(self, work: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float | None = None) -> Future[Any]:
        call = Call(work.__name__, Future(), work=work)
        if not self.up:
            call.answer.set_exception(LinkDown("away"))
            return call.answer
        names = zip(work.__code__.co_freevars, work.__closure__ or (), strict=False)
        asked = {name: cell.cell_contents for name, cell in names if name in ("first_block", "max_blocks")}
        call.first_block, call.max_blocks = asked.get("first_block", 0), asked.get("max_blocks", 0)
        self.calls.append(call)
        if self.answers_at_once is not None:
            self.answer(self.answers_at_once(call))
        return call.answer

    def give_back(self, lease: Lease) -> None:
        self.given_back.append(lease)

    def pending(self, kind: str) -> int:
        return sum(call.kind == kind for call in self.calls)

    def answer(self, value: Any, index: int = 0) -> None:
        """Answers a question: with blocks, or with an error."""
        call = self.calls[index]
        del self.calls[index]
        if not call.answer.set_running_or_notify_cancel():
            return  # the SDK gives back what comes to a caller that has gone
        if isinstance(value, Exception):
            call.answer.set_exception(value)
        elif call.kind == "acquire":
            blocks, cached_blocks = value if isinstance(value, tuple) else (value, 0)
            self.granted.append(Lease(self, call.first_block, blocks, cached_blocks))
            call.answer.set_result(self.granted[-1])
        elif call.kind == "match_prefix":
            tiers = [Distance.CPU] * value if isinstance(value, int) else value
            call.answer.set_result(SeenPrefix.of(tiers, BLOCK))
        else:
            call.answer.set_result(value)

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def link() -> ScriptedLink:
    return ScriptedLink()


def lookups_over(
    link: ScriptedLink,
    prefetch: int = 4,
    cost: CostModel | None = None,
    geometry: Geometry = GEOMETRY,
    unleased_s: float = 0.0,
) -> Lookups:
    look_ahead = LookAhead(cost or CostModel(), link.clock, prefetch)
    return Lookups(cast(Link, link), geometry, look_ahead, cost, link.clock, unleased_s)


@pytest.fixture
def lookups(link: ScriptedLink) -> Lookups:
    return lookups_over(link)


def logged(caplog: pytest.LogCaptureFixture) -> int:
    """Lines of the connector; event loops of other tests may have something to say too."""
    return sum(record.name == LOG.name for record in caplog.records)


def added(lookups: Lookups, link: ScriptedLink, seen_blocks: int, name: str = "r", tokens: int = 100) -> None:
    lookups.add(name, SPEC, list(range(tokens)))
    link.answer(seen_blocks)


# -- questions ------------------------------------------------------------------------------------------------------


def test_the_engine_is_told_to_ask_again_while_answers_are_under_way(lookups: Lookups, link: ScriptedLink) -> None:
    lookups.add("r", SPEC, list(range(100)))
    assert lookups.seen("r") is None
    assert lookups.loadable_tokens("r", 0, 96) is None
    link.answer(5)
    assert lookups.loadable_tokens("r", 0, 96) is None, "the lease is asked for"
    assert link.pending("acquire") == 1
    assert lookups.loadable_tokens("r", 0, 96) is None and len(link.calls) == 1, "once"
    link.answer(5)
    assert lookups.loadable_tokens("r", 0, 96) == 80
    assert lookups.seen("r") == SeenPrefix(80, ((Distance.CPU, 80),))
    assert lookups.sources("r", 16, 64) == {Distance.CPU: 64}


def test_what_was_in_memory_a_moment_ago_is_loaded_without_a_lease_of_its_turn(link: ScriptedLink) -> None:
    lookups = lookups_over(link, unleased_s=0.05)
    added(lookups, link, 5)
    assert lookups.loadable_tokens("r", 16, 72) == 56 and not link.calls
    lookups.end_partial_lease("r")
    lookups.refuse("r")
    assert link.granted == []


def test_what_is_farther_away_or_was_seen_longer_ago_is_leased(link: ScriptedLink) -> None:
    lookups = lookups_over(link, unleased_s=0.05)
    lookups.add("disk", SPEC, list(range(100)))
    link.answer([Distance.CPU, Distance.DISK])
    assert lookups.loadable_tokens("disk", 0, 96) is None and link.pending("acquire") == 1
    link.answer(2)
    added(lookups, link, 5)
    lookups.prepare("r", 0, 96)
    assert link.pending("acquire") == 1, "ahead of its turn it is leased: nobody knows when that comes"
    link.answer(5)
    added(lookups, link, 5, "late")
    link.now_s += 0.06
    assert lookups.loadable_tokens("late", 0, 96) is None and link.pending("acquire") == 1
    windowed = lookups_over(link, geometry=WINDOWED, unleased_s=0.05)
    added(windowed, link, 5, "w")
    assert windowed.loadable_tokens("w", 0, 96) is None, "with windows a load that lacks a block is lost as a whole"


def test_what_was_prepared_is_there_at_its_turn(lookups: Lookups, link: ScriptedLink) -> None:
    added(lookups, link, 5)
    lookups.patience_s = 60.0  # not used
    for _ in range(2):
        lookups.prepare("r", 16, 96)
    assert [call.first_block for call in link.calls] == [1]
    link.answer(4)
    assert lookups.loadable_tokens("r", 16, 96) == 64
    assert len(link.granted) == 1


def test_who_is_prepared_takes_no_lease_from_whose_turn_it_is(lookups: Lookups, link: ScriptedLink) -> None:
    names = [f"r{number}" for number in range(_LEASES)]
    for name in [*names, "first"]:
        added(lookups, link, 5, name)
    for name in names:
        lookups.prepare(name, 0, 96)
    assert link.pending("acquire") == _LEASES // 2
    assert lookups.loadable_tokens("first", 0, 96) is None
    link.answer(5, index=-1)
    assert lookups.loadable_tokens("first", 0, 96) == 80


@pytest.mark.parametrize(
    ("leased", "local", "most", "hit"),
    [
        (5, 0, 96, 80),
        (5, 16, 96, 64),
        (4, 24, 96, 56),  # the lease begins with the block of which vLLM has the first half: blocks 1 to 4
        (5, 0, 72, 72),
        (3, 0, 96, 48),  # less than was seen
    ],
)
def test_what_can_be_loaded_beyond_the_engines_own(
    lookups: Lookups, link: ScriptedLink, leased: int, local: int, most: int, hit: int
) -> None:
    added(lookups, link, 5)
    lookups.loadable_tokens("r", local, most)
    assert link.calls[0].first_block == local // BLOCK
    link.answer(leased - local // BLOCK if leased == 5 else leased)
    assert lookups.loadable_tokens("r", local, most) == hit


@pytest.mark.parametrize(("local", "most"), [(80, 96), (96, 96), (64, 64), (84, 96)])
def test_nothing_is_leased_that_the_engine_has_or_cannot_use(
    lookups: Lookups, link: ScriptedLink, local: int, most: int
) -> None:
    added(lookups, link, 5)
    assert lookups.loadable_tokens("r", local, most) == 0
    assert not link.calls


def test_when_the_engine_has_lost_some_of_its_own_it_is_leased_anew(lookups: Lookups, link: ScriptedLink) -> None:
    added(lookups, link, 5)
    lookups.loadable_tokens("r", 48, 96)
    link.answer(2)
    assert lookups.loadable_tokens("r", 48, 96) == 32
    assert lookups.loadable_tokens("r", 16, 96) is None
    assert link.given_back == link.granted
    assert lookups.loadable_tokens("r", 16, 96) is None
    assert link.calls[0].first_block == 1
    link.answer(4)
    assert lookups.loadable_tokens("r", 16, 96) == 64
    assert lookups.loadable_tokens("r", 32, 96) == 48, "and when vLLM has more now, it needs less"


def test_a_prompt_shorter_than_a_block_is_not_asked_about(lookups: Lookups, link: ScriptedLink) -> None:
    lookups.add("r", SPEC, list(range(BLOCK - 1)))
    assert not link.calls and lookups.loadable_tokens("r", 0, 0) == 0 and lookups.seen("r") == SeenPrefix(0)


def test_an_old_answer_is_asked_for_again(lookups: Lookups, link: ScriptedLink) -> None:
    added(lookups, link, 1)
    assert lookups.seen("r") == SeenPrefix(16, ((Distance.CPU, 16),)) and not link.calls
    link.now_s += 2
    assert lookups.seen("r") == SeenPrefix(16, ((Distance.CPU, 16),)), "the last answer, meanwhile"
    assert link.pending("match_prefix") == 1
    link.answer(3)
    assert lookups.seen("r") == SeenPrefix(48, ((Distance.CPU, 48),))


def test_what_is_not_known_is_nothing(lookups: Lookups, link: ScriptedLink) -> None:
    assert lookups.loadable_tokens("nobody", 0, 100) == 0 and lookups.seen("nobody") is None
    assert lookups.sources("nobody", 0, 10) == {Distance.CPU: 10}
    for end in (lookups.refuse, lookups.note_failed_load, lookups.forget):
        end("nobody")
    lookups.note_preempted("nobody", [1])
    assert not link.calls and "nobody" not in lookups


# -- patience -------------------------------------------------------------------------------------------------------


class WaitedFor(Future[Any]):
    """An answer that does not come; waiting for it takes the whole time that is offered."""

    def __init__(self, link: ScriptedLink, offered: list[float]) -> None:
        super().__init__()
        self.link, self.offered = link, offered

    def exception(self, timeout: float | None = None) -> BaseException | None:
        assert timeout is not None, "without an end"
        self.offered.append(timeout)
        self.link.now_s += timeout
        raise TimeoutError


def test_a_step_waits_no_longer_than_its_patience_for_all_requests_together(
    lookups: Lookups, link: ScriptedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[float] = []
    monkeypatch.setattr(link, "start", lambda work, timeout_s=None: WaitedFor(link, offered))
    for name in "abc":
        lookups.add(name, SPEC, list(range(100)))
    lookups.patience_s = 0.25
    began_s = link.now_s
    assert [lookups.loadable_tokens(name, 0, 96) for name in "abc"] == [None, None, None]
    assert offered == [0.25] and link.now_s == began_s + 0.25
    lookups.patience_s = 0.5
    assert lookups.loadable_tokens("c", 0, 96) is None and offered[-1] == 0.5


def test_an_answer_that_takes_long_holds_up_one_step_and_not_every_step(
    lookups: Lookups, link: ScriptedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[float] = []
    monkeypatch.setattr(link, "start", lambda work, timeout_s=None: WaitedFor(link, offered))
    lookups.add("r", SPEC, list(range(100)))
    for lookups.idle, waits in ((False, 1), (False, 1), (True, 2), (True, 3), (False, 3)):
        lookups.patience_s = 0.25
        assert lookups.loadable_tokens("r", 0, 96) is None
        assert len(offered) == waits


def test_an_answer_that_comes_in_time_is_used_in_the_same_step(lookups: Lookups, link: ScriptedLink) -> None:
    link.answers_at_once = lambda call: 5
    lookups.add("r", SPEC, list(range(100)))
    assert lookups.loadable_tokens("r", 0, 96) == 80


# -- leases ---------------------------------------------------------------------------------------------------------


def leased(lookups: Lookups, link: ScriptedLink, name: str = "r") -> None:
    added(lookups, link, 5, name)
    assert lookups.loadable_tokens(name, 0, 96) is None
    link.answer(5)
    assert lookups.loadable_tokens(name, 0, 96) == 80


@pytest.mark.parametrize("how", ["forget", "refuse", "note_failed_load", "clear", "add"])
def test_however_a_lease_ends_it_is_given_back(lookups: Lookups, link: ScriptedLink, how: str) -> None:
    leased(lookups, link)
    if how == "clear":
        lookups.clear()
    elif how == "add":
        lookups.add("r", SPEC, [1])
    else:
        getattr(lookups, how)("r")
    assert link.given_back == link.granted and lookups._leases == 0


def test_a_lease_that_is_granted_when_nobody_wants_it_any_more_is_given_back(
    lookups: Lookups, link: ScriptedLink
) -> None:
    added(lookups, link, 5)
    lookups.loadable_tokens("r", 0, 96)
    lookups.forget("r")
    assert lookups._leases == 0
    link.answer(5)
    assert len(link.granted) == 1 and link.given_back == link.granted


def test_a_lease_that_would_not_last_a_load_is_got_anew(lookups: Lookups, link: ScriptedLink) -> None:
    leased(lookups, link)
    link.now_s += 16
    assert lookups.loadable_tokens("r", 0, 96) is None
    assert link.given_back == link.granted and link.pending("match_prefix") == 1
    link.answer(5)
    assert lookups.loadable_tokens("r", 0, 96) is None
    link.answer(5)
    assert lookups.loadable_tokens("r", 0, 96) == 80 and lookups._leases == 1


def test_no_more_leases_than_a_daemon_should_give_one_engine(lookups: Lookups, link: ScriptedLink) -> None:
    for index in range(_LEASES):
        leased(lookups, link, f"r{index}")
    added(lookups, link, 5, "late")
    assert lookups.loadable_tokens("late", 0, 96) is None and not link.calls
    lookups.refuse("r0")
    assert lookups.loadable_tokens("late", 0, 96) is None and link.pending("acquire") == 1


def test_a_prefix_that_is_gone_when_it_is_leased_is_no_hit(lookups: Lookups, link: ScriptedLink) -> None:
    added(lookups, link, 5)
    lookups.loadable_tokens("r", 0, 96)
    link.answer(0)
    assert lookups.loadable_tokens("r", 0, 96) == 0 and lookups._leases == 0
    assert lookups.loadable_tokens("r", 0, 96) == 0 and not link.calls, "and is not asked for in every step"


# -- prefixes longer than the daemon's memory -----------------------------------------------------------------------


def test_of_a_long_prefix_the_first_slice_is_leased_and_all_of_it_loaded(lookups: Lookups, link: ScriptedLink) -> None:
    link.slice_of = 2
    added(lookups, link, 6)
    lookups.loadable_tokens("r", 16, 96)
    assert (link.calls[0].first_block, link.calls[0].max_blocks) == (1, 2)
    link.answer((2, 6))
    assert lookups.loadable_tokens("r", 16, 96) == 80
    lookups.end_partial_lease("r")
    assert link.given_back == link.granted and lookups._leases == lookups._leased_blocks == 0


def test_a_lease_of_all_that_is_loaded_lasts_as_long_as_the_load(lookups: Lookups, link: ScriptedLink) -> None:
    added(lookups, link, 6)
    lookups.loadable_tokens("r", 0, 96)
    link.answer((6, 6))
    assert lookups.loadable_tokens("r", 0, 96) == 96
    lookups.end_partial_lease("r")
    assert not link.given_back
    lookups.refuse("r")
    assert link.given_back == link.granted


def test_what_is_not_cached_any_more_is_not_said_to_be_loaded(lookups: Lookups, link: ScriptedLink) -> None:
    link.slice_of = 2
    added(lookups, link, 6)
    lookups.loadable_tokens("r", 0, 96)
    link.answer((2, 4))
    assert lookups.loadable_tokens("r", 0, 96) == 64


def test_where_there_is_no_room_it_is_looked_for_again_and_after_a_second_all_is_computed(
    lookups: Lookups, link: ScriptedLink
) -> None:
    added(lookups, link, 6)
    answers: set[int | None] = set()
    asked = 0
    while link.now_s < 1001.5:
        answers.add(lookups.loadable_tokens("r", 0, 96))
        while link.calls:
            asked += 1
            link.answer((0, 6))
        link.now_s += 0.005
    assert answers == {None, 0}
    assert 10 < asked < 60, "not in every step"
    assert lookups.loadable_tokens("r", 0, 96) == 0 and lookups._leases == lookups._leased_blocks == 0


def test_where_room_comes_it_is_used(lookups: Lookups, link: ScriptedLink) -> None:
    added(lookups, link, 6)
    lookups.loadable_tokens("r", 0, 96)
    link.answer((0, 6))
    assert lookups.loadable_tokens("r", 0, 96) is None
    link.now_s += 0.1
    assert lookups.loadable_tokens("r", 0, 96) is None
    link.answer((6, 6))
    assert lookups.loadable_tokens("r", 0, 96) == 96


def test_of_a_prefix_that_has_become_shorter_it_is_asked_again_how_long_it_is(
    lookups: Lookups, link: ScriptedLink
) -> None:
    added(lookups, link, 6)
    lookups.loadable_tokens("r", 0, 96)
    link.answer((0, 3))
    assert lookups.loadable_tokens("r", 0, 96) is None
    assert lookups.loadable_tokens("r", 0, 96) is None and link.pending("match_prefix") == 1
    link.answer(3)
    assert lookups.loadable_tokens("r", 0, 96) is None
    assert link.calls[0].max_blocks == 3


def test_leases_leave_room_for_loads(lookups: Lookups, link: ScriptedLink) -> None:
    link.slice_of = 5
    for number in range(6):
        added(lookups, link, 4, f"r{number}")
    for number in range(6):
        lookups.prepare(f"r{number}", 0, 96)
    assert link.pending("acquire") == 2, "of 4 blocks each, ahead of their turns"
    for number in range(6):
        lookups.loadable_tokens(f"r{number}", 0, 96)
    assert link.pending("acquire") == 3, "fewer than three slices of 5"


def test_what_is_loaded_counts_once(lookups: Lookups, link: ScriptedLink) -> None:
    added(lookups, link, 4)
    found = MatchResult(4, ())
    lookups._lookups["r"].found = found
    assert lookups.take_counted_match("r") is found
    assert lookups.take_counted_match("r") is None


@pytest.mark.parametrize("error", [LinkDown("away"), ExhaustedError("too many"), ZeroDivisionError("a defect")])
@pytest.mark.parametrize("kind", ["match_prefix", "acquire"])
def test_an_answer_that_is_an_error_is_no_hit_and_reaches_the_log_at_most(
    lookups: Lookups, link: ScriptedLink, caplog: pytest.LogCaptureFixture, error: Exception, kind: str
) -> None:
    if kind == "match_prefix":
        lookups.add("r", SPEC, list(range(100)))
    else:
        added(lookups, link, 5)
        lookups.loadable_tokens("r", 0, 96)
    link.answer(error)
    assert lookups.loadable_tokens("r", 0, 96) == 0
    assert lookups._leases == 0
    assert logged(caplog) == (not isinstance(error, LinkDown))


def test_a_daemon_that_refuses_is_quoted_once_a_minute(
    lookups: Lookups, link: ScriptedLink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(5):
        lookups.add("r", SPEC, list(range(100)))
        link.answer(ExhaustedError("too many"))
        lookups.seen("r")
    assert logged(caplog) == 1
    link.now_s += 61
    lookups.add("r", SPEC, list(range(100)))
    link.answer(ExhaustedError("too many"))
    lookups.seen("r")
    assert logged(caplog) == 2


def test_while_the_daemon_is_away_nothing_is_asked(lookups: Lookups, link: ScriptedLink) -> None:
    link.up = False
    lookups.add("r", SPEC, list(range(100)))
    assert lookups.loadable_tokens("r", 0, 96) == 0 and lookups.seen("r") is None and not link.calls
    link.up = True
    assert lookups.loadable_tokens("r", 0, 96) is None and link.pending("match_prefix") == 1


def test_a_preempted_request_looks_again_and_one_whose_load_failed_does_not(
    lookups: Lookups, link: ScriptedLink
) -> None:
    for name in ("preempted", "failed"):
        leased(lookups, link, name)
    lookups.refuse("preempted")  # it has what was to be had
    lookups.note_failed_load("failed")
    assert lookups.loadable_tokens("preempted", 0, 112) == 0
    for name in ("preempted", "failed"):
        lookups.note_preempted(name, list(range(120)))
    assert lookups.loadable_tokens("failed", 0, 112) == 0 and not link.calls
    assert lookups.loadable_tokens("preempted", 0, 112) is None
    link.answer(7)
    assert lookups.loadable_tokens("preempted", 0, 112) is None
    link.answer(7)
    assert lookups.loadable_tokens("preempted", 0, 112) == 112, "of more tokens by now"


def test_what_is_slower_to_load_than_to_compute_is_not_loaded(link: ScriptedLink) -> None:
    cost = CostModel()
    cost.observe_compute(1000, 0.001)
    cost.observe_load(Distance.CPU, 64, 10.0)
    lookups = lookups_over(link, cost=cost)
    added(lookups, link, 5)
    assert lookups.loadable_tokens("r", 0, 96) == 0 and not link.calls
    assert lookups.loadable_tokens("r", 0, 96) == 0, "for good: it is being computed"
    quick = lookups_over(link, cost=CostModel())
    added(quick, link, 5)
    assert quick.loadable_tokens("r", 0, 96) is None and link.pending("acquire") == 1


C, D = Distance.CPU, Distance.DISK


def learned(block_s: float, *, cpu_s: float = 0.01, disk_s: float) -> CostModel:
    """What computing a block takes, and loading one from CPU memory and from disk."""
    cost, nbytes = CostModel(), GEOMETRY.nbytes(1)
    for blocks in (1, 8):
        cost.observe_compute(BLOCK * blocks, block_s * blocks)
        cost.observe_load(C, nbytes * blocks, cpu_s * blocks)
        cost.observe_load(D, nbytes * blocks, disk_s * blocks)
    return cost


def test_the_near_part_is_loaded_and_the_part_on_a_slow_disk_computed(link: ScriptedLink) -> None:
    lookups = lookups_over(link, cost=learned(1.0, disk_s=3.0))
    lookups.add("r", SPEC, list(range(6 * BLOCK + 1)))
    link.answer([C, C, D, D, D, D])
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None
    assert (link.calls[0].kind, link.calls[0].first_block, link.calls[0].max_blocks) == ("acquire", 0, 2)
    link.answer(2)
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) == 2 * BLOCK


def test_what_the_engine_has_is_not_loaded_and_counts_no_bytes(link: ScriptedLink) -> None:
    lookups = lookups_over(link, cost=learned(1.0, disk_s=0.9))
    lookups.add("r", SPEC, list(range(6 * BLOCK + 1)))
    link.answer([C, C, D, D, D, D])
    assert lookups.loadable_tokens("r", 3 * BLOCK, 6 * BLOCK) is None
    assert (link.calls[0].first_block, link.calls[0].max_blocks) == (3, 3)


def test_a_lease_that_takes_longer_than_computing_is_given_up_and_what_came_is_loaded(link: ScriptedLink) -> None:
    lookups = lookups_over(link, cost=learned(1.0, disk_s=0.5))
    lookups.add("r", SPEC, list(range(6 * BLOCK + 1)))
    link.answer([C, C, D, D, D, D])
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None and link.pending("acquire") == 1
    link.now_s += 4 * 0.5 + 0.1 * 6 - 0.1  # the load was to take so long, and may take a tenth of computing all longer
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None and lookups.abandoned == 0
    link.now_s += 0.2
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None and lookups.abandoned == 1
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None and link.pending("match_prefix") == 1
    link.answer([C, C, C, D, D, D], index=1)  # one has come since
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None
    assert link.calls[1].max_blocks == 3
    link.answer(6, index=0)
    assert link.given_back == link.granted, "the lease that was given up"
    link.answer(3)
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) == 3 * BLOCK
    assert lookups.waited_s("r") == pytest.approx(2.7)
    lookups.forget("r")
    assert lookups.waited_s("r") is None and lookups._leases == 0


def test_a_lease_ahead_of_its_turn_is_not_late_before_that(link: ScriptedLink) -> None:
    lookups = lookups_over(link, cost=learned(1.0, disk_s=0.5))
    lookups.add("r", SPEC, list(range(6 * BLOCK + 1)))
    link.answer([C, C, D, D, D, D])
    lookups.prepare("r", 0, 6 * BLOCK)
    assert link.pending("acquire") == 1
    link.now_s += 100.0
    lookups.prepare("r", 0, 6 * BLOCK)
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None and lookups.abandoned == 0, "somebody waits from now on"
    link.now_s += 4 * 0.5 + 0.1 * 6 + 0.1
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None and lookups.abandoned == 1


def test_with_windows_a_lease_that_is_given_up_leaves_nothing_to_load(link: ScriptedLink) -> None:
    """A shorter prefix would need other bytes."""
    lookups = lookups_over(link, cost=learned(1.0, disk_s=0.5), geometry=WINDOWED)
    lookups.add("r", SPEC, list(range(6 * BLOCK + 1)))
    link.answer([C, D, D, D])
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None and link.calls[0].max_blocks == 4
    link.now_s += 100.0
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None and lookups.abandoned == 1
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) is None
    link.answer([C, C, D, D], index=1)
    assert lookups.loadable_tokens("r", 0, 6 * BLOCK) == 0


Step = tuple[str, int, int]
OFTEN = ["hit", "answer"] * 3
WHAT = [
    "add",
    *OFTEN,
    "error",
    "refuse",
    "note_failed_load",
    "forget",
    "again",
    "seen",
    "later",
    "lose",
    "away",
    "back",
    "clear",
]
STEPS = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 3), st.integers(0, 6)), max_size=60)


@given(STEPS)
def test_every_lease_that_was_granted_is_given_back(steps: list[Step]) -> None:
    """After any sequence of calls and answers, once every request has ended."""
    link = ScriptedLink()
    lookups = lookups_over(link, prefetch=2, cost=learned(1.0, disk_s=0.5))
    for what, which, number in steps:
        name = f"r{which}"
        if what == "add":
            lookups.add(name, SPEC, list(range(10 + 30 * number)))
        elif what == "hit":
            found = lookups.loadable_tokens(name, 8 * number, 16 * which + 64)
            assert found is None or 0 <= found <= 16 * which + 64
        elif what in ("answer", "error") and link.calls:
            index = which % len(link.calls)
            value: Any = [C, D] * number if number % 2 and link.calls[index].kind == "match_prefix" else number
            link.answer(LinkDown("?") if what == "error" else value, index)
        elif what in ("refuse", "note_failed_load", "forget"):
            getattr(lookups, what)(name)
        elif what == "again":
            lookups.note_preempted(name, list(range(200)))
        elif what == "seen":
            lookups.seen(name)
        elif what == "later":
            link.now_s += 6 * number
        elif what == "lose" and link.granted:
            link.granted[-1].lost = True
        elif what in ("away", "back"):
            link.up = what == "back"
        elif what == "clear":
            lookups.clear()
        having = [(each.lease is not None) + (each.leasing is not None) for each in lookups._lookups.values()]
        assert lookups._leases == sum(having)
        assert 0 <= lookups._leases <= 4
        assert len(lookups._ahead) <= 2
    for name in [f"r{which}" for which in range(4)]:
        lookups.forget(name)
    while link.calls:
        link.answer(1)
    assert lookups._leases == 0
    assert not lookups._ahead and not lookups._line
    left = [lease for lease in link.granted if lease.blocks and link.given_back.count(lease) != 1]
    assert not left, "given back, and once"


# -- ahead of their turn --------------------------------------------------------------------------------------------


def test_so_many_are_brought_up_ahead_and_the_next_in_line_gets_its_turn(link: ScriptedLink) -> None:
    lookups = lookups_over(link, prefetch=2)
    for name in "abcd":
        added(lookups, link, 1, name)
    assert lookups._ahead == {"a", "b"}
    lookups.refuse("a")
    assert lookups._ahead == {"b", "c"} and [call.kind for call in link.calls] == ["prefetch"]
    lookups.forget("d")
    lookups.forget("b")
    assert lookups._ahead == {"c"} and not lookups._line


def test_who_is_in_line_while_his_answer_is_under_way_gets_his_turn_too(link: ScriptedLink) -> None:
    lookups = lookups_over(link, prefetch=1)
    lookups.add("a", SPEC, list(range(100)))
    lookups.add("b", SPEC, list(range(100)))
    lookups.forget("a")
    assert lookups._ahead == {"b"} and link.calls[-1].kind == "prefetch"


def test_without_prefetch_nobody_stands_in_line(link: ScriptedLink) -> None:
    lookups = lookups_over(link, prefetch=0)
    for name in "ab":
        added(lookups, link, 1, name)
    assert not lookups._ahead and not lookups._line


class Cache:
    """What the questions themselves ask of the SDK."""

    def __init__(self, tiers: list[Tier]) -> None:
        self.runs = [TierRun(tier, 1) for tier in tiers]
        self.prefetches = 0
        self.counted: list[bool] = []

    async def match(self, tokens: Any, *, counted: bool) -> MatchResult:
        self.counted.append(counted)
        return MatchResult(len(self.runs), tuple(self.runs))

    async def prefetch(self, tokens: Any) -> int:
        self.prefetches += 1
        return 1


@pytest.mark.parametrize(
    ("tiers", "prefetch", "prefetches"),
    [([Tier.CPU, Tier.DISK], 1, 1), ([Tier.CPU, Tier.GPU], 1, 0), ([Tier.CPU, Tier.DISK], 0, 0)],
)
async def test_what_is_on_disk_is_brought_up(
    link: ScriptedLink, tiers: list[Tier], prefetch: int, prefetches: int
) -> None:
    lookups, cache = lookups_over(link, prefetch), Cache(tiers)

    async def registered(spec: NamespaceSpec) -> Cache:
        assert spec == SPEC
        return cache

    link.cache = registered  # type: ignore[attr-defined]
    lookups.add("r", SPEC, list(range(100)))
    seen = await link.calls[0].work()
    assert seen.tokens == 32 and cache.prefetches == prefetches
    assert seen.distance(0) is (Distance.DISK if Tier.DISK in tiers else Distance.CPU)


async def test_a_prompt_is_counted_once_however_often_it_is_asked_about(link: ScriptedLink) -> None:
    """By its first question: renewals, the lease and a preemption are the same prompt again."""
    lookups, cache = lookups_over(link), Cache([Tier.CPU] * 5)
    acquired: list[bool] = []

    async def registered(spec: NamespaceSpec) -> Any:
        return cache

    async def acquire(tokens: Any, *, counted: bool, **how: Any) -> None:
        acquired.append(counted)

    cache.acquire = acquire  # type: ignore[attr-defined]
    link.cache = registered  # type: ignore[attr-defined]
    lookups.add("r", SPEC, list(range(100)))
    await link.calls[0].work()
    link.answer(5)
    lookups.seen("r")
    link.now_s += 5.0
    lookups.seen("r")
    await link.calls[0].work()
    link.answer(5)
    assert lookups.loadable_tokens("r", 0, 96) is None
    await link.calls[0].work()
    link.answer(5)
    lookups.refuse("r")
    lookups.note_preempted("r", list(range(120)))
    lookups.seen("r")
    await link.calls[0].work()
    assert cache.counted == [True, False, False] and acquired == [False]


# -- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "asked"), [(100, 96), (97, 96), (96, 80), (17, 16), (16, 0)])
def test_with_windows_the_daemon_is_asked_about_what_can_be_loaded(link: ScriptedLink, tokens: int, asked: int) -> None:
    """A lease of all 96 tokens of a prompt would lack window bytes that its first 95 need, and one token has to be
    computed."""
    lookups = lookups_over(link, geometry=WINDOWED)
    lookups.add("r", SPEC, list(range(tokens)))
    assert len(lookups._lookups["r"].tokens) == asked == WINDOWED.most_loadable(tokens)
    assert link.pending("match_prefix") == bool(asked)
    lookups.note_preempted("r", list(range(tokens + BLOCK)))
    assert len(lookups._lookups["r"].tokens) == asked + BLOCK, "after a preemption there are more tokens to be had"


def test_without_windows_all_of_a_prompt_is_asked_about(link: ScriptedLink) -> None:
    lookups = lookups_over(link)
    lookups.add("r", SPEC, list(range(96)))
    assert len(lookups._lookups["r"].tokens) == 96 and GEOMETRY.most_loadable(96) == 92


def test_bytes_of_a_load_are_those_of_the_window_where_a_group_has_one() -> None:
    assert GEOMETRY.nbytes(10) == 10 * 64
    assert [WINDOWED.nbytes(blocks) for blocks in (1, 2, 10)] == [2 * 64, 4 * 64, 10 * 64 + 2 * 64]


# -- and with a real daemon -----------------------------------------------------------------------------------------


def test_with_a_real_daemon(daemon: DaemonProcess) -> None:
    link = Link(daemon.address, "test", PATIENT_S, LOG)
    wait_until(lambda: link.up)
    spec = NamespaceSpec("real lookups", BLOCK, (PartSpec("all", 0, 64),))

    async def store() -> None:
        await (await link.cache(spec)).store(list(range(80)), bytes(5 * 64))

    async def leases() -> int:
        return sum(session.leases for session in (await link._client.stats()).sessions)

    link.start(store).result(DEADLINE_S)
    lookups = Lookups(link, GEOMETRY, LookAhead(CostModel(), time.monotonic, 4), CostModel())
    lookups.patience_s = DEADLINE_S
    lookups.add("r", spec, list(range(100)))
    assert lookups.loadable_tokens("r", 24, 96) == 56
    assert lookups.seen("r") == SeenPrefix(80, ((Distance.CPU, 80),))
    assert link.start(leases).result(DEADLINE_S) == 1
    lookups.refuse("r")
    wait_until(lambda: link.start(leases).result(DEADLINE_S) == 0)
    lookups.note_preempted("r", list(range(100)))
    lookups.patience_s = DEADLINE_S
    assert lookups.loadable_tokens("r", 0, 96) == 80
    lookups.add("gone", spec, list(range(100)))
    lookups.loadable_tokens("gone", 0, 96)
    lookups.clear()
    wait_until(lambda: link.start(leases).result(DEADLINE_S) == 0)
    assert lookups._leases == 0
    link.close()


def test_a_lease_that_is_late_teaches_what_it_would_have_brought(link: ScriptedLink) -> None:
    """Of the rest of the prefix, which the engine has itself, it says nothing."""
    cost = learned(1.0, disk_s=0.5)
    lookups = lookups_over(link, cost=cost)
    lookups.add("r", SPEC, list(range(100 * BLOCK + 1)))
    link.answer([D] * 100)
    assert lookups.loadable_tokens("r", 98 * BLOCK, 100 * BLOCK) is None
    link.now_s += 2.0
    assert lookups.loadable_tokens("r", 98 * BLOCK, 100 * BLOCK) is None and lookups.abandoned == 1
    estimated_s = cost.load_s(GEOMETRY.nbytes(100), D)
    assert estimated_s is not None and estimated_s >= 50.0
