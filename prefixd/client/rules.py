"""Which part of a prefix the layers of a KV group need, as a client says it of a part."""

from __future__ import annotations

from dataclasses import dataclass

from prefixd.v1 import cache_pb2


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The rule of layers in which a token attends to the last `tokens` tokens only, itself included."""

    tokens: int

    def to_proto(self) -> cache_pb2.Rule:
        """The rule as the contract has it."""
        return cache_pb2.Rule(sliding_window=cache_pb2.SlidingWindow(tokens=self.tokens))


@dataclass(frozen=True, slots=True)
class ChunkedWindow:
    """The rule of layers in which a token attends to its own chunk of `tokens` tokens only, up to itself (Llama 4)."""

    tokens: int

    def to_proto(self) -> cache_pb2.Rule:
        """The rule as the contract has it."""
        return cache_pb2.Rule(chunked_window=cache_pb2.ChunkedWindow(tokens=self.tokens))


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The rule of layers with a state: the bytes of a block are the state after it, and most blocks have none.

    A prefix needs the state after its last block. The states after `checkpoint_tokens` tokens, twice as many, and so
    on are kept as long as other bytes are; a multiple of the namespace's `block_tokens`, 0 for none.

    Give the daemon the other parts first, then each state by itself, with the tokens up to its end:
    `store(tokens[:end], state, parts=[part], first_block=end // block_tokens - 1)`.
    """

    checkpoint_tokens: int = 0

    def to_proto(self) -> cache_pb2.Rule:
        """The rule as the contract has it."""
        return cache_pb2.Rule(recurrent_state=cache_pb2.RecurrentState(checkpoint_tokens=self.checkpoint_tokens))


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """The rule of layers that attend to the prompt's images: the first `image_blocks` blocks of the prompt hold their
    KV.

    Every prefix needs all of it. Prompts with different images must differ from their first block on, in salt or
    tokens.
    """

    image_blocks: int = 1

    def to_proto(self) -> cache_pb2.Rule:
        """The rule as the contract has it."""
        return cache_pb2.Rule(cross_attention=cache_pb2.CrossAttention(image_blocks=self.image_blocks))


@dataclass(frozen=True, slots=True)
class VisionEmbedding:
    """The rule of embeddings of images, in a namespace of their own whose prompts are images, by the hash of their
    content.

    An image can be used whole or not at all: take fewer blocks than it has as none.
    """

    def to_proto(self) -> cache_pb2.Rule:
        """The rule as the contract has it."""
        return cache_pb2.Rule(vision_embedding=cache_pb2.VisionEmbedding())


Rule = SlidingWindow | ChunkedWindow | RecurrentState | CrossAttention | VisionEmbedding
"""Any of them. Full attention has none: a part without a rule follows it."""
