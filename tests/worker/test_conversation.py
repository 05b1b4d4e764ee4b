"""The worker's loop, on a connection without a socket."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from prefixd.base.sampling import Sampling
from prefixd.serving.models.worker_channel import describe_memory
from prefixd.worker import conversation
from prefixd.worker.load_graphs import load_graphs
from prefixd.worker.memory.shared_frames import SharedFrames
from prefixd.worker.readiness import Readiness
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.errors import ModelError
from prefixd.worker_protocol.protocol import Done, Extend, Hello, Memory, Ready, Shutdown, Start, Step
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.vmem import FramePool, create_memory
from prefixd_swap.vmem.backends import linux


class Script:
    """Hands out messages, the next one whenever the worker has nothing to compute; at the end, Shutdown."""

    socket = None

    def __init__(self, *messages: object) -> None:
        self.messages = [*messages, Shutdown()]
        self.sent: list[object] = []
        self.polls: list[float | None] = []

    def poll(self, timeout_s: float | None) -> bool:
        self.polls.append(timeout_s)
        return timeout_s is None

    def receive(self) -> object:
        return self.messages.pop(0)

    def send(self, message: object) -> None:
        self.sent.append(message)


class Eager(Script):
    """Hands out messages as soon as it is asked; None says that there is none just now."""

    def poll(self, timeout_s: float | None) -> bool:
        super().poll(timeout_s)
        if self.messages[0] is None:
            self.messages.pop(0)
            return False
        # At the end, Shutdown: not before there is nothing to compute.
        return len(self.messages) > 1 or timeout_s is None


def test_a_request_without_frames_lets_the_worker_sleep(rig, prompt):
    """It waits for the daemon's next message without computing, and without asking over and over."""
    first, second = rig.frames(2), rig.frames(2)
    sampling = Sampling(max_tokens=3, ignore_eos=True)
    tokens = np.array(prompt, "<u4").tobytes()
    start = Start(id=1, tokens=tokens, generated=0, cached_blocks=0, frames=first, sampling=sampling)
    script = Script(start, Extend(1, second))
    conversation._run(script, rig.engine, cast(SharedFrames, None), rig.kv)
    steps = [message for message in script.sent if isinstance(message, Step)]
    assert [step.computed_tokens for step in steps] == [32, 18, 1, 1]
    assert script.sent[-1] == Done(1, "length")
    assert script.polls == [None, 0.0, None, 0.0, 0.0, 0.0, None], "one poll a step, and sleep between"


def test_the_memory_is_taken_before_weights_are_loaded(llama_directory, monkeypatch):
    """Loading can take minutes; the daemon gives up on descriptors that nobody takes long before that."""
    taken = []

    def load(spec, *, paged, operators, note):
        assert not paged and operators == "model"
        assert taken == [0]
        raise ModelError("these weights are damaged")

    with create_memory("cpu", 4096) as memory:
        memory.create(2)
        export = memory.export()
        descriptors = (taken.append(index) or export.open(index) for index in range(export.count))
        monkeypatch.setattr(conversation, "recv_export", lambda socket, count: descriptors)
        monkeypatch.setattr(conversation, "load_model", load)
        script = Script(Memory(export.meta, export.count, bytes(8), bytes(8), 1, 4096))
        with pytest.raises(ModelError, match="damaged"):
            conversation.serve(script, WorkerSettings(model=str(llama_directory)), iter(range(9)).__next__)
    assert [type(message) for message in script.sent] == [Hello]


def test_on_a_cpu_a_request_joins_the_next_pass(llama_directory, prompt, monkeypatch):
    """Its memory is mapped when it comes, by the thread that computes: so it misses no pass while others run."""
    mapped_by = []

    def map_file(*arguments):
        mapped_by.append(threading.current_thread())
        return map_now(*arguments)

    def start(request, tokens, frames):
        encoded, sampling = np.array(tokens, "<u4").tobytes(), Sampling(max_tokens=3, ignore_eos=True)
        return Start(id=request, tokens=encoded, generated=0, cached_blocks=0, frames=frames, sampling=sampling)

    settings = WorkerSettings(model=str(llama_directory))
    hello = read_model_spec(settings).hello()
    with create_memory("cpu", hello.chunk_bytes) as memory:
        pool = FramePool(memory, hello.frame_bytes, 16)
        export = memory.export()
        descriptors = (export.open(index) for index in range(export.count))
        monkeypatch.setattr(conversation, "recv_export", lambda socket, count: descriptors)
        map_now = linux.map_file
        monkeypatch.setattr(linux, "map_file", map_file)
        first, second = pool.allocate(4), pool.allocate(4)
        script = Eager(describe_memory(pool, export), start(1, prompt, first), None, start(2, prompt[:20], second))
        conversation.serve(script, settings, itertools.count().__next__)
        pool.close()
    steps = [message for message in script.sent if isinstance(message, Step)]
    assert [step.computed_tokens for step in steps] == [len(prompt), 1 + 20, 2, 1]
    assert mapped_by and set(mapped_by) == {threading.main_thread()}


@pytest.mark.parametrize(
    ("settings", "device", "reason"),
    [
        ({"cuda_graphs": False}, "cuda:0", ""),
        ({}, "cpu", ""),
        ({"kv": "paged"}, "cuda:0", 'worker.kv is "paged"; CUDA graphs need "virtual"'),
        ({}, "cuda:0", "no flash attention for float32 KV with a head size of 16 on cuda:0; CUDA graphs need it"),
    ],
)
def test_why_there_are_no_cuda_graphs(rig, model, settings, device, reason):
    asked = WorkerSettings(model="", **settings)
    spec: Any = SimpleNamespace(device=torch.device(device), geometry=model.spec.geometry)
    kv: Any = object() if asked.kv == "paged" else rig.kv
    said: list[object] = []
    readiness = Readiness(said.append)
    assert load_graphs(asked, spec, model, kv, readiness, lambda: 0.0) is None and not said
    readiness.send()
    assert said == [Ready(False, reason)]
