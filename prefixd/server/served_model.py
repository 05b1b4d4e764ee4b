"""The model that this daemon's worker runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from prefixd.cache import NamespaceSpec
from prefixd.errors import UnsupportedError
from prefixd.server.image_reader import ImageReader
from prefixd.server.kv_shape import KvShape
from prefixd.server.prompt_images import PromptLayout
from prefixd.server.tokenization import TextCodec, TokenIds
from prefixd.server.tokenizer_threads import TokenizerThreads
from prefixd.worker.protocol import Hello


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request needs to know of the model."""

    hello: Hello
    """Its numbers."""
    kv: KvShape
    """How its blocks lie in frames."""
    namespace: NamespaceSpec
    """Its namespace, without a salt."""
    codec: TextCodec | None
    """Its tokenizer, if it has one."""
    threads: TokenizerThreads
    """Where texts are tokenized."""
    frames: int
    """Frames of the GPU tier."""
    images: ImageReader | None = None
    """Reads the images of prompts; None for a model of text alone."""

    async def read_images(self, tokens: TokenIds, images: Sequence[bytes]) -> PromptLayout | None:
        """See `ImageReader.read`. Raises UnsupportedError, too: images for a model of text alone."""
        if self.images is not None:
            return await self.images.read(tokens, images)
        if images:
            raise UnsupportedError(f"the request has {len(images)} images, and the model reads text alone; send none")
        return None

    def salted(self, salt: bytes) -> NamespaceSpec:
        """The model's namespace for a tenant."""
        return replace(self.namespace, salt=salt)
