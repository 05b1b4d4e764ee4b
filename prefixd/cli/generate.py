"""`prefixd generate`: one prompt, its tokens as they come."""

from __future__ import annotations

import re
import sys
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prefixd.cli.connect import Address, connected, run
from prefixd.cli.failures import examples

if TYPE_CHECKING:
    from prefixd.client import GenerateEvent

EXAMPLES = examples(
    'prefixd generate "Once upon a time" --max-tokens 64',
    "prefixd generate - < prompt.txt",
    'prefixd generate --token-ids "1,2,3,4" --json',
    'prefixd generate "The cat" --temperature 0.8 --top-k 40 --min-p 0.05 --n 4 --best-of 8',
    'prefixd generate "Once upon a time" --stop "." --stop "!" --logprobs 5 --json',
    'prefixd generate "Once upon a time" --beams 4 --n 2 --length-penalty 0.8',
)


def generate_command(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", show_default=False, help="The prompt; - reads standard input."),
    ] = None,
    token_ids: Annotated[
        str | None,
        typer.Option("--token-ids", metavar="IDS", show_default=False, help="The prompt as ids: 1,2,3 or '1 2 3'."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among so many likeliest tokens; 0: among all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Sample among the likeliest tokens of this probability together."),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Sample among tokens at least so likely relative to the likeliest one."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and output become less likely. 0.01 to 100.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0: tokens of the output become less likely. -2 to 2.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Above 0: the same, the more often they are there. -2 to 2.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, show_default=False, help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", show_default=False, help="End before this text; may be given several times."),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="Tell the sum of the tokens' logprobs; with --json each one's, and so many likeliest tokens'.",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Sequences to answer with; needs a temperature or beams.")] = 1,
    best_of: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Compute so many sequences and show the n likeliest."),
    ] = None,
    beams: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Search with so many beams and show the n best sequences."),
    ] = None,
    length_penalty: Annotated[
        float, typer.Option(help="Of a search: above 0 favours long sequences. -10 to 10.")
    ] = 1.0,
    early_stopping: Annotated[
        bool, typer.Option("--early-stopping", help="End a search when as many sequences have ended as it has beams.")
    ] = False,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an event.")] = False,
) -> None:
    """Generate text with the daemon's model and print it as it comes. Ctrl-C cancels the request.

    Several sequences are printed one below the other, when all have ended.
    """
    prompt = _prompt(text, token_ids)

    async def ask() -> None:
        from prefixd.client import BeamSearch

        search = (
            BeamSearch(width=beams, length_penalty=length_penalty, early_stopping=early_stopping) if beams else None
        )
        show = _print_json_event if as_json else _Transcript(n).show
        async with connected(address) as client:
            events = client.generate(
                prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                seed=seed,
                stop=stop or (),
                logprobs=logprobs,
                n=n,
                best_of=best_of,
                beam_search=search,
            )
            async with aclosing(events):
                async for event in events:
                    show(event)

    run(ask())


class _Transcript:
    """Prints the text, or the ids where there is no text; at the end a line of figures.

    Of one sequence the text comes as it is made. Of several, each is printed under its number at the end.
    """

    def __init__(self, sequences: int) -> None:
        self._texts = [""] * sequences
        self._ids: list[list[int]] = [[] for _ in range(sequences)]
        self._headings = [f"[{index}]" for index in range(sequences)]

    def show(self, event: GenerateEvent) -> None:
        """Prints one event; figures go to stderr, so that the output is the text alone."""
        from prefixd.client import Finished, SequenceFinished, Tokens

        if isinstance(event, Tokens):
            self._texts[event.index] += event.text
            self._ids[event.index] += event.token_ids
            if len(self._texts) == 1:
                sys.stdout.write(event.text)
                sys.stdout.flush()
        elif isinstance(event, SequenceFinished):
            figures = f"{event.output_tokens} tokens, {event.reason.value}{_logprob(event.cumulative_logprob)}"
            self._headings[event.index] = f"[{event.index}: {figures}]"
        elif isinstance(event, Finished):
            self._print_rest()
            hits = ", ".join(
                f"{tokens} from {tier.name.lower()}" for tier, tokens in event.hit_tokens.items() if tokens
            )
            typer.secho(
                f"[{event.output_tokens} tokens ({event.reason.value}){_logprob(event.cumulative_logprob)}, "
                f"first after {event.ttft_s:.2f} s; prompt of {event.prompt_tokens} tokens, "
                f"{hits or 'none of it'} cached]",
                err=True,
                dim=True,
            )

    def _print_rest(self) -> None:
        several = len(self._texts) > 1
        for text, ids, heading in zip(self._texts, self._ids, self._headings, strict=True):
            shown = text or " ".join(map(str, ids))
            if several:
                sys.stdout.write(f"{heading}\n{shown}\n")
            else:
                sys.stdout.write("\n" if text else f"{shown}\n")
        sys.stdout.flush()


def _logprob(total: float | None) -> str:
    return "" if total is None else f", logprob {total:.3f}"


def _print_json_event(event: GenerateEvent) -> None:
    from prefixd.cli import plain
    from prefixd.client import Finished

    fields = asdict(event)
    if isinstance(event, Finished):
        fields["hit_tokens"] = {tier.name.lower(): tokens for tier, tokens in event.hit_tokens.items()}
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()
    plain.print_json_line({"event": name, **fields})


def _prompt(text: str | None, token_ids: str | None) -> str | list[int]:
    if (text is None) == (token_ids is None):
        raise typer.BadParameter("give a prompt as text or with --token-ids, one of the two")
    if token_ids is None:
        return sys.stdin.read() if text == "-" else text or ""
    try:
        return [int(token) for token in token_ids.replace(",", " ").split()]
    except ValueError as error:
        raise typer.BadParameter(f"--token-ids {token_ids!r}: write ids such as 1,2,3") from error
