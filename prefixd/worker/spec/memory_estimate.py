"""Estimates a model's device memory besides the KV, from its configuration alone.

The daemon sizes the GPU tier (`gpu.bytes = "auto"`) before the weights are loaded, so that loading and creating the
tier go on side by side.

- **weights**: every parameter in the worker's type, and 5% for buffers and for the tensor that is being loaded.
- **a step**: for each token: the hidden states (residual, normed, queries, keys, values, output of attention: 8 widths)
  and the MLP's (gate, up, product: 3 widths, times the experts of a token). For each sequence: its logits in float32,
  sorted once for the filters (4 vocabularies).
- **an image**: for each patch as for a token of a step, and what transformers keeps until the end (`EncoderSize`). The
  encoder runs before the step, so the larger of both counts. Attention reads patches in tiles, as flash attention does.

A margin of half, and on CUDA 1.5 GiB for what the driver, the libraries' work spaces, the allocator's rounding and
CUDA graphs take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixd.worker.images import EncoderSize
from prefixd_swap.group_shape import ELEMENT_BYTES

if TYPE_CHECKING:
    from prefixd.worker.spec.model_spec import ModelSpec

_CUDA_BYTES = 3 << 29
_WEIGHTS_MARGIN = 1.05
_WORKING_MARGIN = 1.5
_HIDDEN_WIDTHS = 8
_MLP_WIDTHS = 3
_LOGITS = 4


def device_bytes(spec: ModelSpec) -> tuple[int, int]:
    """Bytes of a model's weights, and of its working memory. Model and draft compute one after the other."""
    element_bytes = ELEMENT_BYTES[spec.dtype]
    weights = int(spec.parameters * element_bytes * _WEIGHTS_MARGIN)
    text = spec.config.get_text_config(decoder=True)
    widest = max((layer.query_heads * layer.head_dim for layer in spec.attention), default=0)
    decoding = spec.sequences * (1 + spec.draft_tokens)
    tokens = most_pass_tokens(spec.step_tokens, decoding, spec.block_tokens, spec.whole_image)
    working = step_bytes(text, max(getattr(text, "hidden_size", 0), widest), element_bytes, tokens, decoding)
    if spec.images is not None:  # the embeddings of a pass, where frames give copies of them
        working += tokens * spec.images.row_bytes
    if spec.encoder is not None:
        working = max(working, encoder_bytes(spec.encoder, element_bytes))
    if spec.groups.cross is not None:  # of an image, until it is copied into frames
        working += spec.groups.cross.geometry.block_bytes
    if spec.device.type == "cuda":
        working += _CUDA_BYTES
    if spec.draft is None:
        return weights, working
    of_draft = device_bytes(spec.draft)
    return weights + of_draft[0], max(working, of_draft[1])


def most_pass_tokens(step_tokens: int, decoding: int, block_tokens: int, whole_image: int) -> int:
    """Most tokens of a pass: `step_tokens`, unless the tokens that are never left out are more.

    Those are `decoding` tokens of requests that decode, and of a prompt a block, or an image that must be in one pass
    (`whole_image` tokens; 0: none must).
    """
    return max(step_tokens, decoding + max(block_tokens, whole_image))


def step_bytes(config: Any, hidden: int, element_bytes: int, tokens: int, sequences: int) -> int:
    """Bytes of one step's activations.

    Args:
        config: transformers' configuration of the model.
        hidden: width of the hidden states.
        element_bytes: of the activations' type.
        tokens: most tokens of a step.
        sequences: most sequences of a step.
    """
    widths = getattr(config, "intermediate_size", None) or 4 * hidden
    mlp = max(widths) if isinstance(widths, list | tuple) else int(widths)  # Gemma 3n has one for each layer
    mlp *= int(getattr(config, "num_experts_per_tok", None) or 1)
    per_token = (_HIDDEN_WIDTHS * hidden + _MLP_WIDTHS * mlp) * element_bytes
    per_sequence = _LOGITS * int(config.vocab_size) * 4
    return int((tokens * per_token + sequences * per_sequence) * _WORKING_MARGIN)


def encoder_bytes(size: EncoderSize, element_bytes: int) -> int:
    """Bytes of the activations of a vision encoder for the largest image, its embedding included."""
    per_patch = (_HIDDEN_WIDTHS + size.kept_layers) * size.hidden + _MLP_WIDTHS * size.mlp + size.other
    numbers = size.patches * per_patch + size.masks * size.patches**2
    return int(numbers * element_bytes * _WORKING_MARGIN)
