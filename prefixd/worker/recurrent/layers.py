"""Runs the recurrent layers of a model in a flattened batch, each sequence on its own state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from prefixd.worker.recurrent.griffin import is_griffin_block
from prefixd.worker.recurrent.mends import ResumableForward, resumable_forward
from prefixd.worker.recurrent.recurrent_modules import record
from prefixd.worker.recurrent.segments import StateSegment, pieces
from prefixd.worker.recurrent.state_cache import StateCache
from prefixd.worker.recurrent.state_layout import StateLayout
from prefixd.worker.to_device import to_device


@dataclass(frozen=True, slots=True)
class _Step:
    """One token of a sequence that has a state: its row in the batch, and the state's views."""

    segment: StateSegment
    row: int
    views: tuple[torch.Tensor, torch.Tensor | None]


class RecurrentLayers:
    """Replaces the forward of the recurrent modules of `model`; without any, there is nothing to replace or to run.

    A recurrent module does not know segments: given a row with the tokens of several requests, it would continue from
    one request into the next. So while a pass is `running`, each such module computes one segment after the other, and
    a segment in pieces (`pieces`); the rest of the model takes the whole batch. On a GPU all segments of one token are
    computed in one call. While no pass is running, the model computes as before.

    cell_tokens: the distance between the positions at which pieces end, at least 1.
    Raises ModelError if the model has recurrent layers that cannot be run so.
    """

    def __init__(self, model: Any, cell_tokens: int) -> None:
        recorded = record(model)
        self.layout = StateLayout([shape for _, shape in recorded])
        self.cell_tokens = cell_tokens
        self.modules = [module for module, _ in recorded]
        # One call reads the weights once for all sequences. On a CPU the bits would then depend on the other sequences.
        self._together = next(model.parameters()).device.type != "cpu"
        self._forwards: list[ResumableForward] = []
        self._segments: Sequence[StateSegment] | None = None
        for index, module in enumerate(self.modules):
            self._forwards.append(resumable_forward(module))
            module.forward = partial(self._forward, index, module.forward)

    @contextmanager
    def running(self, segments: Sequence[StateSegment]) -> Iterator[None]:
        """While in it, calls of the model compute these segments: its first rows are their tokens, in order.

        Rows behind them are padding and come out of recurrent layers as zeros. Raises ValueError for a buffer that is
        too small and for a position to keep at which no piece ends; the states are then what they were.
        """
        for segment in segments:
            self._check(segment)
        self._segments = segments
        try:
            yield
        finally:
            self._segments = None

    def compute(self, layer: int, hidden_states: torch.Tensor, segments: Sequence[StateSegment]) -> torch.Tensor:
        """A layer's result for a flattened batch, ``[1, rows, hidden]``; changes the states of the segments."""
        output = torch.zeros_like(hidden_states)
        steps = list[_Step]()
        row = 0
        for segment in segments:
            views = self.layout.views(segment.state, layer)
            if self._together and len(segment) == 1 and segment.start > 0:
                steps.append(_Step(segment, row, views))
                row += 1
                continue
            for start, stop in pieces(segment.start, segment.stop, self.cell_tokens):
                rows = slice(row, row + stop - start)
                positions = torch.arange(start, stop, device=hidden_states.device)[None]
                cache = StateCache(*views, started=start > 0)
                output[:, rows] = self._forwards[layer](hidden_states[:, rows], cache, positions)
                row = rows.stop
                self._keep(layer, segment, stop)
        if steps:
            self._step(layer, hidden_states, output, steps)
        return output

    def _step(self, layer: int, hidden_states: torch.Tensor, output: torch.Tensor, steps: Sequence[_Step]) -> None:
        """One token of each sequence, in one call on copies of their states."""
        conv = torch.cat([step.views[0] for step in steps])
        recurrent = [step.views[1] for step in steps if step.views[1] is not None]
        states = (conv, torch.cat(recurrent) if recurrent else None)
        where = [[step.row for step in steps], [step.segment.start for step in steps]]
        rows, positions = to_device(where, torch.int64, conv.device)
        tokens = hidden_states[0, rows][:, None]
        output[0, rows] = self._forwards[layer](tokens, StateCache(*states, started=True), positions[:, None])[:, 0]
        for index, step in enumerate(steps):
            for view, state in zip(step.views, states, strict=True):
                if view is not None and state is not None:
                    view.copy_(state[index : index + 1])
            self._keep(layer, step.segment, step.segment.stop)

    def _keep(self, layer: int, segment: StateSegment, position: int) -> None:
        for kept, buffer in segment.keep:
            if kept == position:
                self.layout.copy(segment.state, buffer, layer)

    def _forward(self, layer: int, own: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replaces a module's forward."""
        if self._segments is None:
            return own(hidden_states, *args, **kwargs)
        result = self.compute(layer, hidden_states, self._segments)
        return (result, None) if is_griffin_block(self.modules[layer]) else result

    def _check(self, segment: StateSegment) -> None:
        for buffer in (segment.state, *(buffer for _, buffer in segment.keep)):
            if buffer.dtype != torch.uint8 or buffer.dim() != 1 or len(buffer) < self.layout.nbytes:
                raise ValueError(
                    f"a state is in {buffer.dtype} of shape {tuple(buffer.shape)}, not in {self.layout.nbytes} of uint8"
                )
        for position, _ in segment.keep:
            inside = segment.start < position <= segment.stop
            if not inside or (position % self.cell_tokens and position != segment.stop):
                raise ValueError(
                    f"the state after {position} tokens cannot be kept while tokens [{segment.start}, {segment.stop}) "
                    f"are computed in cells of {self.cell_tokens}"
                )
