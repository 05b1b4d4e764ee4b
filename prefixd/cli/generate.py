"""`prefixd generate`: one prompt, its tokens as they come."""

from __future__ import annotations

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
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Sample among the likeliest tokens of this probability together."),
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, show_default=False, help="Makes sampling repeatable.")] = None,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an event.")] = False,
) -> None:
    """Generate text with the daemon's model and print it as it comes. Ctrl-C cancels the request."""
    prompt = _prompt(text, token_ids)

    async def ask() -> None:
        show = _print_json_event if as_json else _Transcript().show
        async with connected(address) as client:
            events = client.generate(prompt, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
            async with aclosing(events):
                async for event in events:
                    show(event)

    run(ask())


class _Transcript:
    """Prints the text as it comes, or the ids where there is no text; at the end a line of figures."""

    def __init__(self) -> None:
        self._text = False
        self._ids: list[int] = []

    def show(self, event: GenerateEvent) -> None:
        """Prints one event; figures go to stderr, so that the output is the text alone."""
        from prefixd.client import Finished, Tokens

        if isinstance(event, Tokens):
            self._text = self._text or bool(event.text)
            self._ids += event.token_ids
            sys.stdout.write(event.text)
            sys.stdout.flush()
        elif isinstance(event, Finished):
            sys.stdout.write("\n" if self._text else " ".join(map(str, self._ids)) + "\n")
            sys.stdout.flush()
            hits = ", ".join(
                f"{tokens} from {tier.name.lower()}" for tier, tokens in event.hit_tokens.items() if tokens
            )
            typer.secho(
                f"[{event.output_tokens} tokens ({event.reason.value}), first after {event.ttft_s:.2f} s; "
                f"prompt of {event.prompt_tokens} tokens, {hits or 'none of it'} cached]",
                err=True,
                dim=True,
            )


def _print_json_event(event: GenerateEvent) -> None:
    from prefixd.cli import plain
    from prefixd.client import Finished

    fields = asdict(event)
    if isinstance(event, Finished):
        fields["hit_tokens"] = {tier.name.lower(): tokens for tier, tokens in event.hit_tokens.items()}
    plain.print_json_line({"event": type(event).__name__.lower(), **fields})


def _prompt(text: str | None, token_ids: str | None) -> str | list[int]:
    if (text is None) == (token_ids is None):
        raise typer.BadParameter("give a prompt as text or with --token-ids, one of the two")
    if token_ids is None:
        return sys.stdin.read() if text == "-" else text or ""
    try:
        return [int(token) for token in token_ids.replace(",", " ").split()]
    except ValueError as error:
        raise typer.BadParameter(f"--token-ids {token_ids!r}: write ids such as 1,2,3") from error
