"""Real routers in an environment of their own, each told by daemons of what they hold, with default settings on both
sides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.harness import free_port
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Cache, Client, NamespaceSpec, PartSpec
from tests.routers.stand_in_worker import StandInWorker
from tests.waiting import WAIT_S, wait_until

ROUTERS = Path(__file__).parents[2] / ".venv-routers" / "bin"
BLOCK_TOKENS = 64  # of the daemon; routers count in 16
BLOCK_BYTES = 512
_LOOPBACK = {name: "127.0.0.1" for name in ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST")}


def until(condition: Callable[[], bool]) -> None:
    """Waits for what routers have yet to hear."""
    wait_until(condition, "the router was not told, or did not believe it")


class Holder:
    """A daemon with events, and a client that stores in it."""

    def __init__(self, stack: ExitStack) -> None:
        folder = Path(tempfile.mkdtemp(prefix="prefixd-"))
        stack.callback(shutil.rmtree, folder)
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        settings = {"cpu.bytes": "4MiB", "disk.bytes": "16MiB", "events.endpoint": self.endpoint}
        settings |= {"cache.write_back": "false", "events.again_s": 0.1}
        self._daemon = stack.enter_context(DaemonProcess(settings, directory=folder))
        self._stack = stack
        self._open()

    def _open(self) -> None:
        self.client = self._stack.enter_context(Client(self._daemon.address))
        self.cache: Cache = self.client.register(NamespaceSpec("m", BLOCK_TOKENS, (PartSpec("kv", 0, BLOCK_BYTES),)))

    def restart(self) -> None:
        """Leaves what is on disk."""
        self.client.close()
        self._daemon.stop()
        self._daemon.start()
        self._open()

    def store(self, prompt: Sequence[int]) -> None:
        """In memory alone, until a flush."""
        self.cache.store(prompt, np.zeros(len(prompt) // BLOCK_TOKENS * BLOCK_BYTES, np.uint8))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def hold(stack: ExitStack) -> Callable[[], Holder]:
    """Starts a daemon."""
    return lambda: Holder(stack)


class Dynamo:
    """Dynamo's router, in a process of its own."""

    def __init__(self, stack: ExitStack, endpoint: str, block_tokens: int = 16) -> None:
        self._process = subprocess.Popen(
            [ROUTERS / "python", Path(__file__).with_name("dynamo_router.py"), endpoint, str(block_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_LOOPBACK},
        )
        stack.callback(self._end)
        assert self._read() == "ready"

    def known(self, prompt: Sequence[int]) -> tuple[int, int]:
        """How many of the prompt's blocks the worker has in host memory, from its start on, and behind them on disk."""
        return self.overlap(prompt, "host_pinned_blocks"), self.overlap(prompt, "disk_extension_blocks")

    def overlap(self, prompt: Sequence[int], what: str) -> int:
        """One of the router's figures about a prompt."""
        assert self._process.stdin is not None
        print(json.dumps(list(prompt)), file=self._process.stdin, flush=True)
        workers = json.loads(self._read())["workers"]  # none before the router has found it
        return sum(worker[what] for worker in workers)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def dynamo(stack: ExitStack) -> Callable[..., Dynamo]:
    """Starts Dynamo's router over one worker, which is told of its blocks by an endpoint."""
    return partial(Dynamo, stack)


class VllmRouter:
    """vLLM's router over workers that say which prompts they were sent."""

    def __init__(self, stack: ExitStack, endpoints: Sequence[str], *options: str) -> None:
        self.workers = [stack.enter_context(StandInWorker()) for _ in endpoints]
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        urls = [worker.url for worker in self.workers]
        sources = [part for pair in zip(urls, endpoints, strict=True) for part in ("--kv-event-source", "=".join(pair))]
        ports = ("--port", str(port), "--prometheus-port", str(free_port()))
        router = subprocess.Popen(
            [
                *(ROUTERS / "vllm-router", "--policy", "kv_aware", "--kv-event-model", "m", *ports, *options),
                *("--worker-urls", *urls, *sources),
            ]
        )
        stack.callback(router.wait)
        stack.callback(router.kill)
        until(self._answers)

    def ask(self, prompt: Sequence[int]) -> int:
        """Sends a prompt; the number of the worker that gets it."""
        before = [len(worker.prompts) for worker in self.workers]
        body = json.dumps({"model": "m", "prompt": list(prompt), "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{self._url}/v1/completions", body, headers), timeout=WAIT_S
        ) as answer:
            answer.read()
        (asked,) = [at for at, worker in enumerate(self.workers) if len(worker.prompts) > before[at]]
        return asked

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=WAIT_S):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False


@pytest.fixture
def vllm_router(stack: ExitStack) -> Callable[..., VllmRouter]:
    """Starts vLLM's router over a worker for each endpoint, by which it is told of the worker's blocks."""
    return partial(VllmRouter, stack)
