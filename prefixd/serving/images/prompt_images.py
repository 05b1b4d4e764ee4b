"""The images of a request, and its tokens as the model reads them. In the cache, other ids stand for images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from prefixd.cache import BlockChain, Namespace
from prefixd.images.identity import ImageSpan, drawn_block, identity_tokens, next_uncut_blocks, uncut_blocks
from prefixd.serving.images.pixel_store import PixelPlace
from prefixd.worker_protocol.protocol import PromptImage


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt with images.

    Attributes:
        token_ids: as the model reads them, each image's placeholders repeated; little-endian uint32.
        images: in their order.
        block_tokens: tokens of a block.
        cross: all rows of the prompt depend on all images.
        memory: where their pixels lie. The maker of the layout is its first user.
    """

    token_ids: bytes
    images: list[PromptImage]
    block_tokens: int
    cross: bool
    memory: Sequence[PixelPlace] = ()

    def enter(self) -> None:
        """Adds a user of the pixels."""
        for place in self.memory:
            place.enter()

    def leave(self) -> None:
        """Removes a user of the pixels."""
        for place in self.memory:
            place.leave()

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids) // 4

    @property
    def spans(self) -> list[ImageSpan]:
        """Where its images lie."""
        return [ImageSpan(image.first, image.tokens, image.digest) for image in self.images]

    @property
    def identity(self) -> bytes:
        """The ids for a chain, little-endian uint32."""
        tokens = np.frombuffer(self.token_ids, "<u4")
        return identity_tokens(tokens, self.spans, self.block_tokens, cross=self.cross).tobytes()

    def of_request(self) -> PromptImages:
        """For one request with this prompt, which adds tokens."""
        return PromptImages(self)


class PromptImages:
    """What a request has besides the ids under which its blocks are cached (`BlockChain`), if it has images."""

    def __init__(self, layout: PromptLayout) -> None:
        self.images = layout.images
        self._layout = layout
        self._tokens = bytearray(layout.token_ids)
        self._spans = layout.spans
        self._block_tokens = layout.block_tokens

    def enter(self) -> None:
        """The request was queued: from now on it may run."""
        self._layout.enter()

    def leave(self) -> None:
        """The request has ended: no worker reads its pixels any more."""
        self._layout.leave()

    @property
    def token_ids(self) -> bytes:
        """The ids as the model reads them, little-endian uint32."""
        return bytes(self._tokens)

    def for_worker(self, namespace: Namespace) -> list[PromptImage]:
        """The images under names that depend on the namespace: a worker's memory must not tell of the images of
        another tenant or salt."""
        names = (hashlib.blake2b(image.digest, digest_size=32, key=namespace.digest) for image in self.images)
        return [replace(image, digest=name.digest()) for image, name in zip(self.images, names, strict=True)]

    def append(self, token_ids: bytes, chain: BlockChain) -> None:
        """Adds generated tokens, here and to the chain.

        If the block that they fill has a part of an image, its ids change; the ids of later blocks are their tokens.
        """
        blocks, each = len(chain), self._block_tokens
        self._tokens += token_ids
        chain.append(token_ids)
        if len(chain) > blocks and drawn_block(self._spans, blocks, each, cross=self._layout.cross):
            tokens = np.frombuffer(bytes(self._tokens[: 4 * (blocks + 1) * each]), "<u4")
            ids = identity_tokens(tokens, self._spans, each, cross=self._layout.cross)
            chain.rewrite(blocks, ids[blocks * each :].tobytes())

    def uncut(self, blocks: int) -> int:
        """The largest number of blocks up to this one whose end lies in no image."""
        return uncut_blocks(blocks, self._spans, self._block_tokens)

    def next_uncut(self, blocks: int) -> int:
        """The smallest number of blocks above this one whose end lies in no image."""
        return next_uncut_blocks(blocks, self._spans, self._block_tokens)
