"""Images' embeddings in frames of the memory that KV has, too (Jenga, section 6.2).

The frames of a request's images lie side by side, in the prompt's order; an image begins with a frame. What the prompt
has passed is given up, image by image:

```
image             0 (300 rows)     1 (120 rows)
frames         [31] [7] [12]      [4] [9]
rows           0 ... 299 | -      0 ... 119 | -       -: the rest of an image's last frame
```

With block tables the frames lie anywhere, and the rows of an image are copied together for the passes that read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import cast

import torch

from prefixd.worker.memory.kv_memory import KvSequence
from prefixd.worker.memory.paged_blocks import BlockTable
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.to_device import to_device
from prefixd.worker_protocol.protocol import ImageFrames
from prefixd_swap.vtensor import VirtualTensor


class PromptEmbeddings:
    """The memory of one request's embeddings.

    filled: for each image, whether its embedding is there.
    """

    def __init__(
        self, memory: VirtualKv | PagedKv, sequence: KvSequence, images: Sequence[ImageFrames], row_numbers: int
    ) -> None:
        self.filled = [image.filled for image in images]
        self.sequence = sequence
        self._memory = memory
        self._row_numbers = row_numbers
        self._starts = [0, *itertools.accumulate(len(image.frames) for image in images)]

    def fill(self, image: int, rows: torch.Tensor) -> None:
        """Write an image's embedding, ``[rows, hidden]``, queued on the device. Raises as `KvMemory.wait`."""
        numbers, pages = rows.flatten(), self._pages(image)
        if pages is None:
            self._numbers(image)[: len(numbers)].copy_(numbers)
        else:
            pool = cast(PagedKv, self._memory).pool
            whole = len(pages) * pool[0].numel()
            padded = torch.nn.functional.pad(numbers, (0, whole - len(numbers)))
            pool[pages] = padded.view(len(pages), *pool.shape[1:])
        self.filled[image] = True

    def read(self, image: int, rows: int) -> torch.Tensor:
        """An image's embedding, ``[rows, hidden]``: a view, or with block tables a copy. Raises as `KvMemory.wait`."""
        numbers = self._numbers(image)
        return numbers[: rows * self._row_numbers].view(rows, self._row_numbers)

    def give_up(self, images: int) -> None:
        """Give up the first `images` images; no pass that is not queued yet reads them."""
        self._memory.give_up(self.sequence, self._starts[images])

    def _numbers(self, image: int) -> torch.Tensor:
        first, end = self._starts[image], self._starts[image + 1]
        pages = self._pages(image)
        if pages is not None:
            return cast(PagedKv, self._memory).pool[pages].flatten()
        self._memory.wait(self.sequence, end)
        return cast(VirtualTensor, self.sequence).kv[first:end].view(-1)

    def _pages(self, image: int) -> torch.Tensor | None:
        """With block tables, an image's pages."""
        if not isinstance(self._memory, PagedKv):
            return None
        table = cast(BlockTable, self.sequence).pages[self._starts[image] : self._starts[image + 1]]
        return to_device(table, torch.int64, self._memory.pool.device)


class EmbeddingMemory:
    """The embeddings of all requests' images.

    memory: of blocks of one frame each, which the `row_numbers` numbers of a row need not divide.
    """

    def __init__(self, memory: VirtualKv | PagedKv, row_numbers: int) -> None:
        self.memory = memory
        self._row_numbers = row_numbers

    def open(self, images: Sequence[ImageFrames]) -> PromptEmbeddings:
        """Memory for a request's images, in the prompt's order. Raises as `KvMemory.open`."""
        sequence = self.memory.open([frame for image in images for frame in image.frames])
        return PromptEmbeddings(self.memory, sequence, images, self._row_numbers)

    def close(self, embeddings: PromptEmbeddings, on_closed: Callable[[], None]) -> None:
        """As `KvMemory.close`."""
        self.memory.close(embeddings.sequence, on_closed)
