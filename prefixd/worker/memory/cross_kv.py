"""The keys and values of images for cross-attention in frames: each image is a block, whose tokens are its patches.

They depend on the image alone, so they serve every prompt that has the image. A request's images lie side by side:

```
image             0                  1
frames         [31] [7] [12]      [4] [9] [20]
patches        0 ... P-1 | zeros  0 ... P-1 | zeros       zeros: to the end of the last frame
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from prefixd.worker.images import CrossPairs
from prefixd.worker.memory.kv_memory import KvSequence, Segment
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.spec.kv_groups import CrossGroup
from prefixd.worker_protocol.protocol import ImageFrames


class CrossKv:
    """The memory of the keys and values of one request's images.

    filled: for each image, whether its keys and values are there.
    """

    def __init__(
        self, group: CrossGroup, memory: VirtualKv | PagedKv, sequence: KvSequence, filled: Sequence[bool]
    ) -> None:
        self.filled = list(filled)
        self.sequence = sequence
        self._group = group
        self._memory = memory
        self._index = {layer: index for index, layer in enumerate(group.layers)}

    @property
    def layers(self) -> Sequence[int]:
        """The numbers of the layers that attend to images."""
        return self._group.layers

    @property
    def patches(self) -> int:
        """Of an image."""
        return self._group.patches

    @property
    def stride(self) -> int:
        """Keys from one image's first to the next one's."""
        return self._group.geometry.block_tokens

    def fill(self, image: int, pairs: CrossPairs) -> None:
        """Write an image's keys and values of each layer, and zeros behind them: a mask does not stop a stale NaN.

        Raises as `KvMemory.wait`.
        """
        start = image * self.stride
        self._memory.wait(self.sequence, start + self.stride)
        step = self._memory.step([Segment(self.sequence, start, start + self.patches)])
        for layer, (keys, values) in pairs.items():
            step.write(self._index[layer], torch.stack((keys, values)).permute(2, 0, 1, 3))
        step.scrub(0, start + self.stride)
        self.filled[image] = True

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all images in a layer, both ``[kv_heads, images * stride, head_dim]``."""
        end = len(self.filled) * self.stride
        step = self._memory.step([Segment(self.sequence, 0, end)])
        return step.read(self._index[layer], ((0, end),))[0]

    def wait(self) -> None:
        """Wait until all of it can be read. Raises as `KvMemory.wait`."""
        self._memory.wait(self.sequence, len(self.filled) * self.stride)


class CrossMemory:
    """Keys and values of the images of all requests, in the frames that serve the groups of text."""

    def __init__(self, group: CrossGroup, memory: VirtualKv | PagedKv) -> None:
        self.memory = memory
        self._group = group

    def open(self, images: Sequence[ImageFrames]) -> CrossKv:
        """Memory for a request's images, in the prompt's order. Raises as `KvMemory.open`."""
        sequence = self.memory.open([frame for image in images for frame in image.frames])
        return CrossKv(self._group, self.memory, sequence, [image.filled for image in images])

    def close(self, cross: CrossKv, on_closed: Callable[[], None]) -> None:
        """As `KvMemory.close`."""
        self.memory.close(cross.sequence, on_closed)
