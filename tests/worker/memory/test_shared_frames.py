"""Frames that come and go in a process that attached them, on host memory and on CUDA."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixd.base.sampling import Sampling
from prefixd.serving.models.worker_channel import describe_memory
from prefixd.worker_protocol.framing import Connection, from_worker
from prefixd.worker_protocol.protocol import Done, Grow, Ready, Shrink, Shrunk, Shutdown, Start
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import FrameId, FramePool, create_memory, send_export
from tests.swap.conftest import used_bytes

pytestmark = pytest.mark.slow

CHILD = Path(__file__).with_name("shared_frames_child.py")
STAND_IN = "PREFIXD_TEST_STAND_IN" in os.environ
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not STAND_IN and not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
    ],
)


@pytest.mark.parametrize("kv", ["virtual", "paged"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_what_leaves_goes_back_to_the_device_and_what_comes_is_the_same_memory(device: str, kv: str) -> None:
    memory = create_memory(device, 64 << 10 if device == "cpu" else None)
    geometry = KvGeometry(2, 2, memory.chunk_bytes // 64, "float32", block_tokens=4)
    pool = FramePool(memory, geometry.block_bytes, 6, most=40)
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    arguments = [sys.executable, str(CHILD), str(theirs.fileno()), kv, json.dumps(asdict(geometry))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = Connection(ours, from_worker())
    with subprocess.Popen(arguments, pass_fds=[theirs.fileno()], env=environment) as child:
        theirs.close()
        try:
            export = memory.export()
            worker.send(describe_memory(pool, export))
            send_export(ours, export)
            assert worker.receive() == Ready()

            def run(number: int, frames: list[FrameId]) -> None:
                worker.send(
                    Start(
                        id=number,
                        tokens=b"",
                        generated=0,
                        cached_blocks=0,
                        frames=frames,
                        sampling=Sampling(max_tokens=1),
                    )
                )
                assert worker.receive() == Done(number, "length")
                assert {value for frame in frames for value in content(pool, frame)} == {number}

            first = pool.allocate(4)
            run(1, first)
            run(2, first[2:])  # elsewhere, so that two idle rows map them
            full = used_bytes(memory)
            leaving = first[1:]
            pool.withdraw(leaving)
            encoded = np.array(leaving, np.int64).tobytes()
            for _ in range(2):  # who asks again, because destroying failed, gets the same answer
                worker.send(Shrink(encoded))
                assert worker.receive() == Shrunk(encoded)
            pool.destroy(leaving)
            pool.forget(leaving)
            assert full - used_bytes(memory) == 3 * geometry.block_bytes
            new = pool.create(20)
            export = memory.export_run(range(new.chunks[0], new.chunks[-1] + 1))
            frames = np.array(new.frames, np.int64).tobytes()
            worker.send(Grow(export.meta, export.count, frames, new.chunks.tobytes()))
            send_export(ours, export)
            pool.admit(new)
            run(3, [FrameId(21), leaving[0]])
            run(4, [first[0]])
            pool.check_integrity()
            worker.send(Shutdown())
            assert child.wait(60) == 0
        finally:
            ours.close()
            pool.close()
            memory.close()


def content(pool: FramePool, frame: FrameId) -> list[float]:
    """The different numbers in a frame, as the daemon sees it."""
    count, offset = pool.frame_bytes // 4, frame * pool.frame_bytes
    found: list[float] = pool._window.tensor((count,), torch.float32, offset=offset).unique().tolist()
    return found
