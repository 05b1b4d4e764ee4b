"""Hosts that share a store: real daemons with the embedded model, each with a data directory of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, Finished, Sampling, Tier, Tokens
from tests.waiting import wait_until

SECRET = "0123456789abcdef0123456789abcdef"
BLOCK = 16
_SETTINGS = {
    "worker.embedded": True,
    "worker.threads": 1,
    "gpu.bytes": "32MiB",
    "cpu.bytes": "64MiB",
    "disk.bytes": "64MiB",
    "scheduler.load": "always",  # a test of what is loaded must not depend on how fast this machine computes
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request got: its tokens, and how many of its prompt's were found, and how many of those in the store. What
    waits for its turn is fetched meanwhile, and then found in memory."""

    tokens: tuple[int, ...]
    remote: int
    found: int
    seconds: float


class Host:
    """A daemon that runs, and a client of it."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.client = Client(daemon.address, timeout_s=60.0)

    def ask(self, prompt: Sequence[int], max_tokens: int = 4) -> Answer:
        """Generates; a request that fails raises."""
        began = time.monotonic()
        tokens: list[int] = []
        for event in self.client.generate(np.array(prompt, np.uint32), sampling=Sampling(max_tokens=max_tokens)):
            if isinstance(event, Tokens):
                tokens += event.token_ids
            elif isinstance(event, Finished):
                found = event.hit_tokens
                return Answer(tuple(tokens), found[Tier.REMOTE], sum(found.values()), time.monotonic() - began)
        raise AssertionError("the answer has no end")

    def find(self, prompt: Sequence[int], seconds: float = 60.0) -> Answer:
        """Asks, each time with nothing of its own, until some of the prompt comes from the store: a prompt waits for
        the store's answer for a moment only, and is computed when that comes late. For a host that shares nothing, or
        it would find what it has computed itself."""
        answers: list[Answer] = []

        def found() -> int:
            self.client.evict(all=True)
            answers.append(self.ask(prompt))
            return answers[-1].found

        self.wait(found, seconds, "the prompt is found in the store")
        assert len({answer.tokens for answer in answers}) == 1
        return answers[-1]

    def wait_until_shared(self, blocks: int, seconds: float = 60.0) -> None:
        """Until the store has so many blocks of this host."""
        self.wait(lambda: self.client.stats().remote.shared_blocks >= blocks, seconds, "its blocks are shared")

    def wait(self, holds: Callable[[], object], seconds: float, what: str) -> None:
        wait_until(holds, lambda: f"{what}{self.daemon.last_words()}", seconds)

    def trouble(self) -> str:
        """What is wrong with the remote tier; empty if nothing is."""
        return next((each.what for each in self.client.stats().troubles if each.part == "remote tier"), "")

    def check(self) -> None:
        """Everything adds up."""
        assert not self.client.check_integrity().violations


@contextmanager
def host(folder: Path, url: str, **settings: object) -> Iterator[Host]:
    """A daemon on a data directory of its own that shares the store at `url` ("" for none).

    What it is asked first waits for the store's answer: how long computing takes it does not know yet.
    """
    folder.mkdir(exist_ok=True)
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    remote = {"remote.url": url, "remote.secret_file": secret, "remote.lookup_s": 30} if url else {}
    chosen = _SETTINGS | remote | {name.replace("__", "."): value for name, value in settings.items()}
    with DaemonProcess(chosen) as daemon:
        one = Host(daemon)
        try:
            yield one
            one.check()
        finally:
            one.client.close()


def prompt(seed: int, blocks: int) -> list[int]:
    """A prompt of full blocks and one token more, so that all of them can come from a cache."""
    made: list[int] = np.random.default_rng(seed).integers(1, 120, blocks * BLOCK + 1).tolist()
    return made
