"""The option `codec_on_device` in a real vLLM on a CPU: what is refused, and int8 made by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from benchmarks.engines.vllm_engine import EngineFailed, EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.integrations.vllm.coded_groups import paged_layers
from tests.integrations.vllm import test_part_shapes as stand_ins
from tests.integrations.vllm.test_coded_groups import engine_pages, numbers_of
from tests.vllm import test_part_shapes as shapes
from tests.vllm.served import NewRequests, StartEngine, always, cacheable, make_prompt, run
from tests.vllm.test_codecs import from_disk

PLAIN = "benchmarks.engines.vllm_plain_pages"
LENGTHS = (200, 129, 97, 180, 145, 113)


def transfer(daemon: DaemonProcess, **options: Any) -> dict[str, Any]:
    """The connector for attention whose pages are plain, as a GPU's."""
    return {**always(daemon.address, **options), "kv_connector_module_path": PLAIN}


@pytest.mark.parametrize(
    ("layout", "page_tokens"), [*((layout.name, 16) for layout in KVCacheLayout), ("LBNHC", 64), ("LBHNC", 64)]
)
def test_kernels_find_keys_and_values_in_memory_that_vllm_has_laid_out(layout: str, page_tokens: int) -> None:
    """vLLM's kernels read 16 tokens at a time."""
    layer = shapes.Layer(shapes.HEADS, 32)
    engine = shapes.engine_of(KVCacheLayout[layout], layer, page_tokens=page_tokens, codec_on_device="int8")
    layers = paged_layers(*engine_pages(engine), plain=True)
    assert layers.pages == page_tokens // 16
    numbers = stand_ins.fill(engine, [3, 1])
    assert torch.equal(numbers_of(layers.parts(np.array([[3, 1]], np.int64))), numbers)


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        ("float32", "KV cache group 0 is of float32, not of bfloat16 or float16"),
        ("bfloat16", "KV cache group 0 has pages in which the connector does not know where keys and values lie"),
    ],
)
def test_an_engine_whose_pages_cannot_be_coded_does_not_start(
    dtype: str, says: str, llama: Path, daemon: DaemonProcess, make_engine: StartEngine
) -> None:
    engine = make_engine(llama, daemon, {"codec_on_device": "int8"}, dtype=dtype)
    with pytest.raises(EngineFailed):
        engine.start()
    assert f'codec_on_device = "int8": {says}' in engine.log.read_text()


@pytest.mark.parametrize("made_by", ["codec", "kernels"])
def test_loaded_prefixes_are_what_the_daemons_codec_makes_of_them(
    made_by: str, llama: Path, daemon: DaemonProcess, make_engine: StartEngine, new_requests: NewRequests
) -> None:
    """The same tokens as with `int8` on the daemon's disk: keys and values have the same bits. The prompts are the same
    in every run, and many: behind altered blocks some have other answers."""
    if made_by == "kernels" and (
        os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None
    ):
        pytest.skip("needs Triton, and TRITON_INTERPRET=1")
    requests = [EngineRequest(make_prompt(10_000 + length, length), 24) for length in LENGTHS]
    with make_engine(llama, None, kv_transfer=transfer(daemon, codec="int8"), dtype="bfloat16") as engine:
        (probe,) = new_requests(200)
        run(engine, [probe])
        exact, _ = run(engine, requests)
        altered = from_disk(daemon, engine, requests, probe)
    coded = transfer(daemon, codec_on_device="int8")
    if made_by == "codec":
        coded["kv_connector_module_path"] = "tests.vllm.codec_connector"
    with make_engine(llama, None, kv_transfer=coded, dtype="bfloat16") as engine:
        assert run(engine, requests) == (exact, 0), "no block is shared with the other engine"
        assert run(engine, requests) == run(engine, requests) == (altered, cacheable(requests))
        run(engine, [probe])
        assert from_disk(daemon, engine, requests, probe) == altered
    assert altered != exact
    with Client(daemon.address) as client:
        known = {each.namespace.layout: each.namespace for each in client.stats().namespaces}
    plain, objects = known["vllm"], known["vllm-int8"]
    assert objects.codec == "exact" and objects.parts[0].nbytes < 0.6 * plain.parts[0].nbytes
