"""Images of prompts are checked in a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixd.errors import InvalidArgumentError, UnavailableError
from prefixd.images.image_files import CheckedImage, ImageLimits, check_image
from prefixd.images.token_counts import GridCount, ImageProcessor
from prefixd.server.prompt_images import PromptLayout
from prefixd.server.tenant_turns import TenantTurns
from prefixd.worker.protocol import Hello, PromptImage


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads the images of prompts for one model.

    Attributes:
        hello: the model, which reads images.
        processor: its image processor.
        limits: what a prompt may bring.
        step_tokens: most tokens that the worker computes in one step.
        threads: where images are decoded.
        turns: one image of each tenant at a time.
    """

    hello: Hello
    processor: ImageProcessor
    limits: ImageLimits
    step_tokens: int
    threads: ThreadPoolExecutor = field(repr=False)
    turns: TenantTurns = field(default_factory=TenantTurns, repr=False)

    async def read(
        self, tokens: npt.NDArray[np.uint32], images: Sequence[bytes], tenant: Hashable = None
    ) -> PromptLayout | None:
        """The images of a prompt, whose `tokens` hold one placeholder for each; None for a prompt without.

        Raises:
            InvalidArgumentError: the placeholders and the images do not match, or an image is too large or not whole.
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
        checked = [await self._checked(data, number, tenant) for number, data in enumerate(images)]
        if shape.both_ways and (most := max(image.tokens for image in checked)) > self.step_tokens:
            raise InvalidArgumentError(
                f"an image has {most} tokens, which this model computes in one step, and worker.max_step_tokens is "
                f"{self.step_tokens}; raise that to {most}"
            )
        return self._laid_out(tokens, places.tolist(), checked)

    async def _checked(self, data: bytes, number: int, tenant: Hashable) -> CheckedImage:
        loop = asyncio.get_running_loop()
        try:
            async with self.turns.turn(tenant):
                return await loop.run_in_executor(self.threads, check_image, data, number, self.processor, self.limits)
        except (RuntimeError, asyncio.CancelledError) as error:  # of the executor, which was shut down
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # no: of the caller
                raise
            raise UnavailableError("the daemon is ending; send the request again when it is back") from error

    def _laid_out(self, tokens: npt.NDArray[np.uint32], places: list[int], checked: list[CheckedImage]) -> PromptLayout:
        """Repeats the placeholders, each as often as its image has tokens. Raises InvalidArgumentError: too many."""
        repeats = np.ones(len(tokens), np.int64)
        repeats[places] = [image.tokens for image in checked]
        total, limit = int(repeats.sum()), self.hello.max_model_tokens
        if total >= limit:
            raise InvalidArgumentError(
                f"the prompt has {total} tokens with those of its {len(checked)} images, but the model takes {limit} "
                f"with the output; send at most {limit - 1}"
            )
        firsts = np.cumsum(repeats) - repeats
        laid_out = [
            PromptImage(int(firsts[place]), image.tokens, image.digest, image.data)
            for place, image in zip(places, checked, strict=True)
        ]
        assert self.hello.images is not None
        cross = self.hello.images.kind == "cross"
        repeated = np.repeat(tokens, repeats).astype("<u4", copy=False).tobytes()
        return PromptLayout(repeated, laid_out, self.hello.block_tokens, cross)
