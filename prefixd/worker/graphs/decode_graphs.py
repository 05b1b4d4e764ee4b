"""Decode passes as CUDA graphs: one launch for a whole pass in place of some hundred.

One graph a batch size and power of two of keys serves all batches. A batch that is smaller than its graph is filled up
with copies of its last request: they compute and write the same values at the same place.

Graphs are captured when the model is loaded, for as long as the settings allow, and the others when they are first
needed. The passes that are captured at load need memory behind their rows, and no frame is the worker's: so they
compute on scratch memory (`VirtualSet.scratch`), in which token i of a row is token i of every row:

```
row      0    1     2     3          each row computes the token in brackets, after those before it, which other rows
tokens  [a]  a[b]  ab[c]  abc[d]     compute in the same pass: together they are one prompt
```

`benchmarks.gpu` replays them on a GPU; the tests replay without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from prefixd.worker.graphs.captured import (
    CapturedPasses,
    CapturedStep,
    Compute,
    GraphCapture,
    NoSequence,
    PassInputs,
    Replay,
)
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.to_device import UnreadTokens

FEWEST_KEYS = 1024
_BY_EIGHT = 64
_BY_THIRTY_TWO = 32


class DecodeStep(CapturedStep):
    """The memory of a captured pass: one new token for each of `size` sequences; see `StepKv`.

    most_keys: tokens of the longest sequence that it can compute.
    """

    def __init__(self, kv: torch.Tensor, inputs: PassInputs, size: int, most_keys: int) -> None:
        super().__init__(kv, inputs, size, size, 1, most_keys)
        self.size = size
        self.segments = [Segment(NoSequence(), 0, 1)] * size
        # Not from `inputs`: they are the same in every pass.
        self.query_starts = torch.arange(size + 1, dtype=torch.int32, device=kv.device)
        self.wanted = torch.arange(size, device=kv.device)


class DecodeGraphs:
    """Graphs of decode passes by batch size and length.

    kv: all virtual tensors.
    compute: runs the model on a step and returns the logits of all its rows, ``[size, vocab_size]``.
    largest: most sequences in a pass.
    on_failure: called once, with the reason in one line, when graphs are given up.
    capture: captures a computation; by default on the current CUDA device.
    fewest_keys: the first power of two of keys that has graphs of its own.
    note: called with a line for the log.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        compute: Callable[[CapturedStep], torch.Tensor],
        largest: int,
        on_failure: Callable[[str], None],
        capture: Callable[[Compute], Replay] | None = None,
        fewest_keys: int = FEWEST_KEYS,
        note: Callable[[str], None] = print,
    ) -> None:
        self._kv = kv
        self._sizes = _sizes(largest)
        self._lengths = [min(fewest_keys, kv.shape[1])]
        while self._lengths[-1] < kv.shape[1]:
            self._lengths.append(min(2 * self._lengths[-1], kv.shape[1]))
        self._size_of = np.searchsorted(self._sizes, np.arange(largest + 1)).tolist()
        self._inputs = PassInputs(self._sizes[-1], self._sizes[-1], kv.device)
        self._passes = CapturedPasses(
            "decode pass", compute, on_failure, capture or GraphCapture(), note, results=self._sizes[-1]
        )

    @property
    def replays(self) -> int:
        """Passes that were replayed."""
        return self._passes.replays

    @property
    def captured_sizes(self) -> list[int]:
        """The batch sizes that have a graph."""
        return sorted({size for size, _ in self._passes.captured})

    def fits(self, positions: Sequence[int]) -> bool:
        """Whether there is a graph for a token at each of these positions, or can be."""
        return len(positions) < len(self._size_of) and self._passes.has_room(self._key(positions))

    def run(
        self,
        tokens: Sequence[int],
        rows: Sequence[int],
        positions: Sequence[int],
        unread: UnreadTokens | None = None,
    ) -> torch.Tensor:
        """The logits of a token of each sequence, ``[len(tokens), vocab_size]``, valid until the next run.

        rows[i] is the sequence's row of `kv`, which has memory for the token at positions[i].
        unread: those of the tokens that the host has not read.
        """
        return self._run(*self._key(positions), tokens, rows, positions, unread)[: len(tokens)]

    @property
    def most_graphs(self) -> int:
        """Graphs that there can be."""
        return len(self._lengths) * len(self._sizes)

    def capture_now(self, vocab_size: int, most_tokens: int) -> Iterator[None]:
        """Captures a graph at each step of the iteration, those of short sequences first.

        On scratch memory of `most_tokens` tokens in each row. Each is compared with a batch that has to be filled up,
        if its size allows.
        """
        for most_keys in self._lengths:
            for size in reversed(self._sizes):  # the largest first: the smaller ones fit into its memory
                if not self._passes.usable or self._passes.full:
                    return
                batch = range(max(1, size - 1))
                rows = [number % len(self._kv) for number in batch]
                positions = [number % most_tokens for number in batch]
                tokens = [(7 * position + 3) % vocab_size for position in positions]
                self._run(size, most_keys, tokens, rows, positions)
                yield

    def _key(self, positions: Sequence[int]) -> tuple[int, int]:
        """The batch size and the keys of the graph for tokens at these positions."""
        most_keys = min(max(self._lengths[0], 1 << max(positions).bit_length()), self._kv.shape[1])
        return self._sizes[self._size_of[len(positions)]], most_keys

    def _run(
        self,
        size: int,
        most_keys: int,
        tokens: Sequence[int],
        rows: Sequence[int],
        positions: Sequence[int],
        unread: UnreadTokens | None = None,
    ) -> torch.Tensor:
        count = len(tokens)
        numbers = np.empty((3, size), np.int64)
        numbers[:, :count] = tokens, positions, rows
        numbers[:, count:] = numbers[:, count - 1 : count]
        starts = numbers[2] * self._kv.shape[1]
        unused = np.zeros(size, np.int64)
        by_token = np.stack((numbers[0], numbers[1], starts + numbers[1], unused))
        self._inputs.send(by_token, unused[:0], np.stack((unused, starts, numbers[1] + 1)))
        if unread is not None:
            unread.put(self._inputs.tokens)
            filled = self._inputs.tokens[count:size]
            filled.copy_(self._inputs.tokens[count - 1 : count].expand(len(filled)))
        return self._passes.run((size, most_keys), lambda: DecodeStep(self._kv, self._inputs, size, most_keys), size)


def _sizes(largest: int) -> list[int]:
    """Powers of two up to 8, then multiples of 8 up to 64, then of 32.

    Up to 64, a batch is filled up by less than eight requests. A kernel's matrix tiles have 64 rows or more.
    """
    if largest <= 4:
        return [*(size for size in (1, 2) if size < largest), largest]
    by_eight = range(8, min(largest, _BY_EIGHT) + 8, 8)
    return [1, 2, 4, *by_eight, *range(_BY_EIGHT + _BY_THIRTY_TWO, largest + _BY_THIRTY_TWO, _BY_THIRTY_TWO)]
