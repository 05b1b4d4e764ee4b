"""`prefixd ls`, `inspect`, `pin`, `unpin`, `evict`: show and change the cached prefixes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import WrongUsage, examples
from prefixd.cli.named_prefix import NamedPrefix, namespace_id_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prefixd.v1 import admin_pb2

LS_EXAMPLES = examples("prefixd ls --limit 20", "prefixd ls --by hits", "prefixd ls --by size --namespace llama-3")
INSPECT_EXAMPLES = examples(
    "prefixd inspect 9f86d081",
    "prefixd inspect 9f86d081 --layers",
    'prefixd inspect --prompt "You are helpful." --text',
)
PIN_EXAMPLES = examples(
    "prefixd pin 9f86d081",
    "prefixd pin --prompt-file system_prompt.txt",
    "prefixd pin --token-ids 1,15043,29892 --namespace 0badc0de12345678",
)
UNPIN_EXAMPLES = examples("prefixd unpin 9f86d081", "prefixd unpin --prompt-file system_prompt.txt")
EVICT_EXAMPLES = examples(
    "prefixd evict 9f86d081",
    "prefixd evict --prompt-file document.txt",
    "prefixd evict --namespace llama-3 --yes",
    "prefixd evict --all --shared",
)
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="NAME|ID",
        show_default=False,
        help="Only this namespace, by the name or id that is shown.",
    ),
]


def ls_command(
    namespace: Namespace = None,
    by: Annotated[
        Literal["last-use", "size", "hits"],
        typer.Option(
            help="The order: last used, largest, or found by most prompts first. By hits, only prefixes at which a "
            "prompt's cached prefix has ended are listed."
        ),
    ] = "last-use",
    limit: Annotated[int, typer.Option(min=1, help="How many to list.")] = 100,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """List the cached prefixes, most recently used first, with the blocks of each in each tier.

    A block counts in the tier nearest to the engine that has it. The hits of a prefix are the prompts whose cached
    prefix was exactly this one, counted since the daemon's start.
    """
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output.tables import prefix_tables as render

    async def ask() -> None:
        async with connected(address) as client:
            chosen = await namespace_id_of(client, namespace) if namespace else b""
            answer = await client.prefixes(namespace_id=chosen, limit=limit, by=by)
        if as_json:
            plain.print_json(plain.to_plain(answer))
        else:
            render.print_prefixes(answer.prefixes, answer.total, by_hits=by == "hits")
            render.print_pinned(answer.pinned_blocks, answer.pinned_bytes)

    run(ask())


def inspect_command(
    named: NamedPrefix,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each block's token ids.")] = False,
    text: Annotated[
        bool,
        typer.Option("--text", help="Show each block's text, if the daemon has the tokenizer that made its tokens."),
    ] = False,
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Show the errors of each layer, of blocks that a lossy codec has altered."),
    ] = False,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Show one prefix block by block: key, tiers, size, number of blocks that continue it, pins and holds.

    Where a codec has made blocks on disk smaller, also what is stored of them. Errors of blocks that a lossy codec has
    altered are relative to the root mean square of a layer's keys, or values: the largest of a number, and the largest
    RMS of a layer. --layers reads the first 64 such blocks from disk.
    """
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output.tables import prefix_tables as render

    async def ask() -> None:
        async with connected(address) as client:
            answer = await client.inspect(await named.key_in(client), text=text, layers=layers)
        if text and not any(block.HasField("text") for block in answer.blocks):
            typer.echo("prefixd: the daemon has no tokenizer for this prefix; --tokens shows its token ids", err=True)
        if as_json:
            plain.print_json(plain.to_plain(answer))
        else:
            render.print_inspection(answer, tokens=tokens, text=text)

    run(ask())


def pin_command(named: NamedPrefix, address: Address = None, as_json: Json = False) -> None:
    """Exempt a prefix from eviction until `unpin`, also across restarts if there is a disk tier."""

    async def ask() -> None:
        async with connected(address) as client:
            answer = await client.pin(await named.key_in(client))
        until = "" if answer.durable else f", but only until the daemon ends: {answer.reason}"
        _print_result(_pin_result(answer), f"{answer.blocks:,} blocks pinned{until}", as_json)

    run(ask())


def unpin_command(named: NamedPrefix, address: Address = None, as_json: Json = False) -> None:
    """Allow the eviction of a pinned prefix again."""

    async def ask() -> None:
        async with connected(address) as client:
            answer = await client.unpin(await named.key_in(client))
        until = "" if answer.durable else f", but the daemon pins them again at its next start: {answer.reason}"
        _print_result(_pin_result(answer), f"{answer.blocks:,} blocks unpinned{until}", as_json)

    run(ask())


def evict_command(
    named: NamedPrefix,
    everything: Annotated[bool, typer.Option("--all", help="Drop everything.")] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="Delete the blocks from the shared store too, which other hosts use.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before dropping a namespace or everything.")
    ] = False,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Drop cached blocks from every tier. Leased and pinned blocks, and the blocks before them, stay.

    A prefix (KEY or a prompt) is dropped with the blocks that continue it, --namespace alone drops a whole namespace,
    with the images that its prompts show.

    The daemon serves meanwhile. Ctrl-C ends the command; blocks that it has not dropped yet stay.
    """
    from prefixd.cli.output import progress

    if named.is_given + everything + (named.namespace is not None and not named.is_given) != 1:
        raise WrongUsage("give one of KEY, a prompt, --namespace or --all")
    if not named.is_given and not yes:
        blocks = "everything that is cached" if everything else f"all of namespace {named.namespace}"
        _confirm(f"Drop {blocks}, from disk{' and from the shared store' if shared else ''} too?")

    async def ask() -> None:
        async with connected(address) as client:
            key, chosen = "", b""
            if named.is_given:
                key = await named.key_in(client)
            elif named.namespace is not None:
                chosen = await namespace_id_of(client, named.namespace)
            with progress.blocks_bar("dropping") as step:
                answer = await client.evict(
                    key=key,
                    namespace_id=chosen,
                    all=everything,
                    shared=shared,
                    on_progress=lambda so_far: step(so_far.evicted_blocks + so_far.kept_blocks, so_far.total_blocks),
                )
        kept = f", {answer.kept_blocks:,} kept (leased, pinned or before such blocks)" if answer.kept_blocks else ""
        counts = {"evicted_blocks": answer.evicted_blocks, "kept_blocks": answer.kept_blocks}
        dropped = f"{answer.evicted_blocks:,} block{'' if answer.evicted_blocks == 1 else 's'} dropped"
        _print_result(counts, f"{dropped}{kept}", as_json)

    run(ask())


def _confirm(question: str) -> None:
    """Ends the command unless the user says yes."""
    try:
        sure = typer.confirm(question, err=True)
    except typer.Abort as error:
        if sys.stdin.isatty():
            raise  # Ctrl-C
        typer.echo(err=True)
        raise WrongUsage("standard input has no answer; give --yes to drop without asking") from error
    if not sure:
        raise typer.Abort


def _pin_result(answer: admin_pb2.PinResponse | admin_pb2.UnpinResponse) -> dict[str, int | str]:
    return {"blocks": answer.blocks, "durable": answer.durable, **({"reason": answer.reason} if answer.reason else {})}


def _print_result(fields: Mapping[str, int | str], line: str, as_json: bool) -> None:
    typer.echo(json.dumps(fields, indent=2) if as_json else line)
