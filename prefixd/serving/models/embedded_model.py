"""The model that comes with prefixd: random weights and a byte-level tokenizer, built on first use.

Its output makes no sense, but it is a real Llama: with it every path of the daemon runs without a download.
Its output is printable ASCII, depends on the whole prompt, and is the same on every machine.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import float32
    from numpy.random import PCG64
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

VERSION = 2  # part of the directory's name: change it with anything below that changes the files
VOCAB_SIZE = 272  # 256 bytes, 3 special tokens, padded to a multiple of 16
BOS, EOS, PAD = 256, 257, 258
MAX_TOKENS = 8192
_SEED = 20250
_PRINTABLE = range(0x20, 0x7F)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def ensure_embedded_model(cache_directory: Path) -> Path:
    """The embedded model's directory under `cache_directory`; built if it is not there (95 MB, seconds).

    Safe against concurrent callers: the directory appears complete or not at all. Raises OSError if the cache
    cannot be written.
    """
    target = cache_directory / f"embedded-v{VERSION}"
    if target.is_dir():
        return target
    log.info("building the embedded model in %s, once: 95 MB, some seconds", target)
    cache_directory.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache_directory))
    try:
        _save_model(building)
        _tokenizer().save_pretrained(building)
        _make_durable(building)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _save_model(directory: Path) -> None:
    """8 layers of width 512, 8 query and 4 KV heads of 64, in float32: 16 KiB of KV a token."""
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in LlamaForCausalLM(config).named_parameters()}
    source = np.random.PCG64(_SEED)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            scale = 1.0 if "embed_tokens" in name else _gain(name) * shape[1] ** -0.5
            weights[name] = torch.from_numpy(_uniform(source, shape[0] * shape[1])).view(shape) * scale
    # Only printable characters are ever chosen: the logits of all others are zero, and the largest of the 95 logits of
    # printable ones is above zero.
    silent = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    silent[_PRINTABLE.start : _PRINTABLE.stop] = False
    weights["lm_head.weight"][silent] = 0.0
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _uniform(source: PCG64, count: int) -> NDArray[float32]:
    """Uniform numbers of variance 1, made of integers and exact operations: equal bits on every machine."""
    import numpy as np

    raw = source.random_raw((count + 1) // 2).view(np.uint32)[:count]
    return ((raw >> 8).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)) * np.float32(12**0.5)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, whose id is the byte's value; the rest of the vocabulary are special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<pad>", *[f"<unused{index}>" for index in range(VOCAB_SIZE - 259)]]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=MAX_TOKENS,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers (the table is GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _gain(name: str) -> float:
    """Larger weights for queries and keys, so that attention is sharp; and for its output, so that it has an effect."""
    if "q_proj" in name or "k_proj" in name:
        return 2.6
    if "down_proj" in name:
        return 0.5
    return 2.0 if "o_proj" in name or "lm_head" in name else 1.0


def _make_durable(directory: Path) -> None:
    """Makes the files readable for everyone, and syncs them before the directory gets its name."""
    for path in [*directory.iterdir(), directory]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
