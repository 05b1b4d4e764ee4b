"""A request's states: every transition from every state is either in the table below or refused."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from prefixd.base.sampling import Sampling
from prefixd.cache import NONE
from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Ended
from prefixd.serving.request.states import IllegalTransitionError, RequestState
from prefixd.serving.request.worker_run import Run
from prefixd_scheduler import QueuedRequest

ROWS = np.array([4, 7, 9])
GENERATIONS = np.arange(100, 110, dtype=np.int32)
END = Ended("length")

# state: {transition: next state}
TABLE: dict[str, dict[str, str]] = {
    "NEW": {"enqueue": "WAITING"},
    "WAITING": {"stage": "STAGING", "end": "ENDED"},
    "STAGING": {"staged": "READY", "unstage": "WAITING", "withdraw": "WITHDRAWN"},
    "READY": {"hand_over": "RUNNING", "unstage": "WAITING", "end": "ENDED"},
    "RUNNING": {
        "starve": "STARVED",
        "preempt": "PREEMPTING",
        "cancel": "CANCELLING",
        "put_back": "WAITING",
        "end": "ENDED",
        "withdraw": "WITHDRAWN",
    },
    "STARVED": {
        "extend": "RUNNING",
        "preempt": "PREEMPTING",
        "cancel": "CANCELLING",
        "put_back": "WAITING",
        "end": "ENDED",
        "withdraw": "WITHDRAWN",
    },
    "PREEMPTING": {"cancel": "CANCELLING", "put_back": "WAITING", "end": "ENDED", "withdraw": "WITHDRAWN"},
    "CANCELLING": {"end": "ENDED", "withdraw": "WITHDRAWN"},
    "WITHDRAWN": {"let_go": "ENDED"},
    "ENDED": {},
}
WAYS: dict[str, list[str]] = {
    "NEW": [],
    "WAITING": ["enqueue"],
    "STAGING": ["enqueue", "stage"],
    "READY": ["enqueue", "stage", "staged"],
    "RUNNING": ["enqueue", "stage", "staged", "hand_over"],
    "STARVED": ["enqueue", "stage", "staged", "hand_over", "starve"],
    "PREEMPTING": ["enqueue", "stage", "staged", "hand_over", "preempt"],
    "CANCELLING": ["enqueue", "stage", "staged", "hand_over", "cancel"],
    "WITHDRAWN": ["enqueue", "stage", "withdraw"],
    "ENDED": ["enqueue", "end"],
}
TRANSITIONS = sorted({transition for row in TABLE.values() for transition in row})


class FakeFootprint:
    """Records what is done with it."""

    def __init__(self) -> None:
        self.hold = SimpleNamespace(rows=ROWS, wanted=None)
        self.done: list[object] = []

    def yield_frames(self) -> None:
        self.done.append("yields")

    def claim_frames(self, own: list[int]) -> None:
        self.done.append(("claims", own))

    def extend(self, own: list[int]) -> None:
        self.done.append(("extends", own))

    def end(self) -> None:
        self.done.append("ended")


def request_in(state: str) -> tuple[Request, FakeFootprint]:
    trie = SimpleNamespace(generation=GENERATIONS, block_tokens=4)
    request = Request(
        id=1,
        name="r1",
        namespace=cast(Any, None),
        trie=cast(Any, trie),
        chain=cast(Any, None),
        prompt_tokens=9,
        sampling=Sampling(max_tokens=1),
        queued=QueuedRequest(1, 0.0, 9),
    )
    footprint = FakeFootprint()
    for transition in WAYS[state]:
        act(request, transition, footprint)
    assert request.state is RequestState[state]
    return request, footprint


def act(request: Request, transition: str, footprint: FakeFootprint) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "stage": (footprint,),
        "hand_over": (Run([1, 2], computes=2, recording=True), [2]),
        "extend": ([5],),
        "cancel": (END,),
        "end": (END,),
        "withdraw": (END,),
    }
    getattr(request, transition)(*arguments.get(transition, ()))


def test_the_table_has_every_state_and_every_transition() -> None:
    assert list(TABLE) == [state.name for state in RequestState]
    methods = {name for name, _ in inspect.getmembers(Request, inspect.isfunction) if not name.startswith("_")}
    no_transitions = {
        "append",
        "arrived",
        "count_use",
        "enter_phase",
        "uncut",
        "next_uncut",
        "tiers_at_arrival",
        "usable",
    }
    assert methods - no_transitions == set(TRANSITIONS)


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("state", TABLE)
def test_a_transition_is_in_the_table_or_refused(state: str, transition: str) -> None:
    request, footprint = request_in(state)
    before = list(footprint.done)
    events = request.events.qsize()
    following = TABLE[state].get(transition)
    if following is None:
        with pytest.raises(IllegalTransitionError, match=f"`{transition}` of request r1 while it is {state}; only"):
            act(request, transition, footprint)
        assert request.state is RequestState[state]
        assert (footprint.done, request.events.qsize()) == (before, events)
        return
    act(request, transition, footprint)
    assert request.state is RequestState[following]
    # A footprint is there exactly in the states that have one, and it is ended once, when the last of these is left.
    has = following not in ("NEW", "WAITING", "ENDED")
    had = state not in ("NEW", "WAITING", "ENDED")
    assert footprint.done.count("ended") == int(had and not has)
    assert request.events.qsize() == events + int(transition in ("end", "withdraw"))
    if has:
        assert request.footprint is cast(Any, footprint)
    else:
        with pytest.raises(IllegalTransitionError, match=f"no footprint while it is {following}"):
            _ = request.footprint
    if following in ("RUNNING", "STARVED", "PREEMPTING", "CANCELLING"):
        assert request.on_worker and request.run.computes == 2
    elif not has:
        with pytest.raises(IllegalTransitionError, match=f"no run while it is {following}"):
            _ = request.run


def test_what_it_held_is_what_it_has_found() -> None:
    request, footprint = request_in("READY")
    assert footprint.done == ["yields"]
    assert not len(request.found)
    request.seen_epoch = 7
    request.unstage()
    assert request.rows is request.found is ROWS
    assert request.generations.tolist() == [104, 107, 109]
    assert request.seen_epoch == -1, "what was held longer than anybody looked has to be looked at"


def test_frames_reach_the_run_and_the_footprint() -> None:
    request, footprint = request_in("STARVED")
    request.extend([5])
    assert request.run.frames == [1, 2, 5]
    assert footprint.done == ["yields", ("claims", [2]), ("extends", [5])]


def test_a_cancelled_request_knows_its_last_event() -> None:
    request, _ = request_in("CANCELLING")
    assert request.outcome is END
    assert request_in("RUNNING")[0].outcome == Ended("cancelled")


def test_tiers_at_arrival_are_those_of_then_and_of_what_is_new_those_of_now() -> None:
    """Against a model, block by block, for any lengths and a slice from any block on."""
    draw = np.random.default_rng(7)
    for _ in range(300):
        request, _ = request_in("NEW")
        request.arrival_tiers = draw.integers(0, NONE + 1, draw.integers(0, 9)).astype(np.int8)
        now, first = draw.integers(0, NONE, draw.integers(0, 9)).astype(np.int8), int(draw.integers(0, 9))
        then = dict(enumerate(request.arrival_tiers.tolist()))
        expected = [
            tier if then.get(first + at, NONE) == NONE else then[first + at] for at, tier in enumerate(now.tolist())
        ]
        assert request.tiers_at_arrival(now, first).tolist() == expected
