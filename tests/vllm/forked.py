"""Engines forked from a process that has imported vLLM: of the 12 s of CPU time that a start takes, imports are 10.

The process is multiprocessing's fork server, one for each pytest worker. It has no threads and has started nothing.
Forked engines have one hash seed: where a second process has to find what the first saved, let one of them be an
EngineProcess, which imports everything anew.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from typing import IO, Any

import pytest

from benchmarks.engines.vllm_engine import EngineProcess
from benchmarks.engines.vllm_engine_child import EngineLoop

# What engines import while they start. A module that vLLM no longer has is passed over.
PRELOAD = [
    "vllm",
    "vllm.lora.request",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.renderers.hf",
    "vllm.distributed.elastic_ep.elastic_execute",
    "compressed_tensors",
    "vllm.model_executor.layers.quantization.online",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.llama",
]


class ForkedEngine(EngineProcess):
    """As EngineProcess, but that it ends with the process that started it, not with the thread.

    `loop` runs in the new process, with the socket and the setup of `vllm_engine_child`.
    """

    def __init__(
        self, *arguments: Any, loop: Callable[[socket.socket, dict[str, Any]], None] | None = None, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._loop = loop or _run_engine

    def _spawn(
        self, channel: socket.socket, log: IO[bytes], setup: Mapping[str, Any], env: Mapping[str, str]
    ) -> _Forked:
        forkserver.set_forkserver_preload(PRELOAD)
        with pytest.MonkeyPatch.context() as patch:  # some variables are read when vLLM is imported
            for name, value in env.items():
                patch.setenv(name, value)
            forkserver.ensure_running()
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(self._loop, channel, DupFd(log.fileno()), setup, dict(env))
        )
        process.start()
        return _Forked(process)


class _Forked:
    """The part of Popen that EngineProcess uses."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process

    def wait_until(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the forked engine", timeout or 0.0)
        return self._process.exitcode


def _run_engine(channel: socket.socket, setup: dict[str, Any]) -> None:
    EngineLoop(channel, setup).run()


def _run(
    loop: Callable[[socket.socket, dict[str, Any]], None],
    channel: socket.socket,
    log: Any,
    setup: dict[str, Any],
    env: dict[str, str],
) -> None:
    os.setsid()  # its tensor-parallel ranks are in its group
    threading.Thread(target=_end_with_pytest, name="end-with-pytest", daemon=True).start()
    descriptor = log.detach()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.update(env)
    tempfile.tempdir = None  # vLLM's imports have looked for it
    gc.freeze()  # vLLM collects garbage several times while it starts
    with channel:
        loop(channel, setup)


def _end_with_pytest() -> None:
    """The fork server does not end before its children do: that it is this process's parent says nothing."""
    pytest_process = multiprocessing.parent_process()
    assert pytest_process is not None
    pytest_process.join()
    os.killpg(os.getpid(), signal.SIGKILL)
