"""What a model needs, read from its configuration alone, and which models prefixd cannot run."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from prefixd.worker.attention import ATTENTION_NAME, register_attention
from prefixd.worker.errors import ModelError
from prefixd.worker.protocol import Hello
from prefixd.worker.settings import WorkerSettings
from prefixd_swap.geometry import KvGeometry

CUDA_CHUNK_BYTES = 2 << 20
_DTYPES = ("float32", "bfloat16", "float16")
# Their rotary frequencies depend on how long the whole sequence is, so KV of a prefix is not a function
# of the prefix.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model in numbers; `config` is transformers' configuration of it."""

    path: Path
    config: Any
    geometry: KvGeometry
    chunk_bytes: int
    query_heads: int
    vocab_size: int
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    parameters: int
    device: torch.device

    @property
    def sequence_capacity(self) -> int:
        """Tokens that a request's memory spans: the longest sequence in whole blocks."""
        return -(-self.max_model_tokens // self.geometry.block_tokens) * self.geometry.block_tokens

    def hello(self) -> Hello:
        """The worker's first message."""
        geometry = self.geometry
        return Hello(
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            dtype=geometry.dtype,
            block_tokens=geometry.block_tokens,
            layout=geometry.layout,
            chunk_bytes=self.chunk_bytes,
            vocab_size=self.vocab_size,
            max_model_tokens=self.max_model_tokens,
            eos_token_ids=self.eos_token_ids,
            architecture=self.architecture,
            parameters=self.parameters,
            device=str(self.device),
        )


def read_model_spec(settings: WorkerSettings) -> ModelSpec:
    """Read and check a model's configuration; the weights are not touched. Raises ModelError."""
    device = _device(settings.device)
    path = Path(settings.model)
    config = _read_config(path)
    _check_config(path, config)
    architecture, parameters = _check_architecture(path, config)
    dtype = _dtype(path, config) if settings.dtype == "auto" else settings.dtype
    query_heads = _count(path, config, "num_attention_heads")
    geometry = KvGeometry(
        layers=_count(path, config, "num_hidden_layers"),
        kv_heads=_count(path, config, "num_key_value_heads", query_heads),
        head_dim=_count(path, config, "head_dim", config.hidden_size // query_heads),
        dtype=dtype,
        block_tokens=settings.block_tokens,
        layout=settings.layout,
    )
    chunk_bytes = settings.chunk_bytes or _chunk_bytes(device, geometry)
    limit = _count(path, config, "max_position_embeddings")
    return ModelSpec(
        path=path,
        config=config,
        geometry=_round_up(geometry, chunk_bytes),
        chunk_bytes=chunk_bytes,
        query_heads=query_heads,
        vocab_size=_count(path, config, "vocab_size"),
        max_model_tokens=min(settings.max_model_tokens or limit, limit),
        eos_token_ids=_eos_token_ids(path, config),
        architecture=architecture,
        parameters=parameters,
        device=device,
    )


def _chunk_bytes(device: torch.device, geometry: KvGeometry) -> int:
    """The device's chunk; on a CPU, where any number of pages will do, the largest that needs no rounding."""
    if device.type == "cuda":
        return CUDA_CHUNK_BYTES
    fitting = math.gcd(geometry.piece_bytes, CUDA_CHUNK_BYTES)
    return fitting if fitting % mmap.PAGESIZE == 0 else mmap.PAGESIZE


def _round_up(geometry: KvGeometry, chunk_bytes: int) -> KvGeometry:
    """The geometry with the fewest `block_tokens`, from those asked for up, that fill whole chunks."""
    piece_token_bytes = geometry.token_bytes // geometry.pieces
    step = chunk_bytes // math.gcd(chunk_bytes, piece_token_bytes)
    rounded = KvGeometry(
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=geometry.dtype,
        block_tokens=-(-geometry.block_tokens // step) * step,
        layout=geometry.layout,
    )
    rounded.check_chunk(chunk_bytes)
    return rounded


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is unknown to torch; use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name!r} is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ModelError(f"device {name!r} is not there: torch {torch.__version__} sees {count} GPUs; use cpu")
        device = torch.device("cuda", device.index or 0)
    return device


def _read_config(path: Path) -> Any:
    if not path.is_dir():
        raise ModelError(f"model {str(path)!r} is not a directory; give one with config.json and the weights")
    if not (path / "config.json").is_file():
        raise ModelError(f"model directory {str(path)!r} has no config.json; give a Hugging Face model's directory")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"config.json in {str(path)!r} cannot be read: {_one_line(error)}") from error


def _check_config(path: Path, config: Any) -> None:
    """Refuse models whose KV is not one full-attention group, or depends on more than the prefix."""

    def refuse(what: str) -> ModelError:
        return ModelError(
            f"model {str(path)!r} (model_type {config.model_type!r}) {what}; "
            "prefixd's worker runs decoder-only text models with full attention in every layer"
        )

    if getattr(config, "is_encoder_decoder", False):
        raise refuse("is an encoder-decoder")
    if config.get_text_config(decoder=True) is not config:
        raise refuse("is made of several models")
    if getattr(config, "num_attention_heads", None) is None or hasattr(config, "state_size"):
        raise refuse("has no attention heads (a state-space model)")
    if getattr(config, "is_causal", True) is False:
        raise refuse("has bidirectional attention")
    if getattr(config, "kv_lora_rank", None):
        raise refuse("has latent attention (kv_lora_rank)")
    if getattr(config, "num_kv_shared_layers", None):
        raise refuse("shares KV between layers (num_kv_shared_layers)")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise refuse(f"has a sliding window of {window} tokens")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other:
        raise refuse(f"has layers of type {', '.join(other)}")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", rope.get("type"))
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise refuse(f"has rotary embeddings of type {rope_type!r}, which change with the length of the prompt")


def _check_architecture(path: Path, config: Any) -> tuple[str, int]:
    """Build the model without memory: its class and number of parameters."""
    register_attention()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION_NAME, trust_remote_code=False
            )
    except (ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"model {str(path)!r} (model_type {config.model_type!r}) has no causal language model "
            f"in transformers: {_one_line(error)}"
        ) from error
    if not getattr(model, "_supports_attention_backend", False) or getattr(model, "_is_stateful", False):
        raise ModelError(
            f"architecture {type(model).__name__} of {str(path)!r} does not take an attention function from "
            "outside; use Llama, Qwen, Mistral or another with transformers' attention interface"
        )
    return type(model).__name__, sum(parameter.numel() for parameter in model.parameters())


def _dtype(path: Path, config: Any) -> str:
    dtype = getattr(config, "dtype", None) or torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(
            f"dtype {name!r} of {str(path)!r} is not supported; set the worker's dtype to one of {_DTYPES}"
        )
    return name


def _count(path: Path, config: Any, name: str, default: int | None = None) -> int:
    value = getattr(config, name, None)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json in {str(path)!r} has {name}={value!r}; prefixd needs one positive number")
    return value


def _eos_token_ids(path: Path, config: Any) -> tuple[int, ...]:
    """The generation config's end-of-sequence tokens, or the model config's."""
    ids = getattr(config, "eos_token_id", None)
    if (path / "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"generation_config.json in {str(path)!r} cannot be read: {_one_line(error)}") from error
        ids = generation.eos_token_id if generation.eos_token_id is not None else ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
