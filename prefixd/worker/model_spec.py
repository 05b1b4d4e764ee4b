"""What a model needs, read from its configuration alone, and which models prefixd cannot run."""

from __future__ import annotations

import copy
import inspect
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig

from prefixd.worker.errors import ModelError
from prefixd.worker.memory_estimate import weights_bytes, working_bytes
from prefixd.worker.probe import PROBE_NAME, AttentionShape, probe, register_probe
from prefixd.worker.protocol import Hello
from prefixd.worker.settings import WorkerSettings
from prefixd_swap.block_size import explain_block_tokens, fill_chunks
from prefixd_swap.geometry import KvGeometry

CUDA_CHUNK_BYTES = 2 << 20
_DTYPES = ("float32", "bfloat16", "float16")
# Their rotary frequencies depend on how long the whole sequence is, so KV of a prefix is not a function
# of the prefix.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Other types are refused by what the layers ask for: not every model obeys its `layer_types`.
_RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "mamba", "recurrent"}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model in numbers; `config` is transformers' configuration of it.

    block_tokens_asked: what the settings asked for; `geometry` has what is used.
    step_tokens, sequences: most tokens and sequences of one step, by the settings.
    """

    path: Path
    config: Any
    geometry: KvGeometry
    chunk_bytes: int
    block_tokens_asked: int
    query_heads: int
    vocab_size: int
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    parameters: int
    device: torch.device
    step_tokens: int
    sequences: int

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
            weights_bytes=weights_bytes(self.parameters, geometry.element_bytes),
            working_bytes=working_bytes(
                self.config,
                max(getattr(self.config, "hidden_size", 0), self.query_heads * geometry.head_dim),
                geometry.element_bytes,
                self.step_tokens,
                self.sequences,
                on_cuda=self.device.type == "cuda",
            ),
            block_tokens_asked=self.block_tokens_asked,
            block_tokens_reason=explain_block_tokens(self.block_tokens_asked, geometry, self.chunk_bytes),
        )


def read_model_spec(settings: WorkerSettings) -> ModelSpec:
    """Read and check a model's configuration; the weights are not touched. Raises ModelError."""
    device = _device(settings.device)
    path = Path(settings.model)
    config = _read_config(path)
    try:
        return _read_spec(settings, device, path, config)
    except ModelError:
        raise
    except Exception as error:  # a model's own code runs there, and a wrong configuration may break it anywhere
        raise ModelError(
            f"model {str(path)!r} (model_type {config.model_type!r}) cannot be built from its config.json: "
            f"{type(error).__name__}: {_one_line(error)}"
        ) from error


def _read_spec(settings: WorkerSettings, device: torch.device, path: Path, config: Any) -> ModelSpec:
    _check_config(path, config)
    _check_class(path, config)
    limit = _count(path, config, "max_position_embeddings")
    max_model_tokens = min(settings.max_model_tokens or limit, limit)
    shape, architecture, parameters = _probe(path, config, max_model_tokens)
    asked = KvGeometry(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=_dtype(path, config, device) if settings.dtype == "auto" else settings.dtype,
        block_tokens=settings.block_tokens,
        layout=settings.layout,
    )
    chunk_bytes = settings.chunk_bytes or _chunk_bytes(device, asked)
    return ModelSpec(
        path=path,
        config=config,
        geometry=fill_chunks(asked, chunk_bytes),
        chunk_bytes=chunk_bytes,
        block_tokens_asked=settings.block_tokens,
        query_heads=shape.query_heads,
        vocab_size=_count(path, config, "vocab_size"),
        max_model_tokens=max_model_tokens,
        eos_token_ids=_eos_token_ids(path, config),
        architecture=architecture,
        parameters=parameters,
        device=device,
        step_tokens=settings.max_step_tokens,
        sequences=settings.max_sequences,
    )


def _chunk_bytes(device: torch.device, geometry: KvGeometry) -> int:
    """The device's chunk; on a CPU, where any number of pages will do, the largest that needs no rounding."""
    if device.type == "cuda":
        return CUDA_CHUNK_BYTES
    fitting = math.gcd(geometry.piece_bytes, CUDA_CHUNK_BYTES)
    return fitting if fitting % mmap.PAGESIZE == 0 else mmap.PAGESIZE


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
    except Exception as error:  # each configuration checks its fields in its own way, with errors of its own
        raise ModelError(f"config.json in {str(path)!r} cannot be read: {_one_line(error)}") from error


def _refusal(path: Path, config: Any, what: str) -> ModelError:
    """`what` continues the model's name: "has attention sinks"."""
    return ModelError(
        f"model {str(path)!r} (model_type {config.model_type!r}) {what}; "
        "this version of prefixd runs decoder-only text models with plain full attention in every layer"
    )


def _check_config(path: Path, config: Any) -> None:
    """Refuse what a configuration tells better than the model's code; the rest is for `_probe`."""
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(path, config, "is an encoder-decoder")
    if hasattr(config, "vision_config"):
        raise _refusal(path, config, "reads images (vision_config)")
    if config.get_text_config(decoder=True) is not config:
        raise _refusal(path, config, "is made of several models")
    if getattr(config, "kv_lora_rank", None):
        raise _refusal(path, config, f"has latent attention (kv_lora_rank={config.kv_lora_rank})")
    if layers & _RECURRENT_LAYERS:
        recurrent = ", ".join(sorted(layers & _RECURRENT_LAYERS))
        raise _refusal(path, config, f"has recurrent states (layers of type {recurrent})")
    if getattr(config, "num_kv_shared_layers", None):
        raise _refusal(path, config, "shares KV between layers (num_kv_shared_layers)")
    for rope_type in sorted(_rope_types(config) & _LENGTH_DEPENDENT_ROPE):
        raise _refusal(
            path,
            config,
            f"has rotary embeddings of type {rope_type!r}, which change with the length of the prompt",
        )


def _rope_types(config: Any) -> set[str]:
    """The type of the rotary embeddings, or of each kind of layer's."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return {str(kind.get("rope_type", kind.get("type"))) for kind in kinds}


def _check_class(path: Path, config: Any) -> None:
    """Refuse a class that does not let an attention function and a cache be given from outside."""
    try:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise _refusal(path, config, "has no causal language model in transformers") from error
    model_class = found[0] if isinstance(found, tuple) else found
    name = model_class.__name__
    if getattr(model_class, "_is_stateful", False):
        raise _refusal(path, config, f"has recurrent states ({name} is stateful)")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _refusal(
            path,
            config,
            f"has attention of its own ({name} takes no attention function), as models with attention biases do",
        )
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise _refusal(path, config, f"cannot select logits ({name} has no logits_to_keep)")


def _probe(path: Path, config: Any, tokens: int) -> tuple[AttentionShape, str, int]:
    """Build the model without memory and try it: its attention, its class and its number of parameters."""
    register_probe()
    config = copy.deepcopy(config)  # the probe's functions are written into it
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=PROBE_NAME, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        return probe(model.eval(), tokens), type(model).__name__, parameters
    except ModelError as error:
        raise _refusal(path, config, str(error)) from error


def _dtype(path: Path, config: Any, device: torch.device) -> str:
    if device.type == "cpu":  # few CPUs compute 16-bit types faster
        return "float32"
    dtype = getattr(config, "dtype", None) or torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(
            f"dtype {name!r} of {str(path)!r} is not supported; set the worker's dtype to one of {_DTYPES}"
        )
    return name


def _count(path: Path, config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json in {str(path)!r} has {name}={value!r}; prefixd needs one positive number")
    return value


def _eos_token_ids(path: Path, config: Any) -> tuple[int, ...]:
    """The generation config's end-of-sequence tokens, or, where it names none, the model config's.

    transformers' `generate` does not look at config.json when there is a generation_config.json. But such a file often
    has nothing but sampling parameters, and who serves it wants answers to end: vLLM, too, always stops at the
    tokenizer's end-of-sequence token, whatever the file says.
    """
    ids = getattr(config, "eos_token_id", None)
    if (path / "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_pretrained(path, local_files_only=True)
        except Exception as error:  # as with config.json
            raise ModelError(f"generation_config.json in {str(path)!r} cannot be read: {_one_line(error)}") from error
        ids = generation.eos_token_id if generation.eos_token_id is not None else ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
