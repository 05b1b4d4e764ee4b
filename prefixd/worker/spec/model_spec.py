"""Reads a model's specification from its configuration alone, and refuses models that prefixd cannot run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)

from prefixd.base.rules.rules import SlidingWindow
from prefixd.worker.images import (
    EncoderSize,
    attention_names,
    cross_geometry,
    image_kind,
    image_shape,
    read_processor,
    reads_images,
)
from prefixd.worker.images.kinds import KINDS
from prefixd.worker.recurrent import StateLayout, state_shapes
from prefixd.worker.spec.draft_check import check_draft
from prefixd.worker.spec.kv_groups import KvGroups, plan_groups, with_images
from prefixd.worker.spec.memory_estimate import device_bytes
from prefixd.worker.spec.probe import PROBE_NAME, AttentionLayer, probe, register_probe
from prefixd.worker.spec.tiles import tile_tokens
from prefixd.worker_protocol.errors import ModelError
from prefixd.worker_protocol.protocol import Hello, ImageShape, embedding_frames
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.group_shape import ELEMENT_BYTES, KvGeometry, Layout

_NO_LIMIT = 1 << 16
"""Tokens of a request where the model names no limit, as those without attention do not."""
_DTYPES = ("float32", "bfloat16", "float16")
# Their rotary frequencies depend on how long the whole sequence is, so KV of a prefix is not a function
# of the prefix.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model in numbers; `config` is transformers' configuration of it.

    groups: its KV groups; with a draft, those of both. attention: its attention layers.
    block_tokens_asked: tokens of a block by the settings; `groups` has the number that is used.
    step_tokens, sequences: most tokens and sequences of one step, by the settings.
    images: how it takes images; None for a model of text alone.
    images_per_prompt: most images of a prompt, by the settings.
    encoder: what embeds them.
    draft: the model that proposes tokens, if there is one; its `groups` are its own. draft_tokens: how many in a round.
    pixels_fd: of the memory with the pixels of images, by the settings.
    attention_way, attention_costs: `worker.attention`, and the file with the costs of this device; empty: none.
    """

    path: Path
    config: Any
    groups: KvGroups
    attention: tuple[AttentionLayer, ...]
    dtype: str
    layout: Layout
    block_tokens_asked: int
    vocab_size: int
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    parameters: int
    device: torch.device
    step_tokens: int
    sequences: int
    images: ImageShape | None = None
    images_per_prompt: int = 0
    encoder: EncoderSize | None = None
    draft: ModelSpec | None = None
    draft_tokens: int = 0
    pixels_fd: int = -1
    attention_way: str = "auto"
    attention_costs: str = ""

    @property
    def images_apart(self) -> bool:
        """Whether the model takes images that follow each other directly for one."""
        kind = image_kind(self.config)
        return kind is not None and kind.apart

    @property
    def whole_image(self) -> int:
        """Tokens of an image that must be in one pass; 0 if none must."""
        return int(self.config.mm_tokens_per_image) if self.images is not None and self.images.both_ways else 0

    @property
    def sequence_capacity(self) -> int:
        """Tokens that a request's memory spans: the longest sequence in whole blocks."""
        return -(-self.max_model_tokens // self.block_tokens) * self.block_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.groups.block_tokens

    @property
    def block_frames(self) -> int:
        """Frames that a block takes in all groups of attention layers."""
        return self.groups.block_frames

    @property
    def state_frames(self) -> int:
        """Frames that a state takes; 0 for a model without."""
        return 0 if self.groups.state is None else self.groups.state.frames

    @property
    def block_slots(self) -> int:
        """Numbers that name the frames of a block; see `KvGroups.slots`."""
        return self.groups.block_slots

    @property
    def state_slots(self) -> int:
        """Numbers that name the frames of a state; 0 for a model without."""
        return 0 if self.groups.state is None else self.groups.slots(self.groups.state)

    @property
    def window_margin(self) -> int:
        """Blocks before the first token that the token this many before the next one sees are not read.

        A window's first block is read as a whole, so only reads before that block count. On a GPU there are none: the
        rules keep what its kernels read (`READ_BLOCK`). On a CPU a window is rounded up to whole tiles (`first_key`),
        and blocks are multiples of tiles:

        ```
        tiles and blocks of 8, a window of 11 tokens, the next query is token 29

        0        8          16   19    24     29
        | gone   | read, hidden  | seen       |        16 - 10 = 6, and (29 - 10 - 6) // 8 = 1 block is gone
        ```
        Chunks consist of whole blocks, and nothing before them is read. A draft may be a token behind.
        """
        rules = [group.rule for group in self.groups.attention]
        windows = [rule.tokens for rule in rules if isinstance(rule, SlidingWindow)]
        tile = tile_tokens(self.block_tokens) if self.device.type == "cpu" else 1
        draft_behind = 0 if self.draft is None else 1
        return max((-(window - 1) % tile for window in windows), default=0) + draft_behind

    @property
    def image_capacity(self) -> int:
        """Most images of a prompt."""
        return min(self.images_per_prompt, self.max_model_tokens)

    @property
    def image_frames(self) -> int:
        """Frames that an image takes; 0 for a model without layers that attend to images alone."""
        return 0 if self.groups.cross is None else self.groups.cross.frames

    @property
    def image_slots(self) -> int:
        """Numbers that name the frames of an image; 0 as `image_frames`."""
        return 0 if self.groups.cross is None else self.groups.slots(self.groups.cross)

    @property
    def layers_apart(self) -> int:
        """Layers of a block that may come one after the other; 0 with several groups, a rule or images."""
        group, plain = self.groups.attention[:1], self.groups.plain and self.groups.cross is None
        return len(group[0].layers) if plain and len(self.groups.attention) == 1 and self.images is None else 0

    def embedding_frames(self, rows: int) -> int:
        """Frames of an image's embedding of so many rows; 0 for a model that keeps none."""
        row_bytes = 0 if self.images is None else self.images.row_bytes
        return embedding_frames(rows, row_bytes, self.groups.frame_bytes)

    @property
    def geometry(self) -> KvGeometry:
        """The shape of the first group of attention layers, of most models the only one."""
        return self.groups.attention[0].geometry

    def hello(self) -> Hello:
        """The worker's first message."""
        weights, working = device_bytes(self)
        return Hello(
            groups=self.groups.shapes,
            needs=self.groups.needs,
            whole_pages=self.groups.whole_pages,
            frame_bytes=self.groups.frame_bytes,
            dtype=self.dtype,
            block_tokens=self.block_tokens,
            layout=self.layout,
            chunk_bytes=self.groups.chunk_bytes,
            vocab_size=self.vocab_size,
            max_model_tokens=self.max_model_tokens,
            eos_token_ids=self.eos_token_ids,
            architecture=self.architecture,
            parameters=self.parameters,
            device=str(self.device),
            weights_bytes=weights,
            working_bytes=working,
            block_tokens_asked=self.block_tokens_asked,
            block_tokens_reason=self.groups.explain_block_tokens(self.block_tokens_asked),
            token_bytes=sum(group.geometry.token_bytes for group in self.groups.attention),
            token_memory=sum(group.geometry.token_memory for group in self.groups.attention),
            window_margin=self.window_margin,
            images=self.images,
            image_group=None if self.groups.cross is None else self.groups.cross.shape,
        )


def read_model_spec(settings: WorkerSettings) -> ModelSpec:
    """Read and check a model's configuration, and its draft's; the weights are not touched. Raises ModelError."""
    spec = _read_alone(settings)
    if not settings.draft_model:
        return spec
    draft = _read_alone(
        msgspec.structs.replace(
            settings, model=settings.draft_model, dtype=spec.dtype, max_model_tokens=spec.max_model_tokens
        )
    )
    check_draft(spec, draft)
    try:
        groups = _plan(settings, spec.device, spec.dtype, spec.max_model_tokens, spec.attention, draft=draft.attention)
    except ModelError as error:
        raise ModelError(f"model {str(spec.path)!r} with the draft {str(draft.path)!r} {error}") from error
    draft = replace(draft, groups=groups.draft)
    return replace(spec, groups=groups, draft=draft, draft_tokens=settings.draft_tokens)


def _read_alone(settings: WorkerSettings) -> ModelSpec:
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
    text = config.get_text_config(decoder=True)
    images = image_shape(config)
    processor = None if images is None else read_processor(path)
    limit = _count(path, text, "max_position_embeddings") if hasattr(text, "max_position_embeddings") else _NO_LIMIT
    max_model_tokens = min(settings.max_model_tokens or limit, limit)
    dtype = _dtype(path, config, device) if settings.dtype == "auto" else settings.dtype
    if images is not None and images.kind == "rows":
        row_bytes = _count(path, text, "hidden_size") * ELEMENT_BYTES[dtype]
        images = msgspec.structs.replace(images, row_bytes=row_bytes)
    attention, states, architecture, parameters = _probe(path, config, max_model_tokens, dtype)
    try:
        groups = _plan(settings, device, dtype, max_model_tokens, attention, states)
        if images is not None and images.kind == "cross":
            groups = with_images(groups, text.cross_attention_layers, cross_geometry(config, dtype))
    except ModelError as error:
        raise _refusal(path, config, str(error)) from error
    return ModelSpec(
        path=path,
        config=config,
        groups=groups,
        attention=tuple(attention),
        dtype=dtype,
        layout=settings.layout,
        block_tokens_asked=settings.block_tokens,
        vocab_size=_count(path, text, "vocab_size"),
        max_model_tokens=max_model_tokens,
        eos_token_ids=_eos_token_ids(path, config),
        architecture=architecture,
        parameters=parameters,
        device=device,
        step_tokens=settings.max_step_tokens,
        sequences=settings.max_sequences,
        images=images,
        images_per_prompt=settings.images_per_prompt,
        encoder=None if images is None else EncoderSize.of(config, processor, max_model_tokens),
        pixels_fd=settings.pixels_fd,
        attention_way=settings.attention,
        attention_costs=settings.attention_costs,
    )


def _plan(
    settings: WorkerSettings,
    device: torch.device,
    dtype: str,
    max_tokens: int,
    attention: Sequence[AttentionLayer],
    states: StateLayout | None = None,
    draft: Sequence[AttentionLayer] = (),
) -> KvGroups:
    return plan_groups(
        attention,
        states,
        dtype=dtype,
        block_tokens=settings.block_tokens,
        layout=settings.layout,
        max_tokens=max_tokens,
        chunk_bytes=settings.chunk_bytes or None,
        on_cuda=device.type == "cuda",
        padding=settings.block_padding,
        by_rule=settings.groups == "by_rule",
        draft=draft,
        whole_pages=settings.kv == "paged",
    )


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
        "this version of prefixd runs decoder-only text models of attention and recurrent layers"
    )


def _check_config(path: Path, config: Any) -> None:
    """Refuse models by their configuration where its fields give a clearer reason; `_probe` refuses the others."""
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(path, config, "is an encoder-decoder")
    text = config.get_text_config(decoder=True)
    if reads_images(config):
        if image_kind(config) is None:
            raise _refusal(path, config, f"reads images (vision_config) as none of {', '.join(KINDS)} does")
    elif text is not config:
        raise _refusal(path, config, "is made of several models")
    for rope_type in sorted(_rope_types(text) & _LENGTH_DEPENDENT_ROPE):
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
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if reads_images(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        found: Any = mapping[type(config)]
    except KeyError as error:
        raise _refusal(path, config, "has no causal language model in transformers") from error
    model_class = found[0] if isinstance(found, tuple) else found
    name = model_class.__name__
    stateful = getattr(model_class, "_is_stateful", False)
    # Stateful models take an attention function although this flag is not set: the probe checks them.
    if not stateful and not getattr(model_class, "_supports_attention_backend", False):
        raise _refusal(
            path,
            config,
            f"has attention of its own ({name} takes no attention function), as models with attention biases do",
        )
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise _refusal(path, config, f"cannot select logits ({name} has no logits_to_keep)")


def _probe(
    path: Path, config: Any, tokens: int, dtype: str
) -> tuple[list[AttentionLayer], StateLayout | None, str, int]:
    """Build the model without memory and try it: its attention, its states, its class and its number of parameters."""
    register_probe()
    config = copy.deepcopy(config)  # the probe's functions are written into it
    names = attention_names(config, PROBE_NAME)
    with torch.device("meta"):
        model = auto_class(config).from_config(
            config, attn_implementation=names, dtype=getattr(torch, dtype), trust_remote_code=False
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        shapes = state_shapes(model.eval())
        model.set_attn_implementation(names)
        layers = probe(model, tokens)
    except ModelError as error:
        raise _refusal(path, config, str(error)) from error
    return layers, StateLayout(shapes) if shapes else None, type(model).__name__, parameters


def auto_class(config: Any) -> Any:
    """transformers' class that makes a model with a head for text."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


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

    transformers' `generate` ignores config.json if there is a generation_config.json. But such a file often has only
    sampling parameters, and served answers have to end: vLLM, too, always stops at the tokenizer's end-of-sequence
    token, whatever the file says.
    """
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        ids = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
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
