"""The images of one request while the worker runs it, and their parts in each pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from prefixd.worker.images.cross_images import CrossImages, CrossMemory
from prefixd.worker.images.encoder import ImageEncoder
from prefixd.worker_protocol.errors import RequestError
from prefixd.worker_protocol.protocol import ImageShape, PromptImage


@dataclass(frozen=True, slots=True)
class PassImages:
    """The images in a pass over tokens [start, stop) of a sequence.

    rows: (place in the pass, embeddings ``[n, hidden]``) that replace embeddings of tokens.
    positions: ``[3, stop - start]`` on the CPU; None where a token's position is its place.
    both_ways: the tokens [first, stop) of the sequence that attend to each other in both directions, ascending; the
        pass has all of them.
    cross: the images for layers with cross-attention; None in models without such layers.
    """

    rows: Sequence[tuple[int, torch.Tensor]] = ()
    positions: torch.Tensor | None = None
    both_ways: Sequence[tuple[int, int]] = ()
    cross: CrossImages | None = None


class Embeddings(Protocol):
    """The memory of the embeddings of a request's images (`embedding_memory.PromptEmbeddings`)."""

    @property
    def filled(self) -> list[bool]:
        """For each image, whether its embedding is there."""
        ...

    def fill(self, image: int, rows: torch.Tensor) -> None:
        """Write an image's embedding, ``[rows, hidden]``."""
        ...

    def read(self, image: int, rows: int) -> torch.Tensor:
        """An image's embedding, ``[rows, hidden]``."""
        ...

    def give_up(self, images: int) -> None:
        """Give up the first images."""
        ...


class PromptImages:
    """The images of a prompt, in its order.

    An embedding is made when a pass first needs rows of it, unless its frames are filled, and held until its last row
    is computed.

    Args:
        images: see `Start.images`; checked (`check_images`).
        tokens: of the prompt, and what earlier runs generated.
        encoder: makes the embeddings.

    encoded: how many embeddings were made for this request.
    memory: where the images' embeddings lie, or in a model with cross-attention their keys and values; to be set before
        the first `hold`.
    Raises RequestError for an image without the arrays that positions or masks depend on.
    """

    def __init__(self, images: Sequence[PromptImage], tokens: int, encoder: ImageEncoder) -> None:
        self.encoded = 0
        self.memory: CrossMemory | Embeddings | None = None
        self._images = images
        self._encoder = encoder
        self._filled: list[int] = []
        self._held: dict[int, torch.Tensor] = {}
        self._cross: CrossImages | None = None
        self._positions = encoder.positions(tokens, images)
        self._visible = [encoder.visible(image) for image in images] if encoder.kind.cross else []
        self._both_ways = [_span(image) for image in images] if encoder.kind.both_ways else []

    def hold(self, start: int, stop: int) -> None:
        """Hold the embeddings that a pass over tokens [start, stop) needs. Raises RequestError.

        With cross-attention, all rows read the keys and values of all images: those that are in no frame yet are made,
        once for the request.
        """
        if self._encoder.kind.cross:
            self._hold_cross(cast(CrossMemory, self.memory))
            return
        memory = cast(Embeddings, self.memory)
        for index, image in enumerate(self._images):
            if index not in self._held and image.first < stop and start < image.first + image.tokens:
                if not memory.filled[index]:
                    self._fill(memory, index)
                self._held[index] = memory.read(index, image.tokens)

    def take_filled(self) -> list[int]:
        """The images whose frames were filled since the last call."""
        filled, self._filled = self._filled, []
        return filled

    @property
    def embeds(self) -> bool:
        """Whether the pass that was made ready last has rows of an image."""
        return bool(self._held)

    def _hold_cross(self, memory: CrossMemory) -> None:
        if self._cross is not None:
            return
        made: set[bytes] = set()  # an image that stands in the prompt several times has the same frames each time
        for index, image in enumerate(self._images):
            if not memory.filled[index] and image.digest not in made:
                memory.fill(index, self._encoder.cross_pairs(self._encode(index)))
                made.add(image.digest)
        memory.wait()
        self._cross = CrossImages(memory, [image.first for image in self._images], self._visible)

    def _fill(self, memory: Embeddings, index: int) -> None:
        """Embeds an image into its frames, which are those of its other places in the prompt, too."""
        image, rows = self._images[index], self._encode(index)
        if len(rows) != image.tokens:
            raise RequestError(
                f"the image at token {image.first} (pixels {list(image.pixels.shape)}) has an embedding of "
                f"{len(rows)} rows, but {image.tokens} placeholders; repeat the placeholder as the model's processor "
                "does"
            )
        memory.fill(index, rows)
        for other, same in enumerate(self._images):
            if same.digest == image.digest:
                memory.filled[other] = True

    def _encode(self, index: int) -> torch.Tensor:
        rows = self._encoder.encode(self._images[index])
        self.encoded += 1
        self._filled.append(index)
        return rows

    def of_pass(self, start: int, stop: int) -> PassImages:
        """The images in a pass over tokens [start, stop); after `hold`."""
        rows = []
        for index, held in self._held.items():
            first, end = _span(self._images[index])
            if first < stop and start < end:
                rows.append((max(first, start) - start, held[max(0, start - first) : stop - first]))
        both_ways = [(first, end) for first, end in self._both_ways if first < stop and start < end]
        return PassImages(rows, self._positions_of(start, stop), both_ways, self._cross)

    def last_cut(self, stop: int) -> int:
        """The last place up to `stop` where a pass may end: not inside an image whose tokens attend both ways."""
        return next((first for first, end in self._both_ways if first < stop < end), stop)

    def first_cut(self, start: int) -> int:
        """The first place behind `start` where a pass that begins there may end."""
        return next((end for first, end in self._both_ways if first == start), start + 1)

    def common(self, other: PromptImages | None, tokens: int) -> int:
        """How many of the first `tokens` tokens, which are equal in both prompts, have equal images, too.

        The number does not end inside an image.
        """
        theirs = [] if other is None else other._identities()
        if self._encoder.kind.cross and theirs != self._identities():
            return 0  # every row reads every image
        for identity in [*set(self._identities()) ^ set(theirs)]:
            tokens = min(tokens, identity[0])
        return next((first for first, end in map(_span, self._images) if first < tokens < end), tokens)

    def _identities(self) -> list[tuple[int, int, bytes]]:
        return [(image.first, image.tokens, image.digest) for image in self._images]

    def pass_by(self, computed: int) -> None:
        """Release the embeddings that no pass needs after `computed` tokens."""
        for index in [index for index in self._held if _span(self._images[index])[1] <= computed]:
            del self._held[index]
        if self.memory is not None and not self._encoder.kind.cross:
            passed = sum(_span(image)[1] <= computed for image in self._images)
            cast(Embeddings, self.memory).give_up(passed)

    def _positions_of(self, start: int, stop: int) -> torch.Tensor | None:
        """Behind what was known at the start, positions go on from the largest one by one."""
        known = self._positions
        if known is None:
            return None
        length = known.shape[1]
        further = torch.arange(max(start, length) - length, max(stop, length) - length) + int(known.max()) + 1
        return torch.cat((known[:, start:stop], further.expand(3, -1)), dim=1)


def check_images(
    images: Sequence[PromptImage],
    tokens: Sequence[int],
    prompt: int,
    cached: int,
    shape: ImageShape | None,
    apart: bool,
) -> None:
    """Refuse images that do not fit their prompt.

    Args:
        images: see `Start.images`.
        tokens: ids, of which the first `prompt` are the prompt's.
        prompt: how many.
        cached: how many tokens, from the first on, hold KV already.
        shape: None for a model of text alone.
        apart: whether images must not follow each other directly (`ImageKind.apart`).

    Raises RequestError.
    """
    if not images:
        return
    if shape is None:
        raise RequestError(f"{len(images)} images; the model reads text alone: send none")
    end = 0
    for image in images:
        first, stop = _span(image)
        if image.tokens < 1 or first < end or stop > prompt:
            raise RequestError(
                f"an image at tokens [{first}, {stop}) of a prompt of {prompt}, behind another's end at {end}; "
                "name the images in the prompt's order, without overlap"
            )
        if apart and end and first == end:
            raise RequestError(
                f"two images meet at token {first}, which this model takes for one; put its tokens for an image's "
                "begin and end around each"
            )
        if shape.kind == "cross" and image.tokens != 1:
            raise RequestError(f"an image of {image.tokens} tokens at {first}; this model has one placeholder an image")
        if any(token != shape.placeholder_id for token in tokens[first:stop]):
            raise RequestError(f"tokens [{first}, {stop}) are not all the image's placeholder {shape.placeholder_id}")
        if first < cached < stop:
            raise RequestError(
                f"{cached} cached tokens end inside the image at tokens [{first}, {stop}); "
                "resume before the image or behind it"
            )
        end = stop


def _span(image: PromptImage) -> tuple[int, int]:
    return image.first, image.first + image.tokens
