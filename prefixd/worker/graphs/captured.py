"""Captured passes: forward passes that are recorded once as CUDA graphs, and replayed with one launch.

A graph has fixed addresses and shapes. The addresses of KV in virtual tensors do not change while requests come, grow
and end. What differs from pass to pass is a few numbers, which are copied to the device before each replay, all in one
copy (`PassInputs`).

A graph is compared with the pass that it replaces when it is captured. If it cannot be captured, or comes to other
logits, all graphs of its kind are given up, and their passes are computed operator by operator. If there is no memory
for a graph, those that there are stay, and no further one is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from prefixd.worker.memory.kv_memory import Segment, Spans

Compute = Callable[[], torch.Tensor]
_WARM_UPS = 1
_TOLERANCE = 0.02
"""Largest relative norm of the logits' difference. Other orders of summation in 16 bits give a few thousandths, other
inputs about 1."""


class Span(NamedTuple):
    """`length` tokens of a sequence from its token `start` on; the sequence lies in a row of the virtual tensors."""

    row: int
    start: int
    length: int


class Replay(Protocol):
    """A captured pass."""

    def __call__(self) -> torch.Tensor:
        """Compute it again from what its tensors hold now; the result is the same tensor each time."""
        ...


class PassInputs:
    """The numbers of a pass on the device, which all graphs of a kind read.

    tokens: most tokens of a pass.  sequences: most sequences.

    On the device, views of one buffer: `tokens`, `positions`, `slots`, `sources` (int64, one a token), `wanted`
    (int64, one a sequence), and `query_starts`, `starts`, `lengths` (int32, one a sequence and one more).
    """

    def __init__(self, tokens: int, sequences: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        counts = sequences + 2 - sequences % 2  # at least one more, and even: two 32-bit numbers fill one of 64
        self._wide, self._narrow = 4 * tokens, 3 * counts
        self._tokens, self._sequences, self._counts = tokens, sequences, counts
        self._buffer = torch.zeros(self._wide + sequences + self._narrow // 2, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.slots, self.sources = self._buffer[: self._wide].view(4, tokens)
        self.wanted = self._buffer[self._wide : self._wide + sequences]
        self.query_starts, self.starts, self.lengths = (
            self._buffer[self._wide + sequences :].view(torch.int32).view(3, counts)
        )

    def send(
        self,
        by_token: npt.NDArray[np.int64],
        wanted: npt.NDArray[np.int64],
        by_sequence: npt.NDArray[np.int64],
    ) -> None:
        """Queue a copy of a pass's numbers to the device; it waits for nothing.

        by_token: ``[4, tokens of the pass]``, in the order of the attributes. by_sequence: ``[3, sequences + 1]``.
        """
        # Torch gives a pinned buffer out again only when the copies from it have ended.
        buffer = torch.empty(len(self._buffer), dtype=torch.int64, pin_memory=self._pinned)
        numbers = buffer.numpy()
        numbers[: self._wide].reshape(4, self._tokens)[:, : by_token.shape[1]] = by_token
        numbers[self._wide : self._wide + self._sequences] = 0  # a graph reads all of them
        numbers[self._wide : self._wide + len(wanted)] = wanted
        narrow = numbers[self._wide + self._sequences :].view(np.int32).reshape(3, self._counts)
        narrow[:, : by_sequence.shape[1]] = by_sequence
        self._buffer.copy_(buffer, non_blocking=True)


class CapturedStep:
    """The memory of a captured pass; see `StepKv`.

    Args:
        kv: ``[requests, tokens, layers, 2, kv_heads, head_dim]``.
        inputs: what differs from pass to pass.
        rows: tokens of the pass.
        sequences: of the pass.
        longest: most tokens of the pass in one sequence.
        most_keys: tokens of the longest sequence that it can compute.
    """

    def __init__(
        self, kv: torch.Tensor, inputs: PassInputs, rows: int, sequences: int, longest: int, most_keys: int
    ) -> None:
        self.rows = rows
        self.longest = longest
        self._most_keys = most_keys
        self._flat = kv.flatten(0, 1)
        self.tokens, self.positions = inputs.tokens[None, :rows], inputs.positions[None, :rows]
        self.query_starts = inputs.query_starts[: sequences + 1]
        self._slots = inputs.slots[:rows]
        self._starts = inputs.starts[: sequences + 1]
        self._lengths = inputs.lengths[:sequences]
        self.wanted = inputs.wanted[:sequences]
        self.segments: Sequence[Segment] = ()

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


class CapturedPasses:
    """The graphs of one kind of passes, by what their shapes depend on.

    kind: for messages, "decode pass".
    compute: runs the model on a step and returns the wanted rows' logits.
    on_failure: called once, with the reason in one line, when the graphs are given up.
    capture: captures a computation.
    note: called once, with a line for the log, when there is no memory for further graphs.
    results: most rows of logits of a pass; all graphs write theirs to one tensor.
    """

    def __init__(
        self,
        kind: str,
        compute: Callable[[CapturedStep], torch.Tensor],
        on_failure: Callable[[str], None],
        capture: Callable[[Compute], Replay],
        note: Callable[[str], None],
        results: int,
    ) -> None:
        self.usable = True
        self.full = False
        self.replays = 0
        self._kind = kind
        self._compute = compute
        self._on_failure = on_failure
        self._capture = capture
        self._note = note
        self._results = results
        self._logits: torch.Tensor | None = None
        # A graph reads the step's tensors, so the step lives as long.
        self._captured: dict[tuple[int, int], tuple[CapturedStep, Replay]] = {}

    @property
    def captured(self) -> list[tuple[int, int]]:
        """The keys of the graphs that there are."""
        return [*self._captured]

    def has_room(self, key: tuple[int, int]) -> bool:
        """Whether there is a graph of `key`, or can be."""
        return self.usable and (not self.full or key in self._captured)

    def run(self, key: tuple[int, int], step: Callable[[], CapturedStep], size: int) -> torch.Tensor:
        """The logits of a pass whose numbers have been sent; `size`: its shape, for messages.

        Replays the graph of `key`, or computes `step` and captures it. The result is valid until the next call.
        """
        found = self._captured.get(key)
        if found is not None:
            self.replays += 1
            return found[1]()
        made = step()
        logits = self._compute(made)
        if self.usable and not self.full:
            replay = self._captured_like(logits, made, size)
            if replay is not None:
                self._captured[key] = made, replay
        return logits

    def _captured_like(self, expected: torch.Tensor, step: CapturedStep, size: int) -> Replay | None:
        """A graph of a step that gives the expected logits; None if it fails."""
        try:
            if self._logits is None:
                self._logits = expected.new_empty((self._results, expected.shape[1]))
            logits = self._logits[: len(expected)]
            finite = expected.isfinite()  # damaged KV of one request is no fault of the graph
            wanted = expected[finite].float()
            replay = self._capture(lambda: logits.copy_(self._compute(step)))
            difference = float((replay()[finite].float() - wanted).norm())
        except torch.OutOfMemoryError as failure:
            self.full = True
            self._note(f"no memory for the CUDA graph of a {self._kind} of {size}, nor for others: {_line(failure)}")
            return None
        except RuntimeError as failure:  # whatever a model does that a graph cannot hold
            self.give_up(f"a {self._kind} of {size} cannot be captured: {_line(failure)}")
            return None
        norm = float(wanted.norm())
        if not difference <= _TOLERANCE * norm:
            self.give_up(
                f"the graph of a {self._kind} of {size} comes to other logits: they differ by {difference:.2g} of "
                f"{norm:.2g}"
            )
            return None
        return replay

    def give_up(self, reason: str) -> None:
        """Use no graphs of this kind any more."""
        self.usable = False
        self._captured.clear()
        self._on_failure(reason)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class GraphCapture:
    """Captures computations on the current CUDA device. Their graphs share memory, since one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Replay:
        """Raises RuntimeError for a computation that waits for the device, or that a graph cannot hold otherwise."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # the first call allocates and chooses kernels, which cannot be captured
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


class NoSequence:
    """The sequence of a captured pass's segments: which it is differs from pass to pass."""

    blocks = 0
