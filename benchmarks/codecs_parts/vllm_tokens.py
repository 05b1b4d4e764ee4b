"""Tokens that change where blocks come from disk by a codec: `benchmarks.vllm --model codecs`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.codecs_parts.smollm2 import NAME, model_folder
from benchmarks.codecs_parts.texts import passages
from benchmarks.common import harness
from benchmarks.engines.vllm_chat import BLOCK
from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest, connector
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client

CODECS = ("lossless", "int8", "k8v4")
_PLAIN = "benchmarks.engines.vllm_plain_pages"


def measure(options: Namespace) -> dict[str, Any]:
    """A row for each codec; under `broken` what does not hold. Raises BenchmarkError without the model's package."""
    from transformers import AutoTokenizer

    model = model_folder()
    texts = passages(AutoTokenizer.from_pretrained(model).encode, options.round_tokens)
    requests = [EngineRequest(text, options.output_tokens) for text in texts]
    with harness.progress("codecs", len(CODECS)) as step:
        rows = []
        for codec in CODECS:
            rows.append(_through_disk(codec, model, requests, options))
            step()
    broken = [f"{row['codec']}: no prompt was loaded" for row in rows if not row["hit_tokens"]]
    if rows[0]["differing_tokens"]:
        broken.append("lossless blocks changed tokens")
    return {"model_name": NAME, "rows": rows, "broken": broken}


def _through_disk(codec: str, model: Path, requests: list[EngineRequest], options: Namespace) -> dict[str, Any]:
    """Computes and saves the prompts, starts engine and daemon again, and asks the same with blocks from disk."""
    blocks = 2 + sum(-(-(len(each.prompt) + each.max_tokens) // BLOCK) for each in requests)
    # What is slow on a busy machine must not be computed again.
    patient = {"recompute_if_slower": False, "timeout_s": 120, **dict(options.option)}
    with DaemonProcess({"cpu.bytes": "1GiB", "disk.bytes": "2GiB", "disk.codec": codec}) as daemon:
        # Lossy codecs find keys and values in plain pages alone, which vLLM has on GPUs.
        transfer = {**connector(daemon.address, **patient), "kv_connector_module_path": _PLAIN}
        arguments = {"threads": options.threads, "block_size": BLOCK, "num_gpu_blocks_override": blocks}
        with EngineProcess(model, kv_transfer=transfer, max_model_len=1024, **arguments) as engine:
            exact = engine.generate(requests)
            engine.wait_until_idle()
        with Client(daemon.address, name="benchmark") as client:
            client.flush()
        daemon.restart()
        with EngineProcess(model, kv_transfer=transfer, max_model_len=1024, **arguments) as engine:
            loaded = engine.generate(requests)
            hit_tokens = engine.metrics().external_hits
        with Client(daemon.address, name="benchmark") as client:
            on_disk = client.stats().stored
    pairs = [(one.token_ids, other.token_ids) for one, other in zip(exact, loaded, strict=True)]
    tokens = sum(len(one) for one, _ in pairs)
    differing = sum(first != second for one, other in pairs for first, second in zip(one, other, strict=True))
    return {
        "codec": codec,
        "size": round(on_disk.stored_bytes / on_disk.exact_bytes, 4),
        "rms_error": max((round(each.value, 5) for each in on_disk.rms_error), default=0.0),
        "hit_tokens": hit_tokens,
        "tokens": tokens,
        "differing_tokens": differing,
        "differing_share": round(differing / tokens, 4),
        "answers": len(pairs),
        "differing_answers": sum(one != other for one, other in pairs),
        "differing_first_tokens": sum(one[0] != other[0] for one, other in pairs),
    }
