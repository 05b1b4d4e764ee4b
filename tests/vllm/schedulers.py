"""vLLM's scheduler, with its caches and queues, without a model behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
"""Of a layer: 8 bytes of KV a token."""


def make_config(model: Path, *, asynchronous: bool, blocks: int, **arguments: Any) -> VllmConfig:
    """The configuration of an engine with so many KV blocks; `arguments` are vLLM's."""
    arguments = {"max_model_len": 2048, "max_num_batched_tokens": 2048, **arguments}
    config = EngineArgs(
        str(model), skip_tokenizer_init=True, dtype="float32", block_size=BLOCK, **arguments
    ).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous  # vLLM itself never chooses that for a CPU
    config.cache_config.num_gpu_blocks = blocks
    return config


def make_scheduler(
    config: VllmConfig,
    groups: Sequence[KVCacheGroupSpec],
    tensors: Sequence[KVCacheTensor] = (),
    transfer: KVTransferConfig | None = None,
) -> Any:
    """The scheduler that vLLM would choose for it."""
    config.kv_transfer_config = transfer
    blocks = config.cache_config.num_gpu_blocks
    assert blocks is not None
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, list(tensors), list(groups)),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def computed(scheduler: Any, output: Any) -> ModelRunnerOutput:
    """The model's part in a step: every request whose prompt is computed says 7."""
    names = list(output.num_scheduled_tokens)
    due = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
    return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, due)
