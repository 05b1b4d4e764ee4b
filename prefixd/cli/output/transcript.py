"""Prints an answer for `prefixd generate`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from prefixd.cli.output.terminal import shown

if TYPE_CHECKING:
    from prefixd.client import Finished, GenerateEvent, SequenceFinished


class Transcript:
    """Prints the text, or the ids if the model has no tokenizer; at the end a line of figures.

    The text of a single sequence is printed as it arrives. Several sequences are printed at the end, each under its
    number.

    Args:
        sequences: number of sequences.
        has_text: the model is known to have a tokenizer: an empty text is then shown as it is. Otherwise ids are shown
            if no sequence had text.
        searched: the sequences come from a beam search, so their figure is its score.
    """

    def __init__(self, sequences: int, *, has_text: bool, searched: bool) -> None:
        self._has_text = has_text
        self._figure = "score" if searched else "logprob"
        self._texts = [""] * sequences
        self._ids: list[list[int]] = [[] for _ in range(sequences)]
        self._ends: dict[int, SequenceFinished] = {}

    def show(self, event: GenerateEvent) -> None:
        """Prints one event; figures go to stderr, so that stdout has the text only."""
        from prefixd.client import Accepted, Finished, SequenceFinished, Tokens

        if isinstance(event, Accepted):
            if event.retention_refused:
                typer.secho(f"[cached without its priorities: {event.retention_refused}]", err=True, fg="yellow")
        elif isinstance(event, Tokens):
            self._has_text = self._has_text or bool(event.text)
            self._texts[event.index] += event.text
            self._ids[event.index] += event.token_ids
            if len(self._texts) == 1:
                sys.stdout.write(self._escape_for_terminal(event.text))
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
                sys.stdout.write(f"{self._heading(index)}\n{self._escape_for_terminal(text)}")
            sys.stdout.write("\n" if self._has_text else " ".join(map(str, ids)) + "\n")
        sys.stdout.flush()

    def _escape_for_terminal(self, text: str) -> str:
        """Escapes the text for a terminal, which would obey control characters that the model writes."""
        return shown(text, keep="\n\t") if sys.stdout.isatty() else text

    def _heading(self, index: int) -> str:
        end = self._ends.get(index)
        if end is None:
            return f"[{index}]"
        return f"[{index}: {_tokens(end.output_tokens)}, {end.reason.value}{self._logprob(end)}]"

    def _print_figures(self, finished: Finished) -> None:
        # The best of several sequences has an end of its own; the last event counts all that were computed.
        end = self._ends.get(0, finished) if len(self._texts) == 1 else finished
        others = f"; {finished.output_tokens} tokens in all sequences" if end is not finished else ""
        hits = ", ".join(f"{tokens} from {tier.name.lower()}" for tier, tokens in finished.hit_tokens.items() if tokens)
        typer.secho(
            f"[{_tokens(end.output_tokens)} ({end.reason.value}){self._logprob(end)}, "
            f"first after {finished.ttft_s:.2f} s; prompt of {_tokens(finished.prompt_tokens)}, "
            f"cached: {hits or 'none'}{others}]",
            err=True,
            dim=True,
        )

    def _logprob(self, end: SequenceFinished | Finished) -> str:
        total = end.cumulative_logprob
        return "" if total is None else f", {self._figure} {total:.3f}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
