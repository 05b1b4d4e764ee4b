"""Models whose layers keep different things, on CUDA memory, against transformers.

With a GPU the model runs there too; against the stand-in driver (`tests/swap/test_cuda_stand_in.py`) on the CPU. In
32-bit numbers attention on a GPU is the kernel in Triton, or FlexAttention if that is asked for, and the same greedy
tokens come out. Gemma 2 caps logits, GPT-OSS has sinks.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixd.worker.model import load_model
from prefixd.worker.spec.kv_groups import CUDA_CHUNK_BYTES
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.worker_settings import WorkerSettings
from tests.worker.tiny_models import WINDOWED, build_grouped

STAND_IN = "PREFIXD_TEST_STAND_IN" in os.environ
OUTPUT = 12

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STAND_IN and not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]


# On the CPU all ways are one.
WAYS = [("auto", "virtual")] if STAND_IN else [("auto", "virtual"), ("flex", "virtual"), ("auto", "paged")]


# A block of llama4_text, in chunks of 2 MiB, has more tokens than its chunks of attention.
@pytest.mark.parametrize(("attention", "kv"), WAYS)
@pytest.mark.parametrize("name", [name for name in WINDOWED if name != "llama4_text"])
def test_a_batch_generates_what_transformers_does(
    name: str, attention: str, kv: str, rig_type: type, tmp_path: Path
) -> None:
    reference = build_grouped(name)
    reference.save_pretrained(tmp_path)
    settings = WorkerSettings(
        model=str(tmp_path),
        device="cpu" if STAND_IN else "cuda",
        dtype="float32",
        chunk_bytes=CUDA_CHUNK_BYTES,
        attention=attention,
        kv=kv,
    )
    rig = rig_type(load_model(read_model_spec(settings), paged=kv == "paged"), 24, device="cuda", requests=4, kv=kv)
    try:
        prompts = [
            np.random.default_rng(seed).integers(3, 90, count).tolist() for seed, count in ((1, 5), (2, 70), (3, 33))
        ]
        requests = [rig.start(prompt, max_tokens=OUTPUT, temperature=0.0) for prompt in prompts]
        rig.run()
        assert [rig.tokens[request] for request in requests] == [_greedy(reference, prompt) for prompt in prompts]
    finally:
        rig.close()


def _greedy(reference: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    reference.generation_config.eos_token_id = None
    with torch.inference_mode():
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT, do_sample=False, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()
