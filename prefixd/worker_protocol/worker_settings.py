"""The settings that the daemon passes to a worker on its command line."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from prefixd.worker_protocol.errors import WorkerError

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker's settings, passed as JSON.

    model: directory of a Hugging Face model (config.json and weights).
    dtype: of weights and KV; "auto" takes the one in config.json, on a CPU float32.
    device: "cpu", "cuda" or "cuda:N".
    block_tokens: asked for; a piece of a block is a whole number of chunks, so a block may have more.
    block_padding: what tokens may be padded for short blocks, see `prefixd_swap.block_size.choose_blocks`.
    layout: how a block's bytes lie, see `prefixd_swap.group_shape.KvGeometry`.
    chunk_bytes: unit of GPU-tier memory; 0 takes 2 MiB on CUDA, and on a CPU what fits the block.
    max_model_tokens: longest prompt plus output; 0 takes the model's.
    max_step_tokens: most tokens that one forward pass computes, as far as decoding leaves room.
    max_sequences: most requests at a time, counting those that have ended and wait for the device.
    cuda_graphs: replay decode passes as CUDA graphs, on CUDA where attention is flash attention over virtual tensors.
    prompt_graphs: with `cuda_graphs`, replay passes with short prompts, too.
    cuda_graphs_seconds: most seconds to capture graphs when the model is loaded; 0: they are captured when first used.
    operators: how far the model's layers are rewritten to have fewer operators, see `worker.operators`; "auto": "fused"
        on CUDA, "model" on a CPU.
    async_scheduling: on CUDA, queue a pass before the tokens of the one before it are read; not with a draft.
    attention: which kernels compute attention on CUDA, see `prefixd.settings.inference.WorkerSettings`.
    attention_costs: file with the costs of the device, by which "auto" chooses; empty: what comes with prefixd.
    kv: "virtual" keeps every request in contiguous addresses (vTensor), "paged" in blocks behind a table.
    groups: "by_rule" keeps of each layer what its rule needs, "one" has one page size and one rule for all layers, for
        comparison; see `plan_groups`.
    draft_model: directory of a small model that proposes tokens, which the model checks; empty: none.
    draft_tokens: how many it proposes at a time.
    threads: of torch on a CPU; 0 takes torch's default.
    images_per_prompt: most images of a prompt.
    pixels_fd: descriptor of the memory file with images' pixels; -1 without.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    block_tokens: Positive = 16
    block_padding: Literal["auto", "none", "any"] = "auto"
    layout: Literal["token", "layer"] = "token"
    chunk_bytes: NotNegative = 0
    max_model_tokens: NotNegative = 0
    max_step_tokens: Positive = 512
    max_sequences: Positive = 64
    cuda_graphs: bool = True
    async_scheduling: bool = True
    prompt_graphs: bool = True
    cuda_graphs_seconds: NotNegative = 20
    operators: Literal["auto", "model", "merged", "fused"] = "auto"
    attention: Literal["auto", "plain", "split", "triton", "extents", "flex"] = "auto"
    attention_costs: str = ""
    kv: Literal["virtual", "paged"] = "virtual"
    groups: Literal["by_rule", "one"] = "by_rule"
    draft_model: str = ""
    draft_tokens: Positive = 4
    threads: NotNegative = 0
    images_per_prompt: Positive = 16
    pixels_fd: int = -1


def encode_settings(settings: WorkerSettings) -> str:
    """The JSON for `--config`."""
    return msgspec.json.encode(settings).decode()


def decode_settings(text: str) -> WorkerSettings:
    """Reads `--config`. Raises WorkerError that names the wrong field."""
    try:
        return msgspec.json.decode(text, type=WorkerSettings)
    except msgspec.DecodeError as error:
        raise WorkerError(f"worker settings {text!r} are not valid: {error}") from error
