"""Passes with short prompts as CUDA graphs: without one, a prompt of 100 tokens takes as long as the host takes to
launch a thousand kernels.

One graph a number of tokens serves all passes of up to 8 sequences, whether they are prompts or decode. A pass with
fewer tokens is filled up:

```
tokens        a0 a1 a2 b7 b8 -- -- --       two prompts, and 3 rows of padding; the graph has 8 rows
sequences     [ a    ] [ b ] [ pad  ] []    padding is a sequence of its own, on keys that a sequence has; the rest of 9
                                            sequences have no query
writes        a0 a1 a2 b7 b8 b8 b8 b8       rows of padding write what the last token writes, at the same place
```

`max_k` is a constant: flash attention divides the keys of single queries alone among the multiprocessors. For the same
reason a prompt behind many keys (`_MOST_KEYS`) is computed without a graph, where its prefix can be split.

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
    NoSequence,
    PassInputs,
    Replay,
    Span,
)
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.to_device import UnreadTokens

_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
_MOST_SEQUENCES = 8
_MOST_KEYS = 16 << 10


class PromptStep(CapturedStep):
    """The memory of a captured pass of `rows` tokens in at most 8 sequences; see `StepKv`."""

    def __init__(self, kv: torch.Tensor, inputs: PassInputs, rows: int) -> None:
        super().__init__(kv, inputs, rows, _MOST_SEQUENCES + 1, rows, min(_MOST_KEYS, kv.shape[1]))
        self.segments = [Segment(NoSequence(), 0, rows)]
        self.wanted = inputs.wanted[:_MOST_SEQUENCES]
        self._sources = inputs.sources[:rows]

    def write(self, layer: int, pairs: torch.Tensor) -> None:
        """Rows of padding write the last token's keys and values."""
        super().write(layer, pairs.index_select(0, self._sources))


class PromptGraphs:
    """Graphs of passes with short prompts, by their number of tokens.

    kv: all virtual tensors.
    compute: runs the model on a step and returns the logits of its wanted rows.
    on_failure: called once, with the reason in one line, when graphs are given up.
    capture: captures a computation.
    note: called with a line for the log.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        compute: Callable[[CapturedStep], torch.Tensor],
        on_failure: Callable[[str], None],
        capture: Callable[[Compute], Replay],
        note: Callable[[str], None] = print,
    ) -> None:
        self._kv = kv
        self._size_of = np.searchsorted(_SIZES, np.arange(_SIZES[-1] + 1)).tolist()
        self._inputs = PassInputs(_SIZES[-1], _MOST_SEQUENCES + 1, kv.device)
        self._passes = CapturedPasses("pass with prompts", compute, on_failure, capture, note, results=_MOST_SEQUENCES)

    @property
    def replays(self) -> int:
        """Passes that were replayed."""
        return self._passes.replays

    @property
    def captured_sizes(self) -> list[int]:
        """The numbers of tokens that have a graph."""
        return sorted(size for size, _ in self._passes.captured)

    @property
    def most_graphs(self) -> int:
        """Graphs that there can be."""
        return len(_SIZES)

    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether there is a graph for a pass over these tokens, or can be."""
        tokens = sum(span.length for span in spans)
        return (
            len(spans) <= _MOST_SEQUENCES
            and tokens <= _SIZES[-1]
            and max(span.start + span.length for span in spans) <= _MOST_KEYS
            and self._passes.has_room((_SIZES[self._size_of[tokens]], _MOST_KEYS))
        )

    def run(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        wanted: Sequence[int],
        unread: UnreadTokens | None = None,
    ) -> torch.Tensor:
        """The logits of rows of the pass, ``[len(wanted), vocab_size]``, valid until the next run.

        tokens: of all spans, one after the other.
        wanted: rows among them, at most one a span.
        unread: those of the tokens that the host has not read.
        """
        size = _SIZES[self._size_of[len(tokens)]]
        return self._run(size, tokens, spans, wanted, unread)[: len(wanted)]

    def capture_now(self, vocab_size: int, most_tokens: int) -> Iterator[None]:
        """Captures a graph at each step of the iteration, on scratch memory of `most_tokens` tokens in each row.

        Each is compared with a pass that has to be filled up: two parts of one prompt, in two rows.
        """
        for size in reversed(_SIZES):  # the largest first: the smaller ones fit into its memory
            if not self._passes.usable or self._passes.full:
                return
            count = min(size - 1, most_tokens)
            half = count // 2
            spans = [Span(0, 0, half), Span(min(1, len(self._kv) - 1), half, count - half)]
            tokens = [(7 * position + 3) % vocab_size for position in range(count)]
            self._run(size, tokens, spans, [half - 1, count - 1])
            yield

    def _run(
        self,
        size: int,
        tokens: Sequence[int],
        spans: Sequence[Span],
        wanted: Sequence[int],
        unread: UnreadTokens | None = None,
    ) -> torch.Tensor:
        count, stride = len(tokens), self._kv.shape[1]
        rows, starts, counts = np.array(spans, np.int64).T
        stops = starts + counts
        ends = np.cumsum(counts)
        by_token = np.empty((4, size), np.int64)
        by_token[0, :count] = tokens
        by_token[1, :count] = np.arange(count) + np.repeat(stops - ends, counts)
        by_token[2, :count] = by_token[1, :count] + np.repeat(rows * stride, counts)
        by_token[3, :count] = np.arange(count)
        by_token[:, count:] = by_token[:, count - 1 : count]
        by_sequence = np.empty((3, _MOST_SEQUENCES + 2), np.int64)
        by_sequence[:, 0] = 0
        by_sequence[0, 1 : len(spans) + 1] = ends
        by_sequence[0, len(spans) + 1 :] = size
        by_sequence[1, : len(spans)] = rows * stride
        by_sequence[1, len(spans) :] = rows[-1] * stride
        by_sequence[2, : len(spans)] = stops
        # No more keys than rows of padding: with as many, each row sees one or more.
        by_sequence[2, len(spans) :] = min(int(stops[-1]), max(size - count, 1))
        self._inputs.send(by_token, np.array(wanted, np.int64), by_sequence)
        if unread is not None:  # what padding computes does not matter
            unread.put(self._inputs.tokens)
        return self._passes.run((size, _MOST_KEYS), lambda: PromptStep(self._kv, self._inputs, size), size)
