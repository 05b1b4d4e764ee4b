"""A model that is ready to serve requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from prefixd.base.errors import UnsupportedError
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache import Namespace, NamespaceSpec, TieredCache
from prefixd.serving.images.image_kv import ImageKv, embedding_blocks
from prefixd.serving.images.image_reader import ImageReader
from prefixd.serving.images.pixel_store import HoldBytes
from prefixd.serving.images.prompt_images import PromptLayout
from prefixd.serving.kv_shape import KvShape
from prefixd.serving.text.tokenization import TextCodec, TokenIds
from prefixd.serving.text.tokenizer_threads import TokenizerThreads
from prefixd.worker_protocol.protocol import Hello


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The properties of a model that its requests depend on."""

    hello: Hello
    """The worker's description."""
    kv: KvShape
    """How its blocks lie in frames."""
    namespace: NamespaceSpec
    """Its namespace, without a salt, of the default tenant."""
    codec: TextCodec | None
    """Its tokenizer, if it has one."""
    threads: TokenizerThreads
    """Where texts are tokenized."""
    frames: int
    """Frames that the GPU tier has, or may come to have."""
    images: ImageReader | None = None
    """Reads the images of prompts; None for a model of text alone."""
    image_namespace: NamespaceSpec | None = None
    """The namespace of images, as `namespace`, if the model reads images."""

    async def read_images(
        self, tokens: TokenIds, images: Sequence[bytes], tenant: Hashable, hold: HoldBytes
    ) -> PromptLayout | None:
        """The images of a prompt, whose `tokens` hold one placeholder for each; None for a prompt without images.

        Raises as `ImageReader.read`, and UnsupportedError for images if the model reads text alone.
        """
        if self.images is not None:
            return await self.images.read(tokens, images, tenant, hold)
        if images:
            raise UnsupportedError(f"the request has {len(images)} images, and the model reads text alone; send none")
        return None

    def specs(self, tenant: Tenant, salt: bytes) -> list[NamespaceSpec]:
        """The namespace of a prompt, and that of its images if they have one."""
        of_model = [self.namespace] if self.image_namespace is None else [self.namespace, self.image_namespace]
        return [replace(spec, salt=salt, tenant=tenant.name) for spec in of_model]

    def register(
        self,
        enter: Callable[[NamespaceSpec], Namespace],
        cache: TieredCache,
        images: PromptLayout | None,
        tenant: Tenant,
        salt: bytes,
    ) -> tuple[Namespace, ImageKv | None]:
        """The namespace of a prompt, and its images as the cache knows them, if it has any.

        `enter` registers a namespace; its errors are passed on.
        """
        spec, *image_specs = self.specs(tenant, salt)
        namespace = enter(spec)
        if images is None or not image_specs:
            return namespace, None
        of_images = enter(image_specs[0])
        return namespace, ImageKv.of(cache, of_images, images.images, self.hello)

    def image_frames(self, images: PromptLayout | None) -> int:
        """Frames of a prompt's images; one that occurs several times counts once."""
        once = {} if images is None else {image.digest: image for image in images.images}
        if self.kv.image_frames:
            return self.kv.image_frames * len(once)
        return sum(embedding_blocks(image, self.hello) for image in once.values())
