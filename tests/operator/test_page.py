"""The operators' page in a real browser: what it shows, what it loads, and that it fits a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NamespaceSpec, PartSpec
from tests.operator.programs import find_program
from tests.waiting import WAIT_S

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: `make install-operator` brings it"
)

SPEC = NamespaceSpec("llama <b>&", 4, (PartSpec("full", 0, 4096),))
OPERATOR, ENGINE = "operator-" + "o" * 32, "engine-" + "e" * 32


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A sidecar that has 8 blocks of a namespace whose name has the signs of HTML."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"operator admin {OPERATOR}\nengine client {ENGINE}\n")
    settings = {"cpu.bytes": "1MiB", "disk.bytes": "4MiB", "server.metrics": "127.0.0.1:0", "server.tokens": tokens}
    with DaemonProcess(settings) as daemon, Client(daemon.address, name="engine <i>") as client:
        cache = client.register(SPEC)
        cache.store(range(32), bytes(8 * 4096), durable=True)
        assert cache.load(range(40), bytearray(10 * 4096)) == 8
        yield daemon


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = find_program("chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, daemon: DaemonProcess) -> Iterator[Callable[..., Any]]:
    """Opens the page in a window of a width; fails afterwards if a request left for elsewhere or a script failed."""
    contexts, faults = [], []

    def open_page(width: int, token: str = OPERATOR) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: faults.extend(() if ours(request.url) else [request.url]))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.extend([message.text] if "Security Policy" in message.text else ()))
        page.goto(str(daemon.metrics))
        page.fill("input", token)
        page.click("button")
        return page

    def ours(url: str) -> bool:
        return url.startswith((str(daemon.metrics), "data:"))

    yield open_page
    for context in contexts:
        context.close()
    assert not faults


def shows(page: Any, place: str, text: str) -> None:
    """Waits until an element has a text."""
    sync_api.expect(page.locator(place)).to_contain_text(text, timeout=WAIT_S * 1000)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_what_the_daemon_has(opened: Callable[..., Any], width: int) -> None:
    page = opened(width)
    page.wait_for_selector("#tiers .tier")
    text = page.inner_text("main")
    assert "cpu" in text and "32.0 KiB of 1.0 MiB" in text and "8 blocks" in text
    assert "80%\nof prompt tokens found" in text
    assert SPEC.name in text and "engine <i>" in text, "names are texts"
    assert page.locator("main i i, main b b").count() == 0
    assert page.inner_text("#state").startswith("0.") and "live" in page.inner_text("#live")
    assert page.title() == "80% found · prefixd"
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.is_visible("th.wide") == (width > 760)


def test_the_page_follows_the_daemon(opened: Callable[..., Any], daemon: DaemonProcess) -> None:
    page = opened(1280)
    page.wait_for_selector("#tiers .tier")
    with Client(daemon.address) as client:
        client.register(SPEC).store(range(1000, 1064), bytes(16 * 4096))
    shows(page, "#tiers", "24 blocks")


def test_a_request_is_explained(opened: Callable[..., Any]) -> None:
    page = opened(390)
    page.wait_for_selector("#requests .link")
    page.locator("#requests .link").first.click()
    shows(page, "#why", "prompt tokens from the cache")
    assert "match" in page.inner_text("#why table")
    page.locator("#why button").click()
    assert not page.is_visible("#why")


def test_the_stretch_of_time_is_chosen(opened: Callable[..., Any]) -> None:
    page = opened(1280)
    page.wait_for_selector("#tiers .tier")
    with page.expect_request("**/api/stats?last_s=600"):
        page.select_option("select", "600")
    page.locator("#chart").hover()
    shows(page, "#chart", "prompt tokens")


def test_another_token_is_asked_for(opened: Callable[..., Any]) -> None:
    page = opened(390, ENGINE)
    shows(page, "#refusal", "engine has the role client")
    assert not page.is_visible("#tiers") and page.inner_text("#live") == "needs a token"
    page.fill("input", OPERATOR)
    page.click("button")
    page.wait_for_selector("#tiers .tier")
    assert not page.is_visible("#login")


def test_a_daemon_that_does_not_answer_is_said_until_it_does(opened: Callable[..., Any]) -> None:
    page = opened(1280)
    page.wait_for_selector("#tiers .tier")
    page.route("**/api/stats*", lambda route: route.abort())
    shows(page, "#live", "no answer")
    page.unroute("**/api/stats*")
    shows(page, "#live", "live")


def test_long_names_fit_a_phone(opened: Callable[..., Any]) -> None:
    page = opened(390)
    page.wait_for_selector("#tiers .tier")

    def with_long_names(route: Any) -> None:
        answer = route.fetch()
        stats = answer.json()
        name = "a-tenant-whose-name-is-as-long-as-it-may-be-of-64-characters-xyz"
        for each in (*stats["sessions"], *stats["namespaces"]):
            each["tenant"] = name
        used = [{"tier": tier, "used_bytes": 999 << 40, "held_bytes": 0} for tier in ("gpu", "cpu", "disk")]
        tenant = {
            "name": name,
            "tiers": used,
            "sessions": 10**6,
            "running_requests": 10**6,
            "refused": {"calls": 10**9},
        }
        stats["tenants"] = [{**stats["tenants"][0], **tenant}]
        stats["troubles"] = [{"part": "disk tier", "what": "x" * 200, "remedy": "y" * 200, "since_s": 1.0}]
        route.fulfill(response=answer, json=stats)

    page.route("**/api/stats*", with_long_names)
    page.wait_for_selector(".trouble")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_what_other_sizes_would_find(opened: Callable[..., Any]) -> None:
    page = opened(1280)
    page.wait_for_selector("#tiers .tier")

    def with_estimates(route: Any) -> None:
        answer = route.fetch()
        sizes = [
            {"factor": factor, "nbytes": int(factor * (64 << 30)), "hit_rate": rate, "margin": 0.01, "filled": True}
            for factor, rate in ((0.5, 0.41), (1.0, 0.6), (2.0, 0.72))
        ]
        tiers = [{"tier": "cpu", "nbytes": 64 << 30, "sure": True, "sizes": sizes}, {"tier": "disk", "sure": False}]
        route.fulfill(response=answer, json={**answer.json(), "ghosts": {"tiers": tiers}})

    page.route("**/api/stats*", with_estimates)
    shows(page, "#whatif", "72% ± 1")
    rows = page.inner_text("#whatif table").splitlines()
    columns = [word.split()[-1] for word in rows[0].split("\t")]
    assert len(rows) == 2 and columns == ["tier", "now", "0.5", "1", "2"]


def test_degraded_parts_come_first(opened: Callable[..., Any]) -> None:
    page = opened(390)
    page.wait_for_selector("#tiers .tier")

    def with_trouble(route: Any) -> None:
        answer = route.fetch()
        stats = answer.json()
        trouble = {"part": "disk tier", "what": "it is full", "remedy": "free some room", "since_s": 90.0}
        route.fulfill(response=answer, json={**stats, "troubles": [trouble]})

    page.route("**/api/stats*", with_trouble)
    page.wait_for_selector(".trouble")
    assert page.inner_text(".trouble") == "disk tier for 90 s: it is full\nfree some room"
    tops = [page.locator(each).first.bounding_box()["y"] for each in (".trouble", ".tile", ".tier")]
    assert tops == sorted(tops)


def test_the_page_is_one_short_file() -> None:
    page = Path(__file__).parents[2] / "prefixd/server/http/page.html"
    assert page.stat().st_size < 64 << 10
