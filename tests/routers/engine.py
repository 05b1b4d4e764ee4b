"""A vLLM with prefixd's connector that publishes KV events; run in vLLM's environment. Reads a prompt a line, a JSON
list of token ids; writes a line when it was computed and saved."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest, connector
from benchmarks.engines.vllm_models import save_llama


def main(address: str, endpoint: str) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": endpoint}
    options = {"recompute_if_slower": False}
    with tempfile.TemporaryDirectory() as folder:
        model = save_llama(Path(folder) / "llama")
        with EngineProcess(
            model,
            log=Path(folder) / "log",
            kv_transfer=connector(address, **options),
            kv_events_config=events,
        ) as engine:
            print("ready", flush=True)
            for line in sys.stdin:
                engine.generate([EngineRequest(json.loads(line), 1)])
                engine.wait_until_idle()
                print("saved", flush=True)


main(*sys.argv[1:])
