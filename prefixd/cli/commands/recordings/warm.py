"""`prefixd warm`: a file of prefixes that a new host should have; records one, and brings its prefixes to a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefixd.cli.connect import Address, Json, asks_daemon, connected, run
from prefixd.cli.failures import EXIT_FAILED, CleanGroup, examples, paragraphs

if TYPE_CHECKING:
    from prefixd.cli.commands.recordings.warming import Warmed

_SHOWN = 20
_RECORD = ("prefixd warm record prefixes.jsonl --tokens --by hits", "prefixd warm record prefixes.jsonl --limit 100")
_LOAD = ("prefixd warm load prefixes.jsonl", "prefixd warm load prefixes.jsonl --no-compute --json")

app = typer.Typer(
    cls=CleanGroup,
    no_args_is_help=True,
    help="Bring the prefixes that matter to a new host.",
    epilog=examples(_RECORD[0], _LOAD[0]),
)

File = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="The prefixes: JSON, one a line.")]


def record_command(
    file: File,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also write the prefixes' token ids, which a new host needs.")
    ] = False,
    by: Annotated[
        Literal["last-use", "size", "hits"], typer.Option(help="Which come first, as in `prefixd ls`.")
    ] = "last-use",
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="NAME|ID", show_default=False, help="Only this namespace."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="How many to write.")] = 1000,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Write the cached prefixes of a daemon to FILE, for `prefixd warm load`.

    Without --tokens FILE has keys alone: enough to bring prefixes up from the disk tier of the same host. A new host
    needs the token ids, which are what users have written: FILE is theirs as much as the prompts are. Only its owner
    may read it. Salts are never written: prefixes of namespaces with a salt can be warmed up once their engine runs.
    """
    from prefixd.cli.commands.recordings.warming import record
    from prefixd.cli.named_prefix import namespace_id_of
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output import progress
    from prefixd.workloads.warm_file import WarmFile

    async def write() -> tuple[int, int]:
        async with connected(address) as client:
            with WarmFile(file, force=force) as written:
                chosen = await namespace_id_of(client, namespace) if namespace else b""
                prefixes = list((await client.prefixes(namespace_id=chosen, limit=limit, by=by)).prefixes)
                with progress.blocks_bar("recording") as step:
                    left_out = await record(
                        client, written, prefixes, tokens=tokens, progress=lambda done: step(done, len(prefixes))
                    )
                return written.prefixes, left_out

    prefixes, left_out = run(write())
    if as_json:
        plain.print_json({"file": str(file), "prefixes": prefixes, "left_out": left_out, "tokens": tokens})
        return
    typer.echo(f"{prefixes:,} prefixes in {file}{'' if tokens else ', by their keys alone (see --tokens)'}")
    if left_out:
        typer.echo(
            f"{left_out:,} are left out: they were evicted meanwhile, did not fit into the file, or are of a namespace "
            "that is not among the 1,000 with most blocks"
        )


def load_command(
    file: File,
    compute: Annotated[
        bool, typer.Option("--compute/--no-compute", help="Let the daemon's own model compute what is cached nowhere.")
    ] = True,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Bring the prefixes of FILE to CPU memory: from disk, from the shared store, or computed by the daemon's model.

    One prefix after the other, ahead of need: whoever waits for blocks goes first, and requests that compute go last.
    FILE is from `prefixd warm record`, or written by hand with a line such as {"prompt": "You are helpful."} for each
    prompt of the daemon's model. Ctrl-C ends the command; what has come stays.

    The exit status is 1 if a prefix failed. Prefixes that are cached nowhere, as of an engine's that nobody computes
    here, are no failure.
    """
    from prefixd.cli.commands.recordings.warming import Warming
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output import progress
    from prefixd.workloads.warm_file import read_warm_file

    prefixes = sum(1 for _ in read_warm_file(file))  # a wrong line is reported before anything is done

    async def bring() -> Warmed:
        async with connected(address) as client:
            warming = Warming(client, compute=compute)
            await warming.begin()
            with progress.blocks_bar("warming up") as step:
                for prefix in read_warm_file(file):
                    await warming.warm(prefix)
                    step(warming.warmed.prefixes, prefixes)
            return warming.warmed

    warmed = run(bring())
    if as_json:
        plain.print_json({"file": str(file), **warmed.figures()})
    else:
        _print(warmed.figures())
    if warmed.failed:
        raise typer.Exit(EXIT_FAILED)


def _print(figures: dict[str, Any]) -> None:
    found = ", ".join(f"{tokens:,} in {tier}" for tier, tokens in figures["found_tokens"].items())
    typer.echo(f"{figures['prefixes']:,} prefixes, {figures['tokens']:,} tokens")
    typer.echo(f"  found     {found or 'none'}")
    typer.echo(f"  brought   {figures['brought_tokens']:,} to CPU memory")
    if figures["left_tokens"]:
        typer.echo(f"  left      {figures['left_tokens']:,} where they are: there is no room for more")
    if figures["computed_tokens"]:
        typer.echo(f"  computed  {figures['computed_tokens']:,}")
    if figures["missing_tokens"]:
        typer.echo(f"  missing   {figures['missing_tokens']:,}: cached nowhere, and not computed here")
    for each in figures["failed"][:_SHOWN]:
        typer.echo(f"  line {each['line']}: {each['reason']}", err=True)
    if len(figures["failed"]) > _SHOWN:
        typer.echo(f"  and {len(figures['failed']) - _SHOWN:,} more; --json has all", err=True)


app.command("record", help=paragraphs(record_command.__doc__ or ""), epilog=examples(*_RECORD))(
    asks_daemon(record_command)
)
app.command("load", help=paragraphs(load_command.__doc__ or ""), epilog=examples(*_LOAD))(asks_daemon(load_command))
