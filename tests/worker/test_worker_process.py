"""The worker as a process of its own; the test is its daemon."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixd.base.sampling import Sampling
from prefixd.serving.models.worker_channel import describe_memory
from prefixd.worker_protocol.errors import ConnectionClosedError
from prefixd.worker_protocol.framing import Connection, from_worker
from prefixd.worker_protocol.protocol import (
    Cancel,
    Done,
    Extend,
    Failed,
    FromWorker,
    Grow,
    Hello,
    Layers,
    Ping,
    Pong,
    Ready,
    Shrink,
    Shrunk,
    Shutdown,
    Start,
    Step,
)
from prefixd.worker_protocol.worker_settings import WorkerSettings, encode_settings
from prefixd_swap.vmem import FrameId, FramePool, create_memory, send_export

ROOT = Path(__file__).parents[2]
OURS = [str(ROOT / path) for path in (".", "swap", "scheduler")]
TIMEOUT_S = 240


class Daemon:
    """Starts a worker and speaks with it."""

    def __init__(self, settings: WorkerSettings) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "prefixd.worker",
                "--fd",
                str(theirs.fileno()),
                "--config",
                encode_settings(settings),
            ],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*OURS, os.environ.get("PYTHONPATH", "")])},
            stderr=subprocess.PIPE,
        )
        theirs.close()
        self.connection: Connection[FromWorker] = Connection(ours, from_worker())

    def receive(self) -> FromWorker:
        assert self.connection.poll(TIMEOUT_S), "the worker is silent"
        return self.connection.receive()

    def hand_over_memory(self, frames: int, most: int | None = None) -> FramePool:
        hello = self.receive()
        assert isinstance(hello, Hello)
        self.hello = hello
        memory = create_memory(hello.device, hello.chunk_bytes)
        memory.create(3)  # frames need not begin at the first chunk
        pool = FramePool(memory, hello.frame_bytes, frames, most)
        export = memory.export()
        self.connection.send(describe_memory(pool, export))
        send_export(self.connection.socket, export)
        assert isinstance(self.receive(), Ready)
        return pool

    def grow(self, pool: FramePool, count: int) -> list[FrameId]:
        new = pool.create(count)
        export = pool.memory.export_run(range(new.chunks[0], new.chunks[-1] + 1))
        frames = np.array(new.frames, np.int64).tobytes()
        self.connection.send(Grow(export.meta, export.count, frames, new.chunks.tobytes()))
        send_export(self.connection.socket, export)
        pool.admit(new)
        return new.frames

    def shrink(self, pool: FramePool, frames: list[FrameId]) -> None:
        """`frames` are allocated."""
        pool.withdraw(frames)
        encoded = np.array(frames, np.int64).tobytes()
        self.connection.send(Shrink(encoded))
        assert self.receive() == Shrunk(encoded)
        pool.destroy(frames)
        pool.forget(frames)

    def start(
        self,
        request: int,
        tokens: list[int],
        frames: list[int],
        cached: int = 0,
        max_tokens: int = 8,
        loading: bool = False,
    ) -> None:
        self.connection.send(
            Start(
                id=request,
                tokens=np.array(tokens, "<u4").tobytes(),
                generated=0,
                cached_blocks=cached,
                loading=loading,
                frames=frames,
                sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            )
        )

    def collect(self, requests: set[int]) -> tuple[dict[int, list[int]], dict[int, Done]]:
        """Everything until all of `requests` are done."""
        tokens: dict[int, list[int]] = {}
        done: dict[int, Done] = {}
        while requests - done.keys():
            message = self.receive()
            if isinstance(message, Done):
                done[message.id] = message
            else:
                assert isinstance(message, Step), message
                for update in message.updates:
                    tokens.setdefault(update.id, []).extend(update.tokens)
        return tokens, done

    def close(self) -> None:
        self.connection.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def settings(llama_directory: Path) -> WorkerSettings:
    return WorkerSettings(model=str(llama_directory), threads=1, max_step_tokens=64)


@pytest.fixture(scope="module")
def daemon(settings: WorkerSettings) -> Iterator[Daemon]:
    daemon = Daemon(settings)
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def pool(daemon: Daemon) -> Iterator[FramePool]:
    pool = daemon.hand_over_memory(frames=48)
    yield pool
    daemon.close()
    pool.check_integrity()
    pool.close()
    pool.memory.close()


def frame_bytes(pool: FramePool, frame: int) -> bytes:
    span = pool.span(frame)
    return ctypes.string_at(span.address, span.nbytes)


@pytest.mark.slow
def test_tokens_are_those_of_an_engine_in_process(daemon, pool, rig, prompt):
    first, second = pool.allocate(4), pool.allocate(2)
    daemon.start(1, prompt, first)
    daemon.start(2, prompt[:20], second)
    tokens, done = daemon.collect({1, 2})
    assert tokens == {1: rig.generate(prompt), 2: rig.generate(prompt[:20])}
    assert {done[1].reason, done[2].reason} == {"length"}
    frames = rig.frames(4)
    rig.generate(prompt, frames=frames)
    for block in range(3):
        assert frame_bytes(pool, first[block]) == frame_bytes(rig.pool, frames[block])


def test_a_prefix_is_shared_between_requests_without_a_copy(daemon, pool, rig, prompt):
    frames = pool.allocate(4)
    daemon.start(10, prompt, frames)
    daemon.collect({10})
    before = [frame_bytes(pool, frame) for frame in frames[:3]]
    other = [*prompt[:48], 7, 8, 9]
    daemon.start(11, other, [*frames[:3], *pool.allocate(1)], cached=3)
    daemon.start(12, prompt, [*frames[:3], *pool.allocate(1)], cached=3)
    tokens, _ = daemon.collect({11, 12})
    assert tokens == {11: rig.generate(other), 12: rig.generate(prompt)}
    assert [frame_bytes(pool, frame) for frame in frames[:3]] == before


def test_extend_cancel_and_errors_reach_the_worker(daemon, pool, rig, prompt):
    daemon.start(20, prompt, pool.allocate(2))
    daemon.start(21, prompt, pool.allocate(1))
    daemon.start(22, [10**6], pool.allocate(1))
    _, done = daemon.collect({22})
    assert done[22].reason == "error"
    daemon.connection.send(Cancel(21))
    daemon.connection.send(Extend(20, [int(frame) for frame in pool.allocate(2)]))
    tokens, done = daemon.collect({20, 21})
    assert done[21].reason == "cancelled"
    assert tokens[20] == rig.generate(prompt)


def waiting_for_layers(daemon: Daemon, pool: FramePool, prompt: list[int], request: int) -> list[int]:
    """Has the worker wait in the middle of a pass, whose first layer has come; returns the cached frames."""
    frames = pool.allocate(4)
    daemon.start(request, prompt, frames)
    daemon.collect({request})
    daemon.start(request + 1, prompt, [*frames[:3], *pool.allocate(1)], cached=3, loading=True)
    daemon.connection.send(Layers(request + 1, 1))
    for _ in range(3):  # the first may come before the pass
        daemon.connection.send(Ping())
        assert daemon.receive() == Pong(), "it answers, and has no result yet"
    return frames


def test_a_worker_waits_for_layers_and_goes_on_with_what_came_meanwhile(daemon, pool, rig, prompt):
    frames = waiting_for_layers(daemon, pool, prompt, 50)
    daemon.start(52, prompt[:20], pool.allocate(2))
    daemon.connection.send(Layers(51, 2))
    daemon.connection.send(Layers(51, 3))
    tokens, _ = daemon.collect({51, 52})
    assert tokens == {51: rig.generate(prompt), 52: rig.generate(prompt[:20])}
    daemon.start(53, prompt, [*frames[:3], *pool.allocate(1)], cached=3, loading=True)
    daemon.connection.send(Layers(53, 2))
    daemon.connection.send(Cancel(53))
    tokens, done = daemon.collect({53})
    assert (tokens, done[53].reason) == ({}, "cancelled")


def test_interrupt_from_the_terminal_is_the_daemons_business(daemon, pool, rig):
    daemon.process.send_signal(signal.SIGINT)
    daemon.start(30, [1, 2, 3], pool.allocate(1))
    tokens, _ = daemon.collect({30})
    assert tokens[30] == rig.generate([1, 2, 3])


@pytest.mark.slow
def test_the_memory_outlives_a_killed_worker(daemon, pool, settings, rig, prompt):
    """A new worker goes on with the blocks that a dead one left, which was waiting for layers."""
    expected = rig.generate(prompt)
    frames = waiting_for_layers(daemon, pool, prompt, 40)
    daemon.process.kill()
    assert daemon.process.wait(TIMEOUT_S) == -signal.SIGKILL
    successor = Daemon(settings)
    try:
        assert successor.receive() == daemon.hello
        export = pool.memory.export()
        successor.connection.send(describe_memory(pool, export))
        send_export(successor.connection.socket, export)
        assert successor.receive() == Ready()
        successor.start(42, prompt, [*frames[:3], *pool.allocate(1)], cached=3)
        assert successor.collect({42})[0] == {42: expected}
        successor.connection.send(Shutdown())
        assert successor.process.wait(TIMEOUT_S) == 0
    finally:
        successor.close()


def mapped_bytes(pid: int) -> int:
    """Of the GPU tier's file, in the address space of a process."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if "prefixd-gpu-tier" in line]
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


@pytest.mark.parametrize("kv", ["virtual", "paged"])
@pytest.mark.slow
def test_frames_come_and_go_while_a_worker_runs(llama_directory: Path, rig, prompt, kv: str) -> None:
    """What left is mapped nowhere any more, and its memory is the system's again; what came is used."""
    daemon = Daemon(WorkerSettings(model=str(llama_directory), threads=1, max_step_tokens=64, kv=kv))
    try:
        pool = daemon.hand_over_memory(frames=6, most=16)
        nbytes = pool.frame_bytes
        descriptor = pool.memory._fd
        first = pool.allocate(4)
        daemon.start(1, prompt, first)
        assert daemon.collect({1})[0] == {1: rig.generate(prompt)}
        kept = pool.allocate(2)
        unused = 2 if kv == "paged" else 0  # block tables have all frames mapped
        assert mapped_bytes(daemon.process.pid) == (4 + unused) * nbytes
        before = os.fstat(descriptor).st_blocks * 512
        daemon.shrink(pool, first[1:])  # the ended request's addresses still have them
        assert mapped_bytes(daemon.process.pid) == (1 + unused) * nbytes
        assert before - os.fstat(descriptor).st_blocks * 512 == 3 * nbytes
        came = daemon.grow(pool, 6)
        assert came[:3] == first[1:] and max(came) > 5, "numbers come again, and beyond the first ones"
        assert os.fstat(descriptor).st_blocks * 512 == before + 3 * nbytes
        pool.free(first[:1])
        daemon.start(2, prompt, pool.allocate(4))
        daemon.start(3, prompt[:20], kept)
        tokens, _ = daemon.collect({2, 3})
        assert tokens == {2: rig.generate(prompt), 3: rig.generate(prompt[:20])}
        pool.check_integrity()
        daemon.connection.send(Shutdown())
        assert daemon.process.wait(TIMEOUT_S) == 0
    finally:
        daemon.close()
        pool.close()
        pool.memory.close()


@pytest.mark.slow
def test_a_worker_does_not_let_go_of_what_a_request_has(settings: WorkerSettings, prompt) -> None:
    """A daemon that breaks the rule finds out: the worker says so and ends."""
    daemon = Daemon(settings)
    try:
        pool = daemon.hand_over_memory(frames=6)
        frames = pool.allocate(2)
        daemon.start(1, prompt, frames)  # it wants more frames before it goes on
        assert isinstance(daemon.receive(), Step)
        daemon.connection.send(Shrink(np.array(frames[1:], np.int64).tobytes()))
        failed = daemon.receive()
        assert isinstance(failed, Failed) and f"frame {frames[1]} is to go, but a request has it" in failed.detail
    finally:
        daemon.close()
        pool.close()
        pool.memory.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_on_a_gpu_runs_on_the_daemons_chunks(wide_llama_directory: Path, dtype: str) -> None:
    """What the daemon created is filled in one process and read in the next one, after the first was killed."""
    settings = WorkerSettings(model=str(wide_llama_directory), device="cuda", dtype=dtype)
    prompt = np.random.default_rng(3).integers(0, 95, 100).tolist()
    first = Daemon(settings)
    try:
        pool = first.hand_over_memory(frames=24)
        tokens_a_block = first.hello.block_tokens
        blocks = -(-108 // tokens_a_block)
        frames = pool.allocate(blocks)
        first.start(1, prompt, frames)
        tokens, _ = first.collect({1})
        assert len(tokens[1]) == 8
    finally:
        first.close()
    cached = 100 // tokens_a_block
    second = Daemon(settings)
    try:
        assert second.receive() == first.hello
        export = pool.memory.export()
        second.connection.send(describe_memory(pool, export))
        send_export(second.connection.socket, export)
        assert isinstance(second.receive(), Ready)
        second.start(2, prompt, [*frames[:cached], *pool.allocate(blocks - cached)], cached=cached)
        again, _ = second.collect({2})
        if dtype == "float32":  # in 16 bits another order of the same sums may choose another token
            assert again[2] == tokens[1]
        else:
            assert len(again[2]) == 8
        second.connection.send(Shutdown())
        assert second.process.wait(TIMEOUT_S) == 0
    finally:
        second.close()
        pool.close()
        pool.memory.close()


@pytest.mark.slow
def test_a_worker_ends_with_its_socket(settings):
    daemon = Daemon(settings)
    try:
        assert isinstance(daemon.receive(), Hello)
        daemon.connection.close()
        assert daemon.process.wait(TIMEOUT_S) == 0
    finally:
        daemon.close()


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_reported_in_one_line(tmp_path):
    daemon = Daemon(WorkerSettings(model=str(tmp_path / "nothing")))
    try:
        failed = daemon.receive()
        assert isinstance(failed, Failed)
        assert failed.detail.startswith(f"model '{tmp_path}/nothing' is not a directory")
        with pytest.raises(ConnectionClosedError):
            daemon.receive()
        _, errors = daemon.process.communicate(timeout=TIMEOUT_S)
        assert daemon.process.returncode == 1
        assert b"Traceback" not in errors
    finally:
        daemon.close()
