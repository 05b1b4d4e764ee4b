"""What a namespace says about a part's rule: in tokens, as clients say it and as the disk's index keeps it.

The tags are on disk: they never change, and a field that is added needs a default.
"""

from __future__ import annotations

from abc import abstractmethod

import msgspec

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache.rules import (
    ChunkedWindow,
    CrossAttention,
    FullAttention,
    GroupRule,
    RecurrentState,
    SlidingWindow,
    VisionEmbedding,
)

_MAX_WINDOW_TOKENS = 1 << 31
_MAX_IMAGE_BLOCKS = 1 << 16


class _Spec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rule in tokens."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The rule for people: `sliding window of 1024 tokens`."""

    @abstractmethod
    def rule(self, block_tokens: int) -> GroupRule:
        """The rule in blocks of so many tokens."""

    def check(self, part: str, block_tokens: int) -> None:
        """Raises InvalidArgumentError, which names the `part`, unless this can be a rule for such blocks."""


class SlidingWindowSpec(_Spec, frozen=True, tag="sliding_window"):
    """A token attends to the last `tokens` tokens only, itself included."""

    tokens: int

    @property
    def words(self) -> str:
        return f"sliding window of {self.tokens} tokens"

    def rule(self, block_tokens: int) -> SlidingWindow:
        return SlidingWindow.of_tokens(self.tokens, block_tokens)

    def check(self, part: str, block_tokens: int) -> None:
        _check_range(part, "a sliding window of", self.tokens, _MAX_WINDOW_TOKENS, "tokens")


class ChunkedWindowSpec(_Spec, frozen=True, tag="chunked_window"):
    """A token attends to the tokens before it in its own chunk of `tokens` tokens, and to itself."""

    tokens: int

    @property
    def words(self) -> str:
        return f"chunks of {self.tokens} tokens"

    def rule(self, block_tokens: int) -> ChunkedWindow:
        return ChunkedWindow(self.tokens, block_tokens)

    def check(self, part: str, block_tokens: int) -> None:
        _check_range(part, "chunks of", self.tokens, _MAX_WINDOW_TOKENS, "tokens")


class RecurrentStateSpec(_Spec, frozen=True, tag="recurrent_state"):
    """The bytes of a block are the state after it; a prefix needs that after its last block.

    The states after `checkpoint_tokens` tokens, twice as many, and so on stay as long as other bytes do; 0: none.
    """

    checkpoint_tokens: int = 0

    @property
    def words(self) -> str:
        if not self.checkpoint_tokens:
            return "recurrent state"
        return f"recurrent state, a checkpoint every {self.checkpoint_tokens} tokens"

    def rule(self, block_tokens: int) -> RecurrentState:
        return RecurrentState(self.checkpoint_tokens // block_tokens)

    def check(self, part: str, block_tokens: int) -> None:
        tokens = self.checkpoint_tokens
        if not 0 <= tokens <= _MAX_WINDOW_TOKENS or tokens % block_tokens:
            raise InvalidArgumentError(
                f"{part} has a checkpoint every {tokens} tokens; it must be a multiple of block_tokens "
                f"({block_tokens}) and at most {_MAX_WINDOW_TOKENS}, or 0 for no checkpoints"
            )


class CrossAttentionSpec(_Spec, frozen=True, tag="cross_attention"):
    """The first `image_blocks` blocks of a prompt hold the KV of its images, which every prefix needs whole."""

    image_blocks: int = 1

    @property
    def words(self) -> str:
        blocks = "block" if self.image_blocks == 1 else f"{self.image_blocks} blocks"
        return f"cross-attention to images in the first {blocks}"

    def rule(self, block_tokens: int) -> CrossAttention:
        return CrossAttention(self.image_blocks)

    def check(self, part: str, block_tokens: int) -> None:
        _check_range(part, "images in the first", self.image_blocks, _MAX_IMAGE_BLOCKS, "blocks")


class VisionEmbeddingSpec(_Spec, frozen=True, tag="vision_embedding"):
    """A prompt of the namespace is an image, which is needed whole or not at all."""

    @property
    def words(self) -> str:
        return "vision embedding"

    def rule(self, block_tokens: int) -> VisionEmbedding:
        return VisionEmbedding()


RuleSpec = SlidingWindowSpec | ChunkedWindowSpec | RecurrentStateSpec | CrossAttentionSpec | VisionEmbeddingSpec
"""Any of them. Full attention has none: a part without a rule follows it."""


def rule_of(spec: RuleSpec | None, block_tokens: int) -> GroupRule:
    """The rule in blocks of so many tokens."""
    return FullAttention() if spec is None else spec.rule(block_tokens)


def words_of(spec: RuleSpec | None) -> str:
    """The rule for people."""
    return "full attention" if spec is None else spec.words


def _check_range(part: str, what: str, value: int, limit: int, unit: str) -> None:
    if not 1 <= value <= limit:
        raise InvalidArgumentError(f"{part} has {what} {value} {unit}; it must be between 1 and {limit}")
