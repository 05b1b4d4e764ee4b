"""The CUDA graphs of an engine: which pass is replayed by which."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefixd.worker.graphs.captured import Span
from prefixd.worker.graphs.decode_graphs import DecodeGraphs
from prefixd.worker.graphs.prompt_graphs import PromptGraphs
from prefixd.worker.to_device import UnreadTokens


class PassGraphs:
    """Graphs of decode passes, and of passes with short prompts.

    prompts: None: passes with prompts are computed operator by operator.
    """

    def __init__(self, decode: DecodeGraphs, prompts: PromptGraphs | None = None) -> None:
        self.decode = decode
        self.prompts = prompts

    def run(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        wanted: Sequence[int],
        unread: UnreadTokens | None = None,
    ) -> torch.Tensor | None:
        """The logits of the wanted rows, valid until the next run; None if no graph fits the pass.

        tokens: of all spans, one after the other; embeddings of images have no graph.
        wanted: rows among them, ascending, at most one a span.
        unread: those of the tokens that the host has not read.
        """
        if len(wanted) == len(spans) == len(tokens):
            rows, positions, _ = zip(*spans, strict=True)
            if not self.decode.fits(positions):
                return None
            return self.decode.run(tokens, rows, positions, unread)
        if self.prompts is None or not self.prompts.fits(spans):
            return None
        return self.prompts.run(tokens, spans, wanted, unread)
