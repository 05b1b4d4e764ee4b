"""An engine that is gone, and the next one that remembers: vLLM with prefixd, offline.

    prefixd serve                                  # in another terminal
    python examples/vllm/chat.py --model DIR       # in vLLM's environment, with prefixd installed into it

Starts a vLLM engine, asks it a few questions about one long document, ends it, and does the same with a second
engine. The second one computes nothing of the document: its KV comes from the daemon. Run the script again and the
first one does not either.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from pathlib import Path
from typing import Any

# Before vLLM is imported. The engine then runs in the process that made it, which is enough for a script.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

DOCUMENT = (
    "The archive keeps a placement of every ship that entered the harbour, what it carried and who paid for it. " * 40
)
QUESTIONS = ("Who keeps the placement?", "What does it say of a ship?", "Who paid?")
HITS = "vllm:external_prefix_cache_hits"
ASKED = "vllm:prompt_tokens"


def prompts(tokenizer: Any) -> list[Any]:
    """The document before each question; as made-up token ids where the model has no tokenizer."""
    if tokenizer is not None:
        return [f"{DOCUMENT}\n\n{question}" for question in QUESTIONS]
    document = [7 + 31 * number % 4001 for number in range(900)]
    return [{"prompt_token_ids": [*document, *range(first, first + 40)]} for first in (100, 200, 300)]


def run_engine(name: str, model: str, address: str | None) -> None:
    """One engine from start to end; prints what it did not have to compute."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    has_tokenizer = any(Path(model).glob("tokenizer*"))
    llm = LLM(
        model=model,
        enforce_eager=True,
        max_model_len=2048,
        skip_tokenizer_init=not has_tokenizer,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PrefixdConnector",
            kv_connector_module_path="prefixd.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"address": address} if address else {},
        ),
    )
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=has_tokenizer)
    for prompt in prompts(llm.get_tokenizer() if has_tokenizer else None):
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
        print(f"{name}: {answer.outputs[0].text or list(answer.outputs[0].token_ids)}", flush=True)
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    print(f"{name}: {counted[HITS]} of {counted[ASKED]} prompt tokens came from prefixd", flush=True)
    llm.llm_engine.engine_core.shutdown()  # what is still to be saved is saved now


def main() -> None:
    """Two engines, one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory with a model that vLLM can serve")
    parser.add_argument("--address", help="the daemon, unix:/path (by default where `prefixd serve` listens)")
    options = parser.parse_args()
    for name in ("first engine", "second engine"):
        engine = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(name, options.model, options.address)
        )
        engine.start()
        engine.join()
        if engine.exitcode:
            raise SystemExit(f"{name}: ended with status {engine.exitcode}; see above")


if __name__ == "__main__":
    main()
