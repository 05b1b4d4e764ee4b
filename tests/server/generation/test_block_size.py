"""What the worker does otherwise than its settings ask for: told in the log, once, and in the figures."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from prefixd.v1 import admin_pb2
from tests.daemons import Remote

pytestmark = pytest.mark.slow

READY = admin_pb2.WorkerStats.STATE_READY
TOKEN = (
    "16 tokens asked, 64 used: a token takes 512 bytes and blocks must fill whole chunks of 64 KiB (lcm 64 KiB); "
    'tokens are padded to 1 KiB, 100% more GPU memory; worker.block_padding = "none" has no padding and blocks of 128'
)
LAYER = (
    "16 tokens asked, 256 used: a token takes 256 bytes in each of 2 layers and a block's pieces must fill whole "
    "chunks of 64 KiB (lcm 64 KiB)"
)


@pytest.mark.parametrize(
    ("layout", "padding", "block_tokens", "memory", "reason"),
    [("token", "auto", 64, 1024, TOKEN), ("layer", "none", 256, 512, LAYER)],
)
def test_blocks_that_fill_chunks(
    launch: Callable[..., Remote],
    with_model: dict[str, str | int],
    layout: str,
    padding: str,
    block_tokens: int,
    memory: int,
    reason: str,
) -> None:
    chosen = {"worker.layout": layout, "worker.block_padding": padding}
    remote = launch({**with_model, "gpu.chunk_bytes": "64KiB", "worker.kv": "virtual", **chosen})
    worker = remote.until(lambda stats: stats.worker.state == READY).worker
    assert (worker.token_bytes, worker.token_memory) == (512, memory)
    assert (worker.block_tokens, worker.block_tokens_asked) == (block_tokens, 16)
    assert worker.block_tokens_reason == reason
    assert (worker.kv, worker.layout, worker.cuda_graphs) == ("virtual", layout, False)
    assert worker.cuda_graphs_reason == "", "nobody expects them on a CPU"
    if layout == "token":  # what comes after a death does not depend on the layout
        os.kill(worker.pid, signal.SIGKILL)
        again = remote.until(lambda stats: stats.worker.restarts == 1 and stats.worker.state == READY).worker
        assert again.block_tokens_reason == reason
    assert remote.daemon.log.read_text().count(reason) == 1


def test_blocks_as_asked(model_daemon: Remote) -> None:
    worker = model_daemon.stats().worker
    assert (worker.block_tokens, worker.block_tokens_asked, worker.block_tokens_reason) == (16, 16, "")
    assert "tokens asked" not in model_daemon.daemon.log.read_text()
