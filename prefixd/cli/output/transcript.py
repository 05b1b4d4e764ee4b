"""What `prefixd generate` prints of an answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from prefixd.cli.output.terminal import shown

if TYPE_CHECKING:
    from prefixd.client import Finished, GenerateEvent, SequenceFinished


class Transcript:
    """Prints the text, or the ids where the model has no tokenizer; at the end a line of figures.

    Of one sequence the text comes as it is made. Of several, each is printed under its number at the end.

    Args:
        sequences: how many there are.
        has_text: the model is known to have a tokenizer: an empty text is the answer, and ids are not shown for it.
            Else ids are shown if no sequence had text.
        searched: a beam search finds them, so their figure is its score.
    """

    def __init__(self, sequences: int, *, has_text: bool, searched: bool) -> None:
        self._has_text = has_text
        self._figure = "score" if searched else "logprob"
        self._texts = [""] * sequences
        self._ids: list[list[int]] = [[] for _ in range(sequences)]
        self._ends: dict[int, SequenceFinished] = {}

    def show(self, event: GenerateEvent) -> None:
        """Prints one event; figures go to stderr, so that the output is the text alone."""
        from prefixd.client import Accepted, Finished, SequenceFinished, Tokens

        if isinstance(event, Accepted):
            if event.retention_refused:
                typer.secho(f"[cached without its priorities: {event.retention_refused}]", err=True, fg="yellow")
        elif isinstance(event, Tokens):
            self._has_text = self._has_text or bool(event.text)
            self._texts[event.index] += event.text
            self._ids[event.index] += event.token_ids
            if len(self._texts) == 1:
                sys.stdout.write(self._fit(event.text))
                sys.stdout.flush()
        elif isinstance(event, SequenceFinished):
            self._ends[event.index] = event
        elif isinstance(event, Finished):
            self._print_rest()
            self._print_figures(event)

    def _print_rest(self) -> None:
        several = len(self._texts) > 1
        for index, (text, ids) in enumerate(zip(self._texts, self._ids, strict=True)):
            if several:
                sys.stdout.write(f"{self._heading(index)}\n{self._fit(text)}")
            sys.stdout.write("\n" if self._has_text else " ".join(map(str, ids)) + "\n")
        sys.stdout.flush()

    def _fit(self, text: str) -> str:
        """As it is for a file or a pipe; a terminal would obey what a model writes, or what it was made to write."""
        return shown(text, keep="\n\t") if sys.stdout.isatty() else text

    def _heading(self, index: int) -> str:
        end = self._ends.get(index)
        if end is None:
            return f"[{index}]"
        return f"[{index}: {end.output_tokens} tokens, {end.reason.value}{self._logprob(end)}]"

    def _print_figures(self, finished: Finished) -> None:
        # The best of several has an end of its own; the last event's figures are those of all that were computed.
        end = self._ends.get(0, finished) if len(self._texts) == 1 else finished
        others = f"; {finished.output_tokens} tokens in all sequences" if end is not finished else ""
        hits = ", ".join(f"{tokens} from {tier.name.lower()}" for tier, tokens in finished.hit_tokens.items() if tokens)
        typer.secho(
            f"[{end.output_tokens} tokens ({end.reason.value}){self._logprob(end)}, "
            f"first after {finished.ttft_s:.2f} s; prompt of {finished.prompt_tokens} tokens, "
            f"cached: {hits or 'none'}{others}]",
            err=True,
            dim=True,
        )

    def _logprob(self, end: SequenceFinished | Finished) -> str:
        total = end.cumulative_logprob
        return "" if total is None else f", {self._figure} {total:.3f}"
