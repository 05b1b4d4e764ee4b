"""Whatever happens the size keeps its bounds; it follows the load, does not flap, and two tiers share one device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.serving.models.elastic_size import HOLD_S, Bounds, Decision, ElasticSize, Load, Why

TICK_S = 0.25


@dataclass
class Device:
    """The frames that a device has in all, of which tiers take some."""

    frames: int
    taken: dict[str, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.frames - sum(self.taken.values())


@dataclass
class Daemon:
    """Runs jobs of `width` frames each, which last about `job_s`, `places` at a time; nothing is cached."""

    name: str
    device: Device
    size: ElasticSize
    width: int = 10
    job_s: float = 2.0
    places: int = 0
    ends: list[float] = field(default_factory=list)
    done: int = 0
    changes: int = 0
    lasting: int | None = None

    @property
    def frames(self) -> int:
        return self.device.taken[self.name]

    def run_jobs(self, now_s: float, random: random.Random) -> None:
        before = len(self.ends)
        self.ends = [end for end in self.ends if end > now_s]
        self.done += before - len(self.ends)
        while len(self.ends) < self.places and (len(self.ends) + 1) * self.width <= min(
            self.frames, self.frames if self.lasting is None else self.lasting
        ):
            self.ends.append(now_s + self.job_s * random.uniform(0.5, 1.5))
        if self.lasting is not None:
            self.device.taken[self.name] = max(min(self.lasting, self.frames), len(self.ends) * self.width)

    def look(self) -> Load:
        held, lacks = len(self.ends) * self.width, len(self.ends) < self.places
        return Load(
            size=self.frames,
            held=held,
            required=held + self.width if lacks else 0,
            useful=0,
            free=self.device.free,
            taken=self.device.frames - self.device.free,
            busy=bool(self.places or self.ends),
        )

    def act(self, now_s: float, load: Load) -> None:
        """Takes what it decides on, unless others took it since the look."""
        decided = self.size.decide(now_s, load)
        self.lasting = None
        if decided.frames > self.frames:
            allowed = self.frames + self.device.free - self.size.bounds.least_free
            self.device.taken[self.name] = max(self.frames, min(decided.frames, allowed))
            if decided.frames > allowed:
                self.size.refused(now_s)
        elif decided.frames < self.frames:
            self.lasting = decided.frames
        self.changes += decided.frames != load.size
        assert self.device.free >= 0


def two(frames: int, least: int, most: int, reserve: int) -> tuple[Device, Daemon, Daemon]:
    device = Device(frames, {"a": least, "b": least})
    bounds = Bounds(least, most, reserve, idle_s=3.0)
    a, b = (Daemon(name, device, ElasticSize(bounds, 0.0)) for name in "ab")
    return device, a, b


def run(daemons: Sequence[Daemon], begin_s: float, seconds: float, seed: int = 0, *, together: bool = False) -> float:
    """Jobs end and begin at any time; each daemon looks every quarter of a second. `together`: all at one moment."""
    source, steps = random.Random(seed), 10
    for step in range(round(seconds / TICK_S * steps)):
        now_s = begin_s + step * TICK_S / steps
        for daemon in daemons:
            daemon.run_jobs(now_s, source)
        looking = [each for number, each in enumerate(daemons) if step % steps == (0 if together else 3 * number)]
        for daemon, load in [(each, each.look()) for each in looking]:
            daemon.act(now_s, load)
            daemon.run_jobs(now_s, source)
    return begin_s + seconds


LOADS = st.lists(
    st.tuples(
        st.floats(0.01, 4.0),  # seconds since the last look
        st.integers(0, 300),  # held
        st.integers(0, 300),  # required
        st.integers(0, 300),  # useful
        st.integers(0, 300),  # free for others and this one
        st.booleans(),
        st.integers(0, 60),  # coming
        st.sampled_from([0, 0, 5, 100]),  # begins
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(
    least=st.integers(1, 50),
    above=st.integers(0, 200),
    reserve=st.integers(0, 80),
    idle_s=st.floats(0.1, 5.0),
    loads=LOADS,
)
def test_the_size_keeps_its_bounds_and_does_not_flap(
    least: int, above: int, reserve: int, idle_s: float, loads: list[tuple[float, int, int, int, int, bool, int, int]]
) -> None:
    """Each decision against the rules that it may be seen to follow; the tier gets there at once."""
    bounds = Bounds(least, least + above, reserve, idle_s)
    size, frames, now_s = ElasticSize(bounds, 0.0), least, 0.0
    busy_s, grown_s, comfort, giving_back = 0.0, -9.0, -(-reserve * 5 // 4), False
    for passed_s, held, required, useful, free, busy, coming, begins in loads:
        now_s += passed_s
        held = min(held, frames)
        busy_s = now_s if busy else busy_s
        giving_back = free < (comfort if giving_back else reserve)
        decided = size.decide(now_s, Load(frames, held, required, useful, free, 300 - free, busy, coming, begins))
        change = decided.frames - frames
        assert bounds.least <= decided.frames <= bounds.most and (decided.why is None) == (change == 0)
        if change > 0:
            assert frames < max(required, useful), "only where frames are lacking"
            assert decided.frames <= max(required, useful, frames + bounds.step), "no more than these and a step"
            left = free - coming - change
            assert left >= reserve // 2
            assert left >= comfort or (required > frames and (free - coming >= reserve or not held))
            grown_s = now_s
        if decided.why is Why.IDLE:
            assert now_s - busy_s >= idle_s and decided.frames == max(least, held)
        elif change < 0:
            assert decided.why is Why.RESERVE and free < comfort and now_s - grown_s >= HOLD_S
            assert decided.frames >= begins
            assert giving_back, "it begins below the reserve"
            assert -change <= max(comfort - free + 1, (frames - held) / 4) or (required > frames and not held)
        frames = decided.frames


@settings(max_examples=40)
@given(least=st.integers(1, 50), above=st.integers(0, 200), wanted=st.integers(0, 300), for_requests=st.booleans())
def test_a_device_with_memory_enough_gives_all_at_once_and_an_idle_tier_its_least(
    least: int, above: int, wanted: int, for_requests: bool
) -> None:
    bounds = Bounds(least, least + above, 10, idle_s=3.0)
    size = ElasticSize(bounds, 0.0)
    required, useful = (wanted, 0) if for_requests else (0, wanted)
    decided = size.decide(1.0, Load(least, 0, required, useful, 10_000, 0, True))
    assert decided.frames >= min(wanted, bounds.most)
    idle = Load(decided.frames, 0, 0, 0, 10_000, 0, False)
    assert size.decide(3.9, idle) == Decision(decided.frames)
    assert size.decide(4.0, idle).frames == least
    again = size.decide(4.1, Load(least, 0, least + 5, 0, 10_000, 0, True))
    assert again.frames >= min(least + 5, bounds.most), "at once, though it has just shrunk"


def test_where_nothing_runs_a_request_may_have_half_of_a_reserve_that_is_broken() -> None:
    size = ElasticSize(Bounds(10, 100, 20, 3.0), 0.0)
    assert size.decide(1.0, Load(10, 5, 30, 0, 15, 85, True)).frames == 10, "others run: it waits for their end"
    assert size.decide(1.1, Load(10, 0, 30, 0, 15, 85, True)).frames == 15


def test_memory_goes_to_whoever_has_requests() -> None:
    device, a, b = two(100, least=10, most=80, reserve=8)
    a.places = 8
    now_s = run([a, b], 0.0, 5.0)
    assert (a.frames, b.frames) == (80, 10)
    a.places, b.places = 0, 8
    now_s = run([a, b], now_s, 4.0)  # its last jobs end; it is not idle yet
    assert a.frames <= 40 and b.frames >= 50
    now_s = run([a, b], now_s, 4.0)
    assert (a.frames, b.frames) == (10, 80)
    b.places = 0
    run([a, b], now_s, 7.0)
    assert (a.frames, b.frames, device.free) == (10, 10, 80)


@pytest.mark.parametrize(("job_s", "together"), [(2.0, False), (8.0, False), (2.0, True)])
def test_two_with_more_requests_than_memory_have_half_each(job_s: float, together: bool) -> None:
    _, a, b = two(400, least=20, most=380, reserve=32)
    a.job_s = b.job_s = job_s
    a.places = 100
    now_s = run([a, b], 0.0, 10.0)
    assert a.frames >= 330 and b.frames == 20
    b.places = 100
    now_s = run([a, b], now_s, 30.0)
    shares, done = [], (a.done, b.done)
    for _ in range(120):
        now_s = run([a, b], now_s, 1.0, seed=round(now_s), together=together)
        shares.append(a.frames / (a.frames + b.frames))
    assert 0.4 < sum(shares) / len(shares) < 0.6
    assert min(a.done - done[0], b.done - done[1]) > max(a.done - done[0], b.done - done[1]) * 2 / 3


def test_of_four_beside_the_weights_of_models_none_is_left_out() -> None:
    device, *_ = two(500, least=10, most=380, reserve=32)
    device.taken = {**dict.fromkeys("abcd", 10), "weights": 100}
    bounds = Bounds(10, 380, 32, idle_s=3.0)
    four = [Daemon(name, device, ElasticSize(bounds, 0.0), places=100) for name in "abcd"]
    run(four, 0.0, 120.0)
    assert min(each.done for each in four) > max(each.done for each in four) / 2


def test_two_whose_next_requests_both_need_most_of_the_device_run_one_after_the_other() -> None:
    _, a, b = two(100, least=10, most=80, reserve=8)
    for each in (a, b):
        each.width, each.places = 60, 1
    run([a, b], 0.0, 60.0)
    assert min(a.done, b.done) > 2


def test_a_tier_alone_seldom_takes_from_a_reserve_that_nobody_gives_back() -> None:
    device, a, b = two(120, least=10, most=200, reserve=16)
    a.places = 20
    run([a, b], 0.0, 20.0)
    before = a.changes
    run([a, b], 20.0, 100.0)
    assert a.changes - before < 60 and device.free >= 8
