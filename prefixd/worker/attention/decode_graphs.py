"""Decode passes as CUDA graphs: one launch for a whole pass in place of some hundred.

A graph has fixed addresses and shapes. With virtual tensors the addresses of KV do not change while requests come, grow
and end, so one graph a batch size serves all batches. The differences between passes are in a few small tensors, which
are written before each replay. A batch that is smaller than its graph is filled up with copies of its last request:
they compute and write the same values at the same place.

`benchmarks.gpu` replays them on a GPU; the tests replay without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from prefixd.worker.memory.kv_memory import Segment, Spans
from prefixd.worker.to_device import to_device

Compute = Callable[[], torch.Tensor]
_WARM_UPS = 2
_FEWEST_KEYS = 1024
_TOLERANCE = 0.02
"""Largest relative norm of the logits' difference. Other orders of summation in 16 bits give a few thousandths, other
inputs about 1."""


class Replay(Protocol):
    """A captured pass."""

    def __call__(self) -> torch.Tensor:
        """Compute it again from what its tensors hold now; the result is the same tensor each time."""
        ...


class DecodeStep:
    """The memory of a captured pass: one new token for each of `size` sequences; see `StepKv`.

    kv: ``[requests, tokens, layers, 2, kv_heads, head_dim]``.
    most_keys: tokens of the longest sequence that it can compute.
    """

    def __init__(self, kv: torch.Tensor, size: int, most_keys: int) -> None:
        self.size = size
        self._most_keys = most_keys
        self._stride = kv.shape[1]
        self._flat = kv.flatten(0, 1)
        device = kv.device
        self.tokens = torch.zeros((1, size), dtype=torch.int64, device=device)
        self.positions = torch.zeros((1, size), dtype=torch.int64, device=device)
        self.all_rows = torch.arange(size, device=device)
        self.query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._slots = torch.zeros(size, dtype=torch.int64, device=device)
        self._starts = torch.zeros(size + 1, dtype=torch.int32, device=device)
        self._lengths = torch.ones(size, dtype=torch.int32, device=device)
        self.segments = [Segment(_NoSequence(), 0, 1)] * size

    def fill(self, tokens: Sequence[int], rows: Sequence[int], positions: Sequence[int]) -> None:
        """Set the inputs of the next replay: for each sequence its token, its row of `kv` and the token's position."""
        missing = self.size - len(tokens)
        filled = [[*values, *[values[-1]] * missing] for values in (tokens, rows, positions)]
        device = self.tokens.device
        tokens_, rows_, positions_ = to_device(filled, torch.int64, device)
        self.tokens[0].copy_(tokens_)
        self.positions[0].copy_(positions_)
        self._slots.copy_(rows_ * self._stride + positions_)
        self._starts[:-1].copy_(rows_ * self._stride)
        self._lengths.copy_(positions_ + 1)

    def write(self, layer: int, pairs: torch.Tensor) -> None:
        """One kernel for all sequences."""
        self._flat[:, layer].index_copy_(0, self._slots, pairs)

    def scrub(self, segment: int, end: int) -> None:
        """Never called: flash attention reads nothing behind the last token."""
        raise NotImplementedError("a captured pass runs with flash attention alone")

    def read(self, layer: int, spans: Spans) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Never called, as `scrub`."""
        raise NotImplementedError("a captured pass runs with flash attention alone")

    def varlen_arguments(self) -> tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], dict[str, object]]:
        """Sequence i begins at `starts[i]`, and `seqused_k` says how far it reaches."""
        return lambda layer: (self._flat[:, layer, 0], self._flat[:, layer, 1]), {
            "cu_seq_k": self._starts,
            "max_k": self._most_keys,
            "seqused_k": self._lengths,
        }


class DecodeGraphs:
    """Graphs of decode passes by batch size and length, captured when first needed.

    kv: all virtual tensors.
    compute: runs the model on a step and returns the logits of all its rows, ``[size, vocab_size]``.
    largest: most sequences in a pass.
    on_failure: called once, with the reason in one line, when graphs are given up.
    capture: captures a computation; by default on the current CUDA device.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        compute: Callable[[DecodeStep], torch.Tensor],
        largest: int,
        on_failure: Callable[[str], None],
        capture: Callable[[Compute], Replay] | None = None,
    ) -> None:
        self.replays = 0
        self._kv = kv
        self._compute = compute
        self._sizes = _sizes(largest)
        self._on_failure = on_failure
        self._capture = capture or GraphCapture()
        self._captured: dict[tuple[int, int], tuple[DecodeStep, Replay]] = {}

    @property
    def captured_sizes(self) -> list[int]:
        """The batch sizes that have a graph."""
        return sorted({size for size, _ in self._captured})

    def fits(self, sequences: int) -> bool:
        """Whether there is a graph for `sequences` sequences, or can be."""
        return bool(self._sizes) and sequences <= self._sizes[-1]

    def run(self, tokens: Sequence[int], rows: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """The logits of a token of each sequence, ``[len(tokens), vocab_size]``, valid until the next run.

        rows[i] is the sequence's row of `kv`, which has memory for the token at positions[i].
        """
        size = next(size for size in self._sizes if size >= len(tokens))
        most_keys = min(max(_FEWEST_KEYS, 1 << max(positions).bit_length()), self._kv.shape[1])
        found = self._captured.get((size, most_keys))
        if found is None:
            step = DecodeStep(self._kv, size, most_keys)
            step.fill(tokens, rows, positions)
            logits = self._compute(step)
            replay = self._captured_like(logits, step)
            if replay is not None:
                self._captured[size, most_keys] = step, replay
            return logits[: len(tokens)]
        step, replay = found
        step.fill(tokens, rows, positions)
        self.replays += 1
        return replay()[: len(tokens)]

    def _captured_like(self, expected: torch.Tensor, step: DecodeStep) -> Replay | None:
        """A graph of a step that gives the expected logits; None if it fails, and then all graphs are given up."""
        finite = expected.isfinite()  # damaged KV of one request is no fault of the graph
        wanted = expected[finite].float()
        try:
            replay = self._capture(lambda: self._compute(step))
            difference = float((replay()[finite].float() - wanted).norm())
        except RuntimeError as failure:  # whatever a model does that a graph cannot hold
            why = (str(failure).strip() or type(failure).__name__).splitlines()[0]
            self._give_up(f"a decode pass of {step.size} cannot be captured: {why}")
            return None
        norm = float(wanted.norm())
        if not difference <= _TOLERANCE * norm:
            self._give_up(
                f"the graph of a decode pass of {step.size} comes to other logits: they differ by {difference:.2g} of "
                f"{norm:.2g}"
            )
            return None
        return replay

    def _give_up(self, reason: str) -> None:
        self._sizes = []
        self._captured.clear()
        self._on_failure(reason)


class GraphCapture:
    """Captures computations on the current CUDA device. Their graphs share memory, since one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Replay:
        """Raises RuntimeError for a computation that waits for the device, or that a graph cannot hold otherwise."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # the first calls allocate and choose kernels, which cannot be captured
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # The mapping thread may call the driver.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class _NoSequence:
    blocks = 0


def _sizes(largest: int) -> list[int]:
    """Powers of two up to 8, then multiples of 8: a batch is filled up by less than eight requests."""
    sizes = [size for size in (1, 2, 4) if size < largest]
    return [*sizes, *range(8, largest + 8, 8)] if largest > 4 else [*sizes, largest]
