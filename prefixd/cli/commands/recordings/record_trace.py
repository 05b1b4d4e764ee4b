"""`prefixd trace record`: records the prompts of a running daemon for `prefixd plan`."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from prefixd.cli.connect import Address, Json, asks_daemon, connected, run
from prefixd.cli.failures import CleanGroup, CommandFailed, examples, paragraphs

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EXAMPLES = (
    "prefixd trace record monday.jsonl --duration 1h",
    "prefixd plan --trace monday.jsonl --model llama-3-8b --gpu 40GiB --cpu 64GiB",
)

app = typer.Typer(
    cls=CleanGroup,
    no_args_is_help=True,
    help="Record what prompts have in common, for `prefixd plan`.",
    epilog=examples(*_EXAMPLES),
)


def _parse_duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None or float(found[1]) <= 0:
        raise typer.BadParameter(f"{text!r}: give a time above 0, such as 90s, 30m, 1h or 2d")
    return float(found[1]) * _UNITS[found[2] or "s"]


def record_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="The trace: JSON, a request a line.")
    ],
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            metavar="TIME",
            parser=_parse_duration,
            show_default=False,
            help="Such as 30m or 1h; else: until Ctrl-C.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Record the requests of a running daemon to FILE, in the format that `prefixd plan --trace` reads.

    A line has the time, the lengths, and a number for each full block of 512 tokens: equal numbers, equal beginnings.
    Tokens behind a prompt's last full block count in its length alone, so shorter prompts seem to share nothing. FILE
    has no token and no hash of one, and only its owner may read it. Ctrl-C ends the recording; FILE is valid then.
    A request of the daemon's own model is recorded when it ends, an engine's prompt when it is looked up; what the
    engine generates is not known, and has length 0.
    """
    from prefixd.cli.output import json_values as plain
    from prefixd.workloads.recorded_trace import RecordedTrace

    trace = RecordedTrace(file, force=force)

    async def record() -> None:
        with trace:
            try:
                async with connected(address) as client, aclosing(client.record_trace(duration or 0.0)) as answers:
                    began = False
                    async for answer in answers:
                        if not began:
                            typer.echo("recording; Ctrl-C ends it", err=True)
                        began = True
                        trace.dropped = answer.dropped_requests
                        for request in answer.requests:
                            trace.add(request.arrival_s, request.prompt_tokens, request.output_tokens, request.hashes)
                        trace.flush()
            except asyncio.CancelledError:  # Ctrl-C
                pass

    try:
        run(record())
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {error.strerror}") from error
    if as_json:
        plain.print_json(trace.figures())
        return
    figures = trace.figures()
    if not figures["requests"]:
        typer.echo(f"no request came; {file} was not written")
        return
    typer.echo(
        f"{figures['requests']:,} requests in {file}: {figures['prompt_tokens']:,} prompt tokens, "
        f"{figures['block_tokens']:,} of them in {figures['blocks']:,} full blocks of 512 tokens, "
        f"{figures['different_blocks']:,} different"
    )
    if figures["dropped_requests"]:
        typer.echo(
            f"{figures['dropped_requests']:,} requests are missing: they came faster than this command read them"
        )


app.command("record", help=paragraphs(record_command.__doc__ or ""), epilog=examples(*_EXAMPLES))(
    asks_daemon(record_command)
)
