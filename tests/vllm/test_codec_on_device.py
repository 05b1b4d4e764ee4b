"""The option `codec_on_device` in a real vLLM on a CPU: what is refused, and int8 made by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.vllm_engine import EngineFailed, EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.vllm.served import NewRequests, StartEngine, always, cacheable, make_prompt, run
from tests.vllm.test_codecs import from_disk

PLAIN = "benchmarks.engines.vllm_plain_pages"
LENGTHS = (200, 129, 97)


def transfer(daemon: DaemonProcess, **options: Any) -> dict[str, Any]:
    """The connector for attention whose pages are plain, as a GPU's."""
    return {**always(daemon.address, **options), "kv_connector_module_path": PLAIN}


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


def test_loaded_prefixes_are_what_the_daemons_codec_makes_of_them(
    llama: Path, daemon: DaemonProcess, make_engine: StartEngine, new_requests: NewRequests
) -> None:
    """The same tokens as with `int8` on the daemon's disk: keys and values have the same bits."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, and TRITON_INTERPRET=1")
    requests = [EngineRequest(make_prompt(number, length), 12) for number, length in enumerate(LENGTHS)]
    with make_engine(llama, None, kv_transfer=transfer(daemon, codec="int8"), dtype="bfloat16") as engine:
        (probe,) = new_requests(200)
        run(engine, [probe])
        exact, _ = run(engine, requests)
        altered = from_disk(daemon, engine, requests, probe)
    coded = transfer(daemon, codec_on_device="int8")
    with make_engine(llama, None, kv_transfer=coded, dtype="bfloat16") as engine:
        assert run(engine, requests) == (exact, 0), "no block is shared with the other engine"
        assert run(engine, requests) == run(engine, requests) == (altered, cacheable(requests))
    assert altered != exact
    with Client(daemon.address) as client:
        known = {each.namespace.layout: each.namespace for each in client.stats().namespaces}
    plain, objects = known["vllm"], known["vllm-int8"]
    assert objects.codec == "exact" and objects.parts[0].nbytes < 0.6 * plain.parts[0].nbytes
