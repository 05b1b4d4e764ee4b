"""Makes the pictures of the documentation from a daemon that serves three tenants: the page, and `prefixd top`.

    python deploy/screenshots.py                # docs/page.png, docs/page_phone.png, docs/top.png
    python deploy/screenshots.py --seconds 30 --folder /tmp/pictures

It needs playwright and Debian's chromium (`make install-operator`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from prefixd.base.errors import PrefixdError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.cli.top.daemon_watch import watch
from prefixd.cli.top.top_app import TopApp
from prefixd.client import Client, NamespaceSpec, PartSpec, Sampling

DOCS = Path(__file__).parents[1] / "docs"
TENANTS = ("acme", "research", "support")
SIZES = {"page": (1280, 1180), "page_phone": (390, 1400)}
_COLORS = 96
"""Of a picture: the page has few, and a picture of all of them is three times as large."""
_BLOCK_BYTES = 64 << 10
_SPEC = NamespaceSpec("vllm-llama-3.2-1b", 16, (PartSpec("full", 0, _BLOCK_BYTES),))


@contextmanager
def busy_daemon(folder: Path) -> Iterator[DaemonProcess]:
    """Yields a daemon with the embedded model that three tenants use until the end of the block."""
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    lines = [f"{tenant} client {_token(tenant)} {tenant}\n" for tenant in TENANTS]
    tokens.write_text("".join([*lines, f"operator admin {_token('operator')}\n"]))
    settings: dict[str, Any] = {
        "worker.embedded": True,
        "gpu.bytes": "16MiB",
        "cpu.bytes": "24MiB",
        "disk.bytes": "128MiB",
        "server.tcp": "127.0.0.1:0",
        "server.insecure_tcp": True,
        "server.tokens": tokens,
        "server.metrics": "127.0.0.1:0",
        **{f"tenants.{tenant}.waiting_requests": 64 for tenant in TENANTS},
    }
    ended = threading.Event()
    with DaemonProcess(settings, directory=folder / "daemon") as daemon:
        threads = [
            threading.Thread(target=_use, args=(daemon, tenant, number, ended), daemon=True)
            for number, tenant in enumerate(TENANTS)
        ]
        threads.append(threading.Thread(target=_engine, args=(daemon, ended), daemon=True))
        for thread in threads:
            thread.start()
        try:
            yield daemon
        finally:
            ended.set()
            for thread in threads:
                thread.join(60)


def _use(daemon: DaemonProcess, tenant: str, seed: int, ended: threading.Event) -> None:
    """Sends requests of one tenant: questions about documents, some of them asked more often than others."""
    chance = random.Random(seed)
    documents = [[chance.randrange(5, 260) for _ in range(chance.choice((160, 240, 320)))] for _ in range(12)]
    with Client(str(daemon.tcp), name=tenant, token=_token(tenant), timeout_s=60) as client:
        while not ended.is_set():
            document = documents[min(int(chance.expovariate(0.35)), len(documents) - 1)]
            question = [chance.randrange(5, 260) for _ in range(24)]
            try:
                for _ in client.generate([*document, *question], sampling=Sampling(max_tokens=12)):
                    pass
            except PrefixdError:
                if not ended.is_set():
                    raise
            ended.wait(chance.uniform(0.05, 0.4))


def _engine(daemon: DaemonProcess, ended: threading.Event) -> None:
    """Stores and loads blocks, as an engine beside the daemon does."""
    chance = random.Random(7)
    with Client(daemon.address, name="vllm-0", timeout_s=60) as client:
        cache = client.register(_SPEC)
        while not ended.is_set():
            tokens = range(first := 1000 * chance.randrange(12), first + 16 * chance.randrange(4, 24))
            into = bytearray(len(tokens) // 16 * _BLOCK_BYTES)
            if cache.load(tokens, into) < len(tokens) // 16:
                cache.store(tokens, bytes(into))
            ended.wait(0.5)


def _token(name: str) -> str:
    return f"{name}-of-the-screenshots"


@contextmanager
def browser_page(width: int, height: int, *, dark: bool = False) -> Iterator[Page]:
    """Yields a page of Debian's chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        try:
            yield context.new_page()
        finally:
            browser.close()


def log_in(page: Page, url: str, token: str) -> None:
    """Opens the operators' page and enters a token; waits for the figures."""
    page.goto(url)
    page.fill("input", token)
    page.click("button")
    page.wait_for_selector("#tiers .tier")


async def _top_svg(address: str, columns: int, lines: int) -> str:
    """Returns the screen of `prefixd top` after some answers of the daemon."""
    app = TopApp(watch(address, 1.0))
    async with app.run_test(size=(columns, lines)) as pilot:
        await pilot.pause(4.5)
        return app.export_screenshot(title="prefixd top")


def photograph_top(address: str, path: Path) -> None:
    """Writes a picture of `prefixd top` in 80 columns and 24 lines."""
    svg = asyncio.run(_top_svg(address, 80, 24))
    with browser_page(1000, 700) as page:
        page.route("**/*", lambda route: route.abort())  # fonts from elsewhere; the browser's own do
        page.set_content(f"<body style='margin:0;width:900px'>{svg}</body>", wait_until="domcontentloaded")
        page.locator("svg").screenshot(path=path)
    _shrink(path)


def _shrink(path: Path) -> None:
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Makes all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="how long the daemon is used before")
    parser.add_argument("--folder", type=Path, default=DOCS)
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, busy_daemon(Path(folder)) as daemon:
        time.sleep(arguments.seconds)
        for name, (width, height) in SIZES.items():
            with browser_page(width, height, dark=arguments.dark) as page:
                log_in(page, str(daemon.metrics), _token("operator"))
                with page.expect_response("**/api/stats?last_s=600"), page.expect_response("**/api/requests*"):
                    page.select_option("select", "600")
                page.wait_for_timeout(500)
                page.screenshot(path=arguments.folder / f"{name}.png")
            _shrink(arguments.folder / f"{name}.png")
        photograph_top(daemon.address, arguments.folder / "top.png")


if __name__ == "__main__":
    main()
