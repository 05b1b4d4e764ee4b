"""A vLLM's own stream of KV events, in which its connector tells of what prefixd has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import zmq

from benchmarks.common.harness import free_port
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.routers.conftest import Dynamo, VllmRouter, until

ENGINE_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
PROMPT = list(range(100, 420))  # five blocks of the connector's, ten of the engine's
BLOCK_TOKENS = 32  # the least that vLLM has on a CPU; routers are told, as of any engine that has not 16


class Engine:
    """vLLM, in a process of its own."""

    def __init__(self, stack: ExitStack, address: str, socket: Path) -> None:
        self.endpoint = relayed(stack, f"ipc://{socket}")
        self._process = subprocess.Popen(
            [ENGINE_PYTHON, Path(__file__).with_name("engine.py"), address, f"ipc://{socket}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _sources()))},
        )
        stack.callback(self._process.communicate)

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def compute(self, prompt: Sequence[int]) -> None:
        """Returns when it is saved."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(list(prompt)), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "saved\n"


def relayed(stack: ExitStack, published: str) -> str:
    """A port of loopback where the same is published: vLLM listens at a file or at all addresses, and its router takes
    a port only."""
    context: zmq.Context[Any] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    inside, outside = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    inside.connect(published)
    port = outside.bind_to_random_port("tcp://127.0.0.1")

    def relay() -> None:
        poller = zmq.Poller()
        for one in (inside, outside):
            poller.register(one, zmq.POLLIN)
        while not ending.is_set():
            for one, _ in poller.poll(50):
                (outside if one is inside else inside).send_multipart(one.recv_multipart())

    ending, thread = threading.Event(), threading.Thread(target=relay)
    thread.start()
    stack.callback(thread.join)
    stack.callback(ending.set)
    return f"tcp://127.0.0.1:{port}"


def _sources() -> list[Path]:
    root = Path(__file__).parents[2]
    return [root, root / "swap", root / "scheduler"]


def test_routers_know_what_prefixd_has_for_an_engine(
    stack: ExitStack, dynamo: Callable[..., Dynamo], vllm_router: Callable[..., VllmRouter]
) -> None:
    """By the stream alone of an engine that was started when it was there, and has none of it in its own cache."""
    folder = Path(tempfile.mkdtemp(prefix="prefixd-"))
    stack.callback(shutil.rmtree, folder)
    settings = {"cpu.bytes": "64MiB", "disk.bytes": "64MiB"}
    daemon = stack.enter_context(DaemonProcess(settings, directory=folder))
    client = stack.enter_context(Client(daemon.address))
    with ExitStack() as before:
        engine = Engine(before, daemon.address, folder / "a")
        engine.wait_until_ready()
        engine.compute(PROMPT)
    engine = Engine(stack, daemon.address, folder / "b")
    router = dynamo(engine.endpoint, BLOCK_TOKENS)
    other = vllm_router([f"tcp://127.0.0.1:{free_port()}", engine.endpoint], "--kv-event-block-size", str(BLOCK_TOKENS))
    engine.wait_until_ready()
    others = count(1000, 10)

    def known() -> int:
        """Of the prompt's blocks, after a request with which vLLM publishes what it was told."""
        first = next(others)
        engine.compute(range(first, first + 10))
        return router.overlap(PROMPT, "host_pinned_blocks")

    until(lambda: known() == 10)
    until(lambda: other.ask(PROMPT) == 1)  # it reads the same stream, in its own time
    assert [other.ask(PROMPT) for _ in range(4)] == [1] * 4
    client.evict(all=True)
    until(lambda: known() == 0)
