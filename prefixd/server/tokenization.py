"""Text to token ids and back, with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from prefixd.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:  # importing it takes a second, which a sidecar without a model need not wait
    from transformers import PreTrainedTokenizerFast


class TextCodec:
    """A model directory's tokenizer.

    Raises:
        ConfigError: the directory has none, or not a fast one.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model directory {str(model)!r} has no tokenizer that can be loaded ({error}); "
                "save it there with save_pretrained"
            ) from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(f"the tokenizer in {str(model)!r} has no fast form; save tokenizer.json beside the model")
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model's tokenizer adds."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def stream(self) -> TextStream:
        """A decoder for one request's output."""
        return TextStream(self._tokenizer)


class TextStream:
    """Decodes a growing output, never half a character.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became complete with these tokens."""
        return "".join(self._stream.step(self._backend, token) or "" for token in token_ids)


def need_codec(codec: TextCodec | None) -> TextCodec:
    """The codec; UnsupportedError when the model came without one."""
    if codec is None:
        raise UnsupportedError("the model has no tokenizer; send token_ids instead of text")
    return codec
