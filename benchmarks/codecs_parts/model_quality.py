"""What a codec does to a model's answers: the next tokens behind a prefix whose keys and values were coded and decoded.

prefix     512 tokens    computed; its keys and values, rounded to 16 bits, are the exact ones
coded      by each codec, block by block, as a disk keeps them, and decoded
following   48 tokens    of the same text, scored behind the exact ones and behind the decoded ones
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
import transformers

from prefixd_swap.codecs.codec import Refused
from prefixd_swap.codecs.coding import Coding, code, decode_object
from prefixd_swap.codecs.part_shape import Axis, PartShape
from prefixd_swap.codecs.registry import find_codec

CODECS: Final = ("lossless", "int8", "k8v4")
MOST_KL: Final = {"lossless": 0.0, "int8": 1e-4, "k8v4": 1.8e-3}
"""Nats; what SmolLM2-135M has is below it."""
LEAST_TOP1: Final = {"lossless": 1.0, "int8": 0.98, "k8v4": 0.975}
ORDER: Final[tuple[Axis, ...]] = ("token", "layer", "kv", "head", "channel")
_KV_ORDER: Final[tuple[Axis, ...]] = ("layer", "kv", "token", "head", "channel")
_TO_PART: Final = [_KV_ORDER.index(axis) for axis in ORDER]
_FROM_PART: Final = [ORDER.index(axis) for axis in _KV_ORDER]


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of a codec on one model, over all texts.

    Attributes:
        codec: its name.
        block_tokens: tokens of a block.
        size: stored bytes over exact ones, headers among them.
        kl: mean Kullback-Leibler divergence of the next token's distribution from the one behind exact bytes, in nats.
        largest_kl: of the worst token.
        same_top1: share of tokens at which the most likely next one is the same.
        rms_error: of the worst layer of all blocks, see `LayerErrors`.
        largest_error: likewise.
        refused: share of the blocks that stayed exact.
    """

    codec: str
    block_tokens: int
    size: float
    kl: float
    largest_kl: float
    same_top1: float
    rms_error: float
    largest_error: float
    refused: float

    def rounded(self) -> dict[str, Any]:
        """For a result."""
        figures = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}


@dataclass(slots=True)
class _Sums:
    """What the blocks of a codec come to."""

    exact_bytes: int = 0
    stored_bytes: int = 0
    blocks: int = 0
    refused: int = 0
    rms: float = 0.0
    largest: float = 0.0


def measure_quality(
    model: Any,
    texts: Iterable[Sequence[int]],
    block_tokens: Sequence[int] = (16, 64),
    following: int = 48,
    codecs: Sequence[str] = CODECS,
    step: Callable[[], None] = lambda: None,
) -> list[Quality]:
    """The figures of each codec and block size.

    Args:
        model: a causal model of transformers, in float32, whose layers all keep keys and values of all tokens.
        texts: tokens of each text: a prefix of whole blocks, and `following` more.
        block_tokens: the sizes of blocks.
        following: tokens that are scored.
        codecs: names.
        step: called after each text.
    """
    ways = [(codec, size) for size in block_tokens for codec in codecs]
    sums = {way: _Sums() for way in ways}
    divergences: dict[tuple[str, int], list[torch.Tensor]] = {way: [] for way in ways}
    same: dict[tuple[str, int], list[torch.Tensor]] = {way: [] for way in ways}
    for text in texts:
        prefix, rest = text[:-following], text[-following:]
        exact = keys_and_values(model, prefix)
        expected = score(model, exact, rest)
        for way in ways:
            scored = score(model, _through(exact, *way, sums[way]), rest)
            divergences[way].append((expected.exp() * (expected - scored)).sum(-1))
            same[way].append(expected.argmax(-1) == scored.argmax(-1))
        step()
    return [_quality(*way, sums[way], torch.cat(divergences[way]), torch.cat(same[way])) for way in ways]


def violations(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is not within `MOST_KL` and `LEAST_TOP1`, in words."""
    broken = []
    for row in rows:
        codec, tokens = row["codec"], row["block_tokens"]
        most, least = MOST_KL[codec], LEAST_TOP1[codec]
        if row["kl"] > most:
            broken.append(f"{codec}, blocks of {tokens}: the divergence is {row['kl']:.3g}, more than {most:g}")
        if row["same_top1"] < least:
            broken.append(f"{codec}, blocks of {tokens}: same_top1 is {row['same_top1']:.4g}, less than {least:g}")
    return broken


def draw_quality(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws the divergence of each lossy codec over the bytes that it stores."""
    lossy = [row for row in rows if row["kl"] > 0]
    for size in sorted({row["block_tokens"] for row in lossy}):
        of_size = [row for row in lossy if row["block_tokens"] == size]
        axes.plot([row["size"] for row in of_size], [row["kl"] for row in of_size], "o", label=f"blocks of {size}")
        for row in of_size:
            axes.annotate(f"  {row['codec']}, top-1 {row['same_top1']:.3f}", (row["size"], row["kl"]), fontsize=7)
    axes.set_yscale("log")
    axes.margins(x=0.5, y=0.2)
    axes.set_xlabel("stored bytes / exact bytes")
    axes.set_ylabel("KL divergence of the next token, nats")
    axes.set_title("SmolLM2-135M behind decoded keys and values", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def keys_and_values(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Keys and values of a prompt as a tier would have them: bfloat16 [layers, 2, tokens, heads, channels]."""
    with torch.no_grad():
        cache = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1).past_key_values
    layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
    return torch.stack(layers).transpose(2, 3).to(torch.bfloat16)


def score(model: Any, kept: torch.Tensor, following: Sequence[int]) -> torch.Tensor:
    """Logarithms of the probabilities of the token after each of `following`: float64 [following, vocabulary].

    Args:
        model: as for `measure_quality`.
        kept: what `keys_and_values` gave for the tokens before.
        following: tokens.
    """
    cache = transformers.DynamicCache(config=model.config)
    for number, (keys, values) in enumerate(kept.to(model.dtype).transpose(2, 3)):
        cache.update(keys[None], values[None], number)
    with torch.no_grad():
        logits = model(torch.tensor([following]), past_key_values=cache).logits
    return torch.log_softmax(logits[0].double(), -1)


def _through(exact: torch.Tensor, codec: str, block_tokens: int, sums: _Sums) -> torch.Tensor:
    """Keys and values as they come back from a disk with this codec."""
    blocks = exact.split(block_tokens, dim=2)
    return torch.cat([_block_through(block, codec, sums) for block in blocks], dim=2)


def _block_through(block: torch.Tensor, codec: str, sums: _Sums) -> torch.Tensor:
    layers, _, tokens, heads, channels = block.shape
    shape = PartShape("bfloat16", layers, tokens, heads, channels, ORDER)
    part = block.permute(_TO_PART).contiguous().view(torch.int16).reshape(-1).numpy().view(np.uint8)
    coded = code(part, Coding(find_codec(codec), shape))
    sums.blocks += 1
    sums.exact_bytes += part.size
    if isinstance(coded, Refused):
        sums.refused += 1
        sums.stored_bytes += part.size
        return block
    sums.stored_bytes += coded.data.size
    into = np.empty(part.size, np.uint8)
    decoded = decode_object(coded.data, into)
    sums.rms, sums.largest = max(sums.rms, decoded.rms), max(sums.largest, decoded.largest)
    return torch.from_numpy(into.view(np.int16)).view(torch.bfloat16).view(shape.sizes).permute(_FROM_PART)


def _quality(codec: str, block_tokens: int, sums: _Sums, divergence: torch.Tensor, same: torch.Tensor) -> Quality:
    return Quality(
        codec,
        block_tokens,
        sums.stored_bytes / sums.exact_bytes,
        float(divergence.mean()),
        float(divergence.max()),
        float(same.double().mean()),
        sums.rms,
        sums.largest,
        sums.refused / sums.blocks,
    )
