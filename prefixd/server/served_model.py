"""The model that this daemon's worker runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from prefixd.cache import Namespace, NamespaceSpec, TieredCache
from prefixd.errors import UnsupportedError
from prefixd.server.image_kv import ImageKv
from prefixd.server.image_reader import ImageReader
from prefixd.server.kv_shape import KvShape
from prefixd.server.prompt_images import PromptLayout
from prefixd.server.tokenization import TextCodec, TokenIds
from prefixd.server.tokenizer_threads import TokenizerThreads
from prefixd.tenants import Tenant
from prefixd.worker.protocol import Hello


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request needs to know of the model."""

    hello: Hello
    """Its numbers."""
    kv: KvShape
    """How its blocks lie in frames."""
    namespace: NamespaceSpec
    """Its namespace, without a salt, of the default tenant."""
    codec: TextCodec | None
    """Its tokenizer, if it has one."""
    threads: TokenizerThreads
    """Where texts are tokenized."""
    frames: int
    """Frames of the GPU tier."""
    images: ImageReader | None = None
    """Reads the images of prompts; None for a model of text alone."""
    image_namespace: NamespaceSpec | None = None
    """Of images, as `namespace`, if layers of the model attend to images and to nothing else."""

    async def read_images(self, tokens: TokenIds, images: Sequence[bytes], tenant: Hashable) -> PromptLayout | None:
        """See `ImageReader.read`. Raises UnsupportedError, too: images for a model of text alone."""
        if self.images is not None:
            return await self.images.read(tokens, images, tenant)
        if images:
            raise UnsupportedError(f"the request has {len(images)} images, and the model reads text alone; send none")
        return None

    @property
    def image_frames(self) -> int:
        """Frames of the GPU tier that an image takes besides the prompt's blocks."""
        return 0 if self.hello.image_group is None else self.hello.image_group.frames

    def homes(
        self,
        register: Callable[[NamespaceSpec], Namespace],
        cache: TieredCache,
        images: PromptLayout | None,
        tenant: Tenant,
        salt: bytes,
    ) -> tuple[Namespace, ImageKv | None]:
        """The namespace of a prompt, and its images as the cache knows them, if they are not in the prompt's blocks.

        Raises what `register` raises.
        """
        owner = {"salt": salt, "tenant": tenant.name}
        namespace = register(replace(self.namespace, **owner))
        if images is None or self.image_namespace is None:
            return namespace, None
        of_images = register(replace(self.image_namespace, **owner))
        return namespace, ImageKv.of(cache, of_images, images.images, self.hello.frame_bytes)
