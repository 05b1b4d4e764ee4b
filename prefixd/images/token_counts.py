"""Computes an image's number of placeholder tokens from its size, with the arithmetic of transformers' processors.

An image is counted as if it were alone in its prompt, so that its number of tokens is the same in every prompt.
"""

from __future__ import annotations

import math

import msgspec

from prefixd.base.errors import InvalidArgumentError

_MOST_RATIO = 200


class FixedCount(msgspec.Struct, frozen=True, tag="fixed"):
    """Every image has `count` tokens: 256 (Gemma 3), or 1 (Llama 3.2 Vision)."""

    count: int

    def tokens(self, height: int, width: int) -> int:
        """Tokens of an image of `height` x `width` pixels."""
        return self.count


class GridCount(msgspec.Struct, frozen=True, tag="grid"):
    """A token for each `side` x `side` pixels of the resized image (Qwen2.5-VL).

    least_pixels, most_pixels: bounds of the resized image.
    """

    side: int
    least_pixels: int
    most_pixels: int

    def tokens(self, height: int, width: int) -> int:
        """Tokens of an image of `height` x `width` pixels. Raises InvalidArgumentError if it is far too long."""
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise InvalidArgumentError(
                f"it has {width} x {height} pixels, and for this model one side may be at most {_MOST_RATIO} times as "
                "long as the other; cut it into pieces"
            )
        side = self.side
        rows, columns = round(height / side), round(width / side)
        pixels = rows * columns * side**2
        if pixels > self.most_pixels:
            shrink = math.sqrt(height * width / self.most_pixels)
            rows, columns = (max(1, math.floor(length / shrink / side)) for length in (height, width))
        elif pixels < self.least_pixels:
            stretch = math.sqrt(self.least_pixels / (height * width))
            rows, columns = (math.ceil(length * stretch / side) for length in (height, width))
        return rows * columns


class TileCount(msgspec.Struct, frozen=True, tag="tiles"):
    """The whole image as one tile, and its tiles without the padding (LLaVA-OneVision).

    side: pixels of a tile's side. patches: tokens in a row of a tile. most_tiles: above this many tiles, the processor
    keeps fewer tokens of each. resolutions: (height, width) of the canvases into which an image can be fitted.
    """

    side: int
    patches: int
    most_tiles: int
    resolutions: list[tuple[int, int]]

    def tokens(self, height: int, width: int) -> int:
        """Tokens of an image of `height` x `width` pixels."""
        best_height, best_width = self._best_resolution(height, width)
        rows, columns = self.patches * (best_height // self.side), self.patches * (best_width // self.side)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        thinned = math.sqrt(rows * columns / (self.most_tiles * self.patches**2))
        if thinned > 1.1:
            rows, columns = int(rows // thinned), int(columns // thinned)
        return self.patches**2 + rows * (columns + 1)  # one more token ends each row

    def _best_resolution(self, height: int, width: int) -> tuple[int, int]:
        """Returns the resolution that keeps most of the image's pixels; of several, the one with the least padding."""
        best: tuple[int, int, tuple[int, int]] | None = None
        for most_height, most_width in self.resolutions:
            scale = min(most_width / width, most_height / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            rank = (kept, kept - most_height * most_width)
            if best is None or rank > best[:2]:
                best = (*rank, (most_height, most_width))
        if best is None:
            raise ValueError("no resolutions")
        return best[2]


class ImageProcessor(msgspec.Struct, frozen=True):
    """The daemon's description of a model's image processor.

    digest: digest of the processor's class and settings, which determine the pixels that it makes of a file.
    """

    counts: FixedCount | GridCount | TileCount
    digest: bytes
