"""An engine's line to the daemon: up, down and back, and nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.base.errors import ConfigError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncCache, ClientError, ExhaustedError, InvalidArgumentError, NamespaceSpec, PartSpec
from prefixd.client.connecting.portal import Portal
from prefixd.integrations.engine import daemon_link as link_module
from prefixd.integrations.engine.daemon_link import Link, LinkDown
from prefixd.server.access.local_credentials import SCHEME, LocalCredentials, LocalProcess
from tests.client.conftest import StandIn
from tests.client.connecting.test_client_tickets import Guarded
from tests.integrations.engine.conftest import DEADLINE_S, LOG, PATIENT_S
from tests.waiting import wait_until

SPEC = NamespaceSpec("link", 2, (PartSpec("all", 0, 64),))
TOKENS = [1, 2, 3, 4]

MakeLink = Callable[..., Link]


@pytest.fixture
def make_link() -> Iterator[MakeLink]:
    made: list[Link] = []

    def make(address: str, timeout_s: float = PATIENT_S) -> Link:
        made.append(Link(address, "test", timeout_s, LOG))
        return made[-1]

    yield make
    for link in made:
        link.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, LOG.name)
    return lambda: [record.getMessage() for record in caplog.records if record.name == LOG.name]


Said = Callable[[], list[str]]


def match(link: Link) -> Callable[[], Any]:
    async def ask() -> int:
        return (await (await link.cache(SPEC)).match(TOKENS)).blocks

    return ask


def test_a_daemon_that_answers(daemon: DaemonProcess, make_link: MakeLink, said: Said) -> None:
    link = make_link(daemon.address)
    assert link.wait_first() and link.up
    assert link.start(match(link)).result(DEADLINE_S) == 0
    assert link.arena is not None and link.arena.nbytes == 64 << 20
    assert said() == []


def test_a_salt_in_use_stays_registered_however_many_others_come(
    daemon: DaemonProcess, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.integrations.engine.daemon_link._NAMESPACES", 4)
    link = make_link(daemon.address)
    assert link.wait_first()

    async def use() -> int:
        kept = await link.cache(SPEC)
        for number in range(20):
            other = await link.cache(replace(SPEC, salt=b"%d" % number))
            assert (await other.match(TOKENS)).blocks == 0
            assert await link.cache(SPEC) is kept
        return len(link._caches)

    assert link.start(use).result(DEADLINE_S) == 4


@pytest.mark.slow
def test_away_and_back_are_said_once_however_many_calls_failed(
    own_daemon: DaemonProcess, make_link: MakeLink, said: Said
) -> None:
    link = make_link(own_daemon.address)
    assert link.wait_first()
    for round_ in range(2):
        assert link.start(match(link)).result(DEADLINE_S) == 0
        own_daemon.kill()
        calls = [link.start(match(link)) for _ in range(20)]
        assert all(isinstance(call.exception(DEADLINE_S), LinkDown) for call in calls)
        assert not link.up
        own_daemon.start()
        wait_until(lambda: link.up and len(said()) % 2 == 0)
        away, back = said()[2 * round_ :]
        assert away.startswith("prefixd is away") and "\n" not in away
        assert back == f"prefixd is back at {own_daemon.address}."


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["idle", "away"])
def test_a_replaced_daemon_is_used_within_seconds_and_one_line_says_so(
    own_daemon: DaemonProcess, make_link: MakeLink, said: Said, seen: str
) -> None:
    """Another daemon with an empty data directory, whether a call has noticed meanwhile that the old one ended or not.

    Of the loads that the engine asks for, the second has what the first has stored.
    """
    link = make_link(own_daemon.address)
    assert link.wait_first()

    async def store() -> int:
        cache = await link.cache(SPEC)
        async with await cache.reserve(TOKENS) as slots:
            return (await slots.commit()).committed

    assert link.start(store).result(DEADLINE_S) == 2
    if seen == "away":
        own_daemon.stop()
        assert isinstance(link.start(match(link)).exception(DEADLINE_S), LinkDown)
        shutil.rmtree(own_daemon.directory / "data")
        own_daemon.start()
        wait_until(lambda: link.up)
    else:
        own_daemon.replace()
    assert link.start(match(link)).result(DEADLINE_S) == 0
    assert link.start(store).result(DEADLINE_S) == 2
    assert link.start(match(link)).result(DEADLINE_S) == 2 and link.up
    replaced = "it was replaced by a daemon with another data directory, which has none of the cached blocks"
    if seen == "away":
        assert said()[1:] == [f"prefixd is back at {own_daemon.address}: {replaced}."]
    else:
        assert said() == [f"prefixd at {own_daemon.address} has opened another session for the engine: {replaced}."]


async def _refused(link: Link) -> BaseException | None:
    return await asyncio.to_thread(link.start(match(link)).exception, DEADLINE_S)


async def test_who_is_refused_is_not_up(folder: Path, make_link: MakeLink, said: Said) -> None:
    """The session is open and lives on, and every call in it is refused, the first one with another ticket, too."""
    guarded = Guarded(folder)
    await guarded.start()
    try:
        link = make_link(guarded.stand_in.address)
        await asyncio.to_thread(wait_until, lambda: link.up)
        assert await asyncio.to_thread(link.start(match(link)).result, DEADLINE_S) == 1
        guarded.lose_key()
        honest, others = guarded.door._ticket, LocalCredentials(lambda: 0.0, b"another daemon's")
        guarded.door._ticket = lambda uid, pid: others.issue(LocalProcess(uid, pid))
        assert isinstance(await _refused(link), LinkDown) and not link.up
        asked = guarded.issued
        for _ in range(5):  # nothing more is asked for the engine
            assert isinstance(await _refused(link), LinkDown)
        assert guarded.issued == asked
        away = f"prefixd is away: `authorization: {SCHEME} ...` is none of this daemon's tickets"
        assert len(said()) == 1 and said()[0].startswith(away) and "\n" not in said()[0]
        guarded.door._ticket = honest
        await asyncio.to_thread(wait_until, lambda: link.up)
        assert await asyncio.to_thread(link.start(match(link)).result, DEADLINE_S) == 1
        assert said()[1:] == [f"prefixd is back at {link.address}."]
        await asyncio.to_thread(link.close)
    finally:
        await guarded.stop()
        os.close(guarded.stand_in.fd)


async def test_who_gets_no_memory_is_not_up_and_reads_what_to_do(folder: Path, make_link: MakeLink, said: Said) -> None:
    """A connector does not stream. The engine runs on, and caches as soon as it may map the memory."""
    stand_in = StandIn(folder)
    stand_in._door._may_map = lambda uid: False
    await stand_in.start()
    try:
        link = make_link(stand_in.address)
        assert not await asyncio.to_thread(link.wait_first)
        assert isinstance(await _refused(link), LinkDown)
        (line,) = said()
        assert line.startswith("prefixd is away: it gives the engine none of its memory, which is the only way of")
        assert "may not map the memory" in line and "add the user to server.allow_uids" in line and "\n" not in line
        stand_in._door._may_map = lambda uid: True
        await asyncio.to_thread(wait_until, lambda: link.up)
        assert await asyncio.to_thread(link.start(match(link)).result, DEADLINE_S) == 1
        assert said()[1:] == [f"prefixd is back at {link.address}."]
        await asyncio.to_thread(link.close)
    finally:
        await stand_in.stop()
        os.close(stand_in.fd)


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.PERMISSION_DENIED])
async def test_who_gets_no_session_is_not_up(
    folder: Path, make_link: MakeLink, said: Said, code: grpc.StatusCode
) -> None:
    stand_in = StandIn(folder)
    await stand_in.start()
    try:
        link = make_link(stand_in.address)
        await asyncio.to_thread(wait_until, lambda: link.up)
        assert await asyncio.to_thread(link.start(match(link)).result, DEADLINE_S) == 1
        stand_in.failures["OpenSession"] = code, "no session for you"
        stand_in.end_sessions()
        await asyncio.to_thread(wait_until, lambda: link.arena is None)
        assert "no session for you" in str(await _refused(link)) and not link.up
        assert isinstance(await _refused(link), LinkDown)
        assert len(said()) == 1 and said()[0].startswith("prefixd is away: no session for you")
        del stand_in.failures["OpenSession"]
        await asyncio.to_thread(wait_until, lambda: link.up)
        assert await asyncio.to_thread(link.start(match(link)).result, DEADLINE_S) == 1
        await asyncio.to_thread(link.close)
    finally:
        await stand_in.stop()
        os.close(stand_in.fd)


@pytest.mark.slow
def test_a_daemon_that_was_never_there_is_found_when_it_comes(tmp_path: Path, make_link: MakeLink, said: Said) -> None:
    with DaemonProcess({"cpu.bytes": "1MiB", "disk.bytes": 0}) as later:
        later.stop()
        link = make_link(later.address, timeout_s=1.0)
        assert not link.wait_first() and not link.up
        with pytest.raises(LinkDown, match="away"):
            link.start(match(link)).result(DEADLINE_S)
        assert len(said()) == 1
        later.start()
        wait_until(lambda: link.up and len(said()) == 2)
        link.close()


@pytest.mark.parametrize("registered", [True, False], ids=["namespace known", "nothing asked yet"])
@pytest.mark.slow
def test_a_stopped_daemon_gets_one_call_and_is_left_alone(
    own_daemon: DaemonProcess, make_link: MakeLink, said: Said, registered: bool
) -> None:
    """Its session is still open, and its socket still takes connections."""
    link = make_link(own_daemon.address)
    wait_until(lambda: link.up)
    if registered:
        link.start(match(link)).result(DEADLINE_S)
    before = len(said())
    os.kill(own_daemon.pid, signal.SIGSTOP)
    link.timeout_s = 1.0
    try:
        with pytest.raises(LinkDown, match="no answer"):
            link.start(match(link)).result(DEADLINE_S)
        asked = []

        async def work() -> None:
            asked.append(1)

        for _ in range(50):
            with pytest.raises(LinkDown):
                link.start(work).result(DEADLINE_S)
        assert not asked, "no call is made"
        assert len(said()) == before + 1
    finally:
        link.timeout_s = PATIENT_S
        os.kill(own_daemon.pid, signal.SIGCONT)
    wait_until(lambda: link.up)
    assert len(said()) == before + 2


@pytest.mark.parametrize(
    ("work", "refusal"),
    [
        (lambda cache: cache.acquire(TOKENS, first_block=-1), InvalidArgumentError),
        (lambda cache: cache.match([2**40]), InvalidArgumentError),
        (lambda cache: cache.reserve(range(1 << 21)), ExhaustedError),
    ],
)
def test_a_refusal_is_an_answer(
    daemon: DaemonProcess, make_link: MakeLink, said: Said, work: Callable[[AsyncCache], Any], refusal: type
) -> None:
    link = make_link(daemon.address)
    link.wait_first()

    async def hold() -> Any:
        cache = await link.cache(SPEC)
        if refusal is ExhaustedError:  # all slots are taken
            await cache.reserve(range(1 << 21))
        return await work(cache)

    with pytest.raises((refusal, ClientError)) as refused:
        link.start(hold).result(DEADLINE_S)
    assert refused.type is refusal
    assert link.up and said() == []


def test_a_call_that_outlasts_its_own_limit_opens_the_breaker(
    daemon: DaemonProcess, make_link: MakeLink, said: Said
) -> None:
    link = make_link(daemon.address)
    link.wait_first()
    with pytest.raises(LinkDown, match=r"within 0\.01 s"):
        link.start(lambda: asyncio.sleep(DEADLINE_S), 0.01).result(DEADLINE_S)
    wait_until(lambda: link.up)
    assert len(said()) == 2


def test_a_daemon_that_has_time_for_nothing_but_probes_is_left_alone_for_longer_and_longer(
    daemon: DaemonProcess, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = make_link(daemon.address)
    link.wait_first()
    pauses: list[float] = []

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)

    monkeypatch.setattr(link_module, "_pause", sleep)
    for _ in range(10):
        with pytest.raises(LinkDown, match="within"):
            link.start(asyncio.Event().wait, 0.01).result(DEADLINE_S)
        wait_until(lambda: link.up)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0, 8.0, 8.0, 8.0]
    monkeypatch.setattr(link_module, "_STEADY_S", 0.0)
    for _ in range(2):
        with pytest.raises(LinkDown, match="within"):
            link.start(asyncio.Event().wait, 0.01).result(DEADLINE_S)
        wait_until(lambda: link.up)
    assert len(pauses) == 10, "one call in a long time is no reason"


@pytest.mark.parametrize("address", ["127.0.0.1:50051", "cache.example:50051", "tcp://host", ""])
def test_an_address_of_another_host_is_refused(address: str) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="unix socket") as refused:
        Link(address, "test", 1.0, LOG)
    assert "\n" not in str(refused.value) and repr(address) in str(refused.value)
    assert threading.active_count() <= threads


def test_an_address_without_a_path_is_refused() -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="'unix:'"):
        Link("unix:", "test", 1.0, LOG)
    assert threading.active_count() <= threads


@pytest.mark.parametrize("stopped", [False, True], ids=["daemon runs", "daemon stopped"])
@pytest.mark.slow
def test_closing_ends_the_calls_under_way_and_its_thread(
    own_daemon: DaemonProcess, make_link: MakeLink, stopped: bool
) -> None:
    link = make_link(own_daemon.address)
    link.wait_first()

    async def hang() -> None:
        await (await link.cache(SPEC)).acquire(TOKENS)
        await asyncio.Event().wait()

    link.start(match(link)).result(DEADLINE_S)
    names = [thread.name for thread in threading.enumerate()]
    if stopped:
        os.kill(own_daemon.pid, signal.SIGSTOP)
    calls = [link.start(hang) for _ in range(3)]
    link.close()
    link.close()
    if stopped:
        os.kill(own_daemon.pid, signal.SIGCONT)
    assert all(call.done() for call in calls)
    assert not link.up
    with pytest.raises(LinkDown):
        link.start(match(link)).result(DEADLINE_S)
    left = [thread.name for thread in threading.enumerate()]
    assert left.count("prefixd-client") == names.count("prefixd-client") - 1


def test_closing_says_nothing_of_a_daemon_that_is_away(tmp_path: Path, said: Said) -> None:
    link = Link(f"unix:{tmp_path}/nobody", "test", 1.0, LOG)
    link.wait_first()
    link.close()
    assert len(said()) == 1


def test_a_search_that_breaks_is_said_and_goes_on(
    daemon: DaemonProcess, make_link: MakeLink, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who waits for the first answer waits for ever."""
    real, broken = Link.probe, [True]

    async def ask(link: Link) -> None:
        if broken:
            broken.pop()
            raise ZeroDivisionError("a defect")
        await real(link)

    monkeypatch.setattr(Link, "probe", ask)
    link = make_link(daemon.address)
    assert not link.wait_first()
    wait_until(lambda: link.up)
    assert len(said()) == 3


def test_a_link_in_another_process_than_its_own_is_down(daemon: DaemonProcess, make_link: MakeLink) -> None:
    link = make_link(daemon.address)
    link.wait_first()
    assert isinstance(link._portal, Portal)
    link._portal._pid += 1  # as after a fork
    try:
        with pytest.raises(LinkDown, match="fork"):
            link.start(match(link)).result(DEADLINE_S)
    finally:
        link._portal._pid -= 1
