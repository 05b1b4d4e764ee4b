"""Random models of the sizes of an 8B and a 1B one, made on the device."""

from __future__ import annotations

import functools
import gc
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.engines.varlen_reference import varlen_reference
from benchmarks.gpu_parts.rig.device import CHUNK_BYTES, Device
from benchmarks.gpu_parts.rig.part import Unavailable
from prefixd.worker.attention.attention import ATTENTION_NAME, register_attention
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.model import CausalModel
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.worker_settings import WorkerSettings

LONGEST_TOKENS = 33 << 10
_SPARE_BYTES = 6 << 30  # for activations and the logits
_VOCAB = 128256
_SHARED_MEMORY = Path("/dev/shm")

Size = Literal["8b", "1b"]
_SHAPES: Mapping[Size, Mapping[str, int]] = {
    "8b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1b": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
"""Of Llama 3.1 8B and of Llama 3.2 1B."""


@functools.lru_cache(maxsize=1)
def random_model(device: Device, size: Size = "8b") -> CausalModel:
    """A Llama of the shape of an 8B or 1B one, the 8B one with as many layers as memory allows; on no disk.

    Raises Unavailable when not even four layers fit. `random_model.cache_clear()` lets go of it.
    """
    config = _config(device, size)
    with tempfile.TemporaryDirectory(prefix="prefixd-model-") as folder:
        config.save_pretrained(folder)
        spec = read_model_spec(
            WorkerSettings(
                model=folder,
                device=str(device.torch_device),
                dtype="bfloat16" if device.measures else "float32",
                chunk_bytes=CHUNK_BYTES,
                max_model_tokens=min(LONGEST_TOKENS, config.max_position_embeddings),
            )
        )
    register_attention()
    torch.manual_seed(0)
    with torch.device(device.torch_device):
        model: Any = AutoModelForCausalLM.from_config(
            spec.config, dtype=getattr(torch, spec.geometry.dtype), attn_implementation=ATTENTION_NAME
        )
    # Without a GPU, what stands in for its kernel, so that passes have the same shapes.
    attention = None if device.measures else FlashAttention(varlen_reference)
    made = CausalModel(spec, model.eval().requires_grad_(False), attention)
    made.check()
    return made


def shape(model: CausalModel) -> dict[str, Any]:
    """The model in a result."""
    geometry = model.spec.geometry
    return {
        "parameters": model.spec.parameters,
        "layers": geometry.layers,
        "dtype": geometry.dtype,
        "layout": geometry.layout,
        "block_tokens": geometry.block_tokens,
        "token_bytes": geometry.token_bytes,
        "attention": type(model.attention).__name__,
    }


@contextmanager
def saved_model(device: Device, size: Size = "8b") -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder with a random model, for `worker.model`, as long as the context; and its `shape`.

    It lies in shared memory where that has room: a disk may take longer to write and to read it than all else does.
    This process keeps no copy of the weights.
    """
    model = random_model(device, size)
    described, nbytes = shape(model), 2 * model.spec.parameters * (1 if device.measures else 2)
    room = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    where = _SHARED_MEMORY if device.measures and room > 2 * nbytes else None
    with tempfile.TemporaryDirectory(prefix="prefixd-model-", dir=where) as folder:
        begin = time.monotonic()
        model._model.save_pretrained(folder)
        described["written_s"] = round(time.monotonic() - begin, 1)
        del model
        random_model.cache_clear()
        gc.collect()
        if device.measures:
            torch.cuda.empty_cache()
        yield Path(folder), described


def random_tokens(seed: int, count: int) -> list[int]:
    """Token ids of the model's vocabulary."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, 256, count).tolist()
    return drawn


def _layers(device: Device) -> int:
    free = device.free_bytes()
    for layers in (_SHAPES["8b"]["num_hidden_layers"], 16, 8, 4):
        kv = 3 * LONGEST_TOKENS * layers * 4096
        parameters = layers * 218_000_000 + 2 * _VOCAB * 4096
        if 2 * parameters + kv + _SPARE_BYTES <= free:
            return layers
    raise Unavailable(f"{free} bytes are free on the device, too few for four layers of an 8B model")


def _config(device: Device, size: Size) -> Any:
    common: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    if device.measures:
        layers = {"num_hidden_layers": _layers(device)} if size == "8b" else {}
        widths: dict[str, Any] = {**_SHAPES[size], **layers}
        return LlamaConfig(vocab_size=_VOCAB, max_position_embeddings=64 << 10, **widths, **common)
    return LlamaConfig(
        vocab_size=256,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        initializer_range=0.2,
        **common,
    )
