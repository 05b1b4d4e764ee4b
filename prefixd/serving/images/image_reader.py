"""Checks and decodes the images of prompts, one image of each tenant at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import InvalidArgumentError, PromptTooLongError, UnavailableError
from prefixd.base.tenancy.fairness import TenantTurns
from prefixd.images.image_files import ImageLimits, image_digest
from prefixd.images.token_counts import GridCount, ImageProcessor
from prefixd.serving.images.image_decoder import DecodedImage
from prefixd.serving.images.pixel_store import HoldBytes
from prefixd.serving.images.prompt_images import PromptLayout
from prefixd.worker_protocol.protocol import Hello, PromptImage


class Decoder(Protocol):
    """Decodes a file (`ImageDecoder`)."""

    async def decode(self, data: bytes, number: int) -> DecodedImage: ...


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads the images of prompts for one model.

    Attributes:
        hello: the model, which reads images.
        processor: its image processor.
        limits: of a prompt's images.
        step_tokens: most tokens that the worker computes in one step.
        decoder: decodes images, in processes of their own.
        threads: hash the files.
        turns: one image of each tenant at a time.
    """

    hello: Hello
    processor: ImageProcessor
    limits: ImageLimits
    step_tokens: int
    decoder: Decoder = field(repr=False)
    threads: ThreadPoolExecutor = field(repr=False)
    turns: TenantTurns = field(default_factory=TenantTurns, repr=False)

    async def read(
        self, tokens: npt.NDArray[np.uint32], images: Sequence[bytes], tenant: Hashable, hold: HoldBytes
    ) -> PromptLayout | None:
        """The images of a prompt, whose `tokens` hold one placeholder for each; None for a prompt without.

        The caller is the first user of the layout. `hold`: counts the bytes of pixels as long as there are users.

        Raises:
            InvalidArgumentError: the placeholders and the images do not match, or an image is too large, not whole, or
                takes too long to decode.
            ExhaustedError: there is no room for the pixels, or the machine is too busy.
            UnavailableError: the daemon ends.
        """
        shape = self.hello.images
        assert shape is not None, "made for models that read images"
        places = np.flatnonzero(tokens == shape.placeholder_id)
        if len(places) != len(images):
            raise InvalidArgumentError(
                f"the prompt has {len(places)} placeholders (token id {shape.placeholder_id}), and the request has "
                f"{len(images)} images; write one placeholder where each image belongs"
            )
        if not images:
            return None
        if len(images) > self.limits.images:
            raise InvalidArgumentError(
                f"the request has {len(images)} images, and worker.images_per_prompt allows {self.limits.images}; "
                "send fewer"
            )
        apart = shape.both_ways or isinstance(self.processor.counts, GridCount)
        if apart and (meeting := np.flatnonzero(np.diff(places) == 1)).size:
            raise InvalidArgumentError(
                f"images {meeting[0]} and {meeting[0] + 1} follow each other directly, which this model takes for one; "
                "write its tokens for an image's begin and end around each"
            )
        digests: list[bytes] = []
        with ExitStack() as places_taken:
            decoded: list[DecodedImage] = []
            for number, data in enumerate(images):
                digest, image = await self._decoded(data, number, tenant)
                places_taken.callback(image.place.leave)
                image.place.keep(image.nbytes, hold)
                digests.append(digest)
                decoded.append(image)
            if shape.both_ways and (most := max(image.tokens for image in decoded)) > self.step_tokens:
                raise InvalidArgumentError(
                    f"an image has {most} tokens, which this model computes in one step, and worker.max_step_tokens is "
                    f"{self.step_tokens}; raise that to {most}"
                )
            layout = self._laid_out(tokens, places.tolist(), digests, decoded)
            places_taken.pop_all()
        return layout

    async def _decoded(self, data: bytes, number: int, tenant: Hashable) -> tuple[bytes, DecodedImage]:
        loop = asyncio.get_running_loop()
        try:
            async with self.turns.turn(tenant):
                digest = await loop.run_in_executor(self.threads, image_digest, data, self.processor)
                return digest, await self.decoder.decode(data, number)
        except (RuntimeError, asyncio.CancelledError) as error:  # usually because the executor was shut down
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # but here the caller was cancelled
                raise
            raise UnavailableError("the daemon is ending; send the request again when it is back") from error

    def _laid_out(
        self, tokens: npt.NDArray[np.uint32], places: list[int], digests: list[bytes], decoded: list[DecodedImage]
    ) -> PromptLayout:
        """Repeats the placeholders, each as often as its image has tokens. Raises InvalidArgumentError: too many."""
        repeats = np.ones(len(tokens), np.int64)
        repeats[places] = [image.tokens for image in decoded]
        total, limit = int(repeats.sum()), self.hello.max_model_tokens
        if total >= limit:
            raise PromptTooLongError(
                f"the prompt has {total} tokens with those of its {len(decoded)} images, but the model takes {limit} "
                f"with the output; send at most {limit - 1}"
            )
        firsts = np.cumsum(repeats) - repeats
        laid_out = [
            PromptImage(int(firsts[place]), image.tokens, digest, image.pixels)
            for place, digest, image in zip(places, digests, decoded, strict=True)
        ]
        assert self.hello.images is not None
        cross = self.hello.images.kind == "cross"
        repeated = np.repeat(tokens, repeats).astype("<u4", copy=False).tobytes()
        memory = [image.place for image in decoded]
        return PromptLayout(repeated, laid_out, self.hello.block_tokens, cross, memory)
