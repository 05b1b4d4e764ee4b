"""`prefixd top` at 80 x 24: what it shows, its keys, and a daemon that goes and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from textual.pilot import Pilot

from prefixd.cli.failures import CommandFailed
from prefixd.cli.top.daemon_watch import Snapshot
from prefixd.cli.top.panes import Rates, short
from prefixd.cli.top.top_app import TopApp
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import cache_pb2
from tests.waiting import until

REQUESTS = [
    pb.RequestInfo(
        id=f"request-{n}-of-a-long-name",
        tenant="acme",
        prompt_tokens=4000,
        used=[pb.TierTokens(tier=3, tokens=1000)],
        first_token_s=0.25,
        outcome="stop",
        cause="not_cached",
    )
    for n in range(32)
]
READY = pb.WorkerStats.STATE_READY


def stats(uptime_s: float = 7300.0, **fields: object) -> pb.StatsResponse:
    """A busy daemon with all tiers, of large sizes."""
    tiers = [
        pb.TierStats(
            tier=tier,
            capacity_bytes=size,
            used_bytes=size * 3 // 4,
            blocks=1_234_567,
            hit_tokens=1_000_000 * tier,
            promoted_blocks=500_000,
            evicted_blocks=123_456,
        )
        for tier, size in ((1, 999 << 30), (2, 1999 << 30), (3, 199 << 40))
    ]
    worker = pb.WorkerStats(state=READY, running_requests=32)
    queue = pb.SchedulerStats(
        policy="fpf", waiting_requests=128, finished_requests=98_765, load_decisions=40_000, load_regret_s=12.5
    )
    made = pb.StatsResponse(
        version="0.1.0",
        uptime_s=uptime_s,
        tiers=tiers,
        asked_tokens=8_000_000,
        hit_tokens=6_000_000,
        worker=worker,
        scheduler=queue,
        models=[pb.ModelStats(name="llama-3", namespace="f00", worker=worker, scheduler=queue, held_bytes=1 << 30)],
        sessions=[pb.SessionStats(client_name=f"engine-{n}", tenant="acme", pid=4000 + n, leases=n) for n in range(40)],
        namespaces=[
            pb.NamespaceStats(namespace=cache_pb2.Namespace(name="f00", block_tokens=16), tenant="acme", blocks=77)
        ],
        tenants=[
            pb.TenantStats(
                name="acme",
                tiers=[pb.TenantTierUse(tier=tier, used_bytes=512 << 30) for tier in (1, 2, 3)],
                refused={"calls": 3},
            )
        ],
    )
    made.MergeFrom(pb.StatsResponse(**fields))  # type: ignore[arg-type]
    return made


class Screen:
    """The app on a screen of 80 x 24, and the answers that a test gives it."""

    def __init__(self) -> None:
        self._answers: asyncio.Queue[Snapshot | CommandFailed] = asyncio.Queue()
        self._at_s = 0.0
        self.app = TopApp(self._follow())
        self.pilot: Pilot[None]

    async def _follow(self) -> AsyncIterator[Snapshot | CommandFailed]:
        while True:
            yield await self._answers.get()

    def answer(self, answer: pb.StatsResponse | CommandFailed) -> None:
        self._at_s += 2.0
        self._answers.put_nowait(
            Snapshot(answer, self._at_s, REQUESTS) if isinstance(answer, pb.StatsResponse) else answer
        )

    @property
    def lines(self) -> list[str]:
        return [strip.text.rstrip() for strip in self.app.screen._compositor.render_strips()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def shows(self, *words: str) -> None:
        await until(lambda: all(word in self.text for word in words))


@pytest.fixture
async def run() -> AsyncIterator[Callable[..., object]]:
    """Runs a test's steps on a screen: a fixture would leave the app's context before its end."""

    async def go(steps: Callable[[Screen], object]) -> None:
        screen = Screen()
        async with screen.app.run_test(size=(80, 24)) as pilot:
            screen.pilot = pilot
            await steps(screen)  # type: ignore[misc]

    yield go


Run = Callable[..., Callable[..., None]]


async def test_everything_fits_on_a_small_screen(run: Run) -> None:
    async def steps(screen: Screen) -> None:
        screen.answer(stats())
        await screen.shows("gpu ", "acme", "lost", "Quit")
        lines = screen.lines
        assert len(lines) == 24 and all(len(line) <= 80 for line in lines)
        assert lines[0] == "prefixd 0.1.0 up for 2:01:40  75% of 8.0M prompt tokens found since the start"
        gpu = next(line for line in lines if line.startswith("gpu"))
        assert (
            gpu.split()[0] == "gpu"
            and "█" in gpu
            and gpu.split()[2:]
            == [
                *("75%", "749.2", "GiB", "of", "999.0", "GiB", "1.2M", "12%", "500k", "123k"),
            ]
        )
        assert "running 32  waiting 128  finished 98.8k  sessions 40" in screen.text
        assert "loads 40.0k" in screen.text and "lost 12.5 s" in screen.text
        assert lines[-1].split()[:2] == ["q", "Quit"] and "Namespaces" in lines[-1] and "Pause" in lines[-1]

    await run(steps)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("pane", "words"),
    [
        ("requests", ("request-0-of-a-lo… acme", "4000   25% 250 ms stop    not cached")),
        ("tenants", ("refused", "acme", "512.0 GiB")),
        ("models", ("llama-3", "ready", "98.8k")),
        ("sessions", ("engine-39", "4039")),
        ("namespaces", ("llama-3", "block tokens", "77")),
    ],
)
async def test_each_key_shows_its_table(run: Run, pane: str, words: tuple[str, ...]) -> None:
    async def steps(screen: Screen) -> None:
        screen.answer(stats())
        await screen.pilot.press(pane[0])
        await screen.shows(*words)

    await run(steps)  # type: ignore[misc]


async def test_hits_are_those_of_the_last_hour(run: Run) -> None:
    async def steps(screen: Screen) -> None:
        total = pb.PeriodFigures(asked_tokens=1000, hit_tokens=[100, 200, 600, 0])
        screen.answer(stats(period=pb.Period(seconds=3600, total=total)))
        await screen.shows("90% of 1000 prompt tokens found (last 60 min)", " 10% ", " 20% ", " 60% ")
        shares = {line.split()[0]: line for line in screen.lines if line.startswith(("gpu", "cpu", "disk"))}
        assert all(f" {share} " in shares[tier] for tier, share in (("gpu", "10%"), ("cpu", "20%"), ("disk", "60%")))

    await run(steps)  # type: ignore[misc]


async def test_a_long_table_scrolls_by_keys(run: Run) -> None:
    async def steps(screen: Screen) -> None:
        screen.answer(stats())
        await screen.pilot.press("s")
        await screen.shows("engine-30")
        assert "engine-0" not in screen.text
        await screen.pilot.press("end")
        await screen.shows("engine-0")

    await run(steps)  # type: ignore[misc]


async def test_counters_become_rates_until_another_daemon_answers(run: Run) -> None:
    async def steps(screen: Screen) -> None:
        screen.answer(stats())
        await screen.shows("500k")
        later = stats(7302.0)
        later.tiers[0].promoted_blocks += 25
        screen.answer(later)
        await screen.shows("12/s")
        screen.answer(stats(1.0))
        await screen.shows("up for 1.0 s", "500k")

    await run(steps)  # type: ignore[misc]


async def test_degraded_parts_come_first(run: Run) -> None:
    async def steps(screen: Screen) -> None:
        trouble = [
            pb.Trouble(part=f"part {n}", what="it is \x1b[2J full", remedy="do this", since_s=5) for n in range(5)
        ]
        screen.answer(stats(troubles=trouble))
        await screen.shows("part 0, for 5.0 s: it is \\x1b[2J full; do this", "and 2 more: prefixd stats")
        order = [screen.text.index(word) for word in ("prefixd 0.1.0", "part 0", "part 2", "tier", "acme")]
        assert order == sorted(order) and len(screen.lines) == 24

    await run(steps)  # type: ignore[misc]


async def test_a_daemon_that_goes_and_comes_back(run: Run) -> None:
    async def steps(screen: Screen) -> None:
        await screen.shows("prefixd: asks the daemon")
        screen.answer(CommandFailed("unix:/x: no daemon listens there. Is it running?"))
        await screen.shows("no daemon: unix:/x: no daemon listens there")
        screen.answer(stats())
        await screen.shows("up for 2:01:40")
        screen.answer(CommandFailed("gone"))
        await screen.shows("no daemon: gone", "the last figures", "75%")
        screen.answer(stats(2.0))
        await screen.shows("up for 2.0 s")
        assert "no daemon" not in screen.text

    await run(steps)  # type: ignore[misc]


async def test_pause_and_quit(run: Run) -> None:
    async def steps(screen: Screen) -> None:
        screen.answer(stats())
        await screen.shows("up for 2:01:40")
        await screen.pilot.press("p")
        await screen.shows("paused")
        screen.answer(stats(9000.0))
        await screen.pilot.pause(0.05)
        assert "up for 2:01:40" in screen.text
        screen.answer(CommandFailed("it is away"))
        await screen.shows("no daemon: it is away")
        screen.answer(stats(9001.0))
        await until(lambda: "no daemon" not in screen.text and "up for 2:01:40" in screen.text, 5)
        await screen.pilot.press("p")
        screen.answer(stats(9002.0))
        await screen.shows("up for 2:30:02")
        await screen.pilot.press("q")
        assert screen.app._exit

    await run(steps)  # type: ignore[misc]


async def test_a_wider_screen_has_longer_bars(run: Run) -> None:
    async def steps(screen: Screen) -> None:
        screen.answer(stats())
        await screen.shows("acme")
        short_bar = screen.text.count("█")
        await screen.pilot.resize_terminal(120, 40)
        await until(lambda: screen.text.count("█") > short_bar, 5)

    await run(steps)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.42, "0.4"), (12, "12"), (9999, "9999"), (12_345, "12.3k"), (999_999, "1000k"), (4_500_000, "4.5M")],
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text


def test_rates_need_two_answers() -> None:
    rates = Rates()
    tier = pb.TierStats(tier=1, promoted_blocks=5)
    assert rates.per_s(tier, "promoted_blocks") == ""
    rates.take(Snapshot(pb.StatsResponse(uptime_s=1, tiers=[tier]), 1.0))
    rates.take(Snapshot(pb.StatsResponse(uptime_s=3, tiers=[tier]), 3.0))
    assert rates.per_s(pb.TierStats(tier=1, promoted_blocks=9), "promoted_blocks") == "2/s"
