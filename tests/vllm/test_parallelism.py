"""Parallelism that is refused when a real vLLM starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engines.vllm_engine import EngineFailed
from benchmarks.engines.vllm_models import save_mla
from prefixd.workloads.daemon_process import DaemonProcess
from tests.vllm.served import StartEngine


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2: each stage has other layers"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size = 2: each rank has some of a block's tokens",
        ),
    ],
)
def test_what_splits_layers_or_tokens_is_refused(
    daemon: DaemonProcess, make_engine: StartEngine, tmp_path: Path, arguments: dict[str, int], words: str
) -> None:
    model = save_mla(tmp_path / "mla")
    engine = make_engine(model, daemon, distributed_executor_backend="mp", **arguments)
    with pytest.raises(EngineFailed):
        engine.start()
    assert words in engine.log.read_text()
