"""Images on CUDA memory, against transformers: attention in both directions within an image, rotary positions of three
dimensions, layers that attend to images.

With a GPU the model runs there too; with the stand-in driver on the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from prefixd.worker.spec.kv_groups import CUDA_CHUNK_BYTES
from tests.worker.images.test_images import Vision, picture, text

STAND_IN = "PREFIXD_TEST_STAND_IN" in os.environ

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STAND_IN and not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "mllama"])
def test_requests_with_images_beside_text(name: str, rig_type: type, tmp_path: Path) -> None:
    device = "cpu" if STAND_IN else "cuda"
    vision = Vision(name, tmp_path, device=device, dtype="float32", chunk_bytes=CUDA_CHUNK_BYTES)
    rig = rig_type(vision.model, 24, max_step_tokens=32, device="cuda", requests=4)
    prompts = [
        vision.prompt(text(6, 37)),
        vision.prompt(text(7, 18), picture(5), text(8, 23)),
        vision.prompt(picture(6), text(9, 30), picture(5, 28, 56)),
    ]
    try:
        requests = [rig.start(prompt.tokens, images=prompt.images) for prompt in prompts]
        rig.run()
        assert [rig.tokens[request] for request in requests] == [vision.greedy(prompt) for prompt in prompts]
        assert [rig.done[request].encoded_images for request in requests] == [0, 1, 2]
    finally:
        rig.close()
