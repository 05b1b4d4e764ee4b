"""`prefixd ls`, `inspect`, `pin`, `unpin`, `evict`: show and change the cached prefixes."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from prefixd.base.tenancy.tenants import DEFAULT
from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import CommandFailed, examples

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prefixd.client import AsyncClient
    from prefixd.v1 import admin_pb2

LS_EXAMPLES = examples("prefixd ls --limit 20")
INSPECT_EXAMPLES = examples("prefixd inspect 9f86d081")
PIN_EXAMPLES = examples("prefixd pin 9f86d081")
UNPIN_EXAMPLES = examples("prefixd unpin 9f86d081")
EVICT_EXAMPLES = examples(
    "prefixd evict 9f86d081", "prefixd evict --namespace llama-3 --yes", "prefixd evict --all --shared"
)

Key = Annotated[
    str,
    typer.Argument(
        metavar="KEY",
        show_default=False,
        help="A prefix's key as `prefixd ls` shows it; its first 4 digits or more.",
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", metavar="NAME|ID", show_default=False, help="Only this namespace, by name or by id."),
]


def ls_command(
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option(min=1, help="How many to list.")] = 100,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """List the cached prefixes, most recently used first, with the blocks of each in each tier.

    A block counts in the tier nearest to the engine that has it.
    """
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output import tables as render

    async def ask() -> None:
        async with connected(address) as client:
            chosen = await _namespace_id(client, namespace) if namespace else b""
            answer = await client.prefixes(namespace_id=chosen, limit=limit)
        if as_json:
            plain.print_json(plain.to_plain(answer))
        else:
            render.print_prefixes(answer.prefixes, answer.total)
            render.print_pinned(answer.pinned_blocks, answer.pinned_bytes)

    run(ask())


def inspect_command(
    key: Key,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each block's token ids.")] = False,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Show one prefix block by block: key, tiers, size, number of blocks that continue it, pins and holds."""
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output import tables as render

    async def ask() -> None:
        async with connected(address) as client:
            answer = await client.inspect(key)
        if as_json:
            plain.print_json(plain.to_plain(answer))
        else:
            render.print_inspection(answer, tokens=tokens)

    run(ask())


def pin_command(key: Key, address: Address = None, as_json: Json = False) -> None:
    """Exempt a prefix from eviction until `unpin`, also across restarts if there is a disk tier."""

    async def ask() -> None:
        async with connected(address) as client:
            answer = await client.pin(key)
        until = "" if answer.durable else f", but only until the daemon ends: {answer.reason}"
        _print_result(_pin_result(answer), f"{answer.blocks:,} blocks pinned{until}", as_json)

    run(ask())


def unpin_command(key: Key, address: Address = None, as_json: Json = False) -> None:
    """Allow the eviction of a pinned prefix again."""

    async def ask() -> None:
        async with connected(address) as client:
            answer = await client.unpin(key)
        until = "" if answer.durable else f", but the daemon pins them again at its next start: {answer.reason}"
        _print_result(_pin_result(answer), f"{answer.blocks:,} blocks unpinned{until}", as_json)

    run(ask())


def evict_command(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY]",
            show_default=False,
            help="Drop this block and the blocks that continue it.",
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="NAME|ID",
            show_default=False,
            help="Drop a whole namespace, with the images that its prompts show.",
        ),
    ] = None,
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

    The daemon serves meanwhile. Ctrl-C ends the command; blocks that it has not dropped yet stay.
    """
    from prefixd.cli.output import progress

    if (key is not None) + (namespace is not None) + everything != 1:
        raise typer.BadParameter("give one of KEY, --namespace or --all")
    if key is None and not yes:
        blocks = "everything that is cached" if everything else f"all of namespace {namespace}"
        _confirm(f"Drop {blocks}, from disk{' and from the shared store' if shared else ''} too?")

    async def ask() -> None:
        async with connected(address) as client:
            chosen = b"" if namespace is None else await _namespace_id(client, namespace)
            with progress.blocks_bar("dropping") as step:
                answer = await client.evict(
                    key=key or "",
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
        raise CommandFailed("standard input has no answer; give --yes to drop without asking") from error
    if not sure:
        raise typer.Abort


async def _namespace_id(client: AsyncClient, name: str) -> bytes:
    """Returns the id of the one namespace that has this name or this id in hex; raises CommandFailed."""
    stats = await client.stats()
    found = [each for each in stats.namespaces if name in (each.namespace.name, each.namespace_id.hex())]
    if len(found) == 1:
        return found[0].namespace_id
    if found:
        ids = ", ".join(f"{each.namespace_id.hex()} ({_describe(each)})" for each in found)
        raise CommandFailed(
            f"there are {len(found)} namespaces {name!r}, each with a tenant, salt or layout of its own; give one of "
            f"the ids: {ids}"
        )
    if re.fullmatch("[0-9a-f]{16}", name):  # the daemon lists only the namespaces with the most blocks
        return bytes.fromhex(name)
    known = ", ".join(dict.fromkeys(each.namespace.name for each in stats.namespaces)) or "none yet"
    more = f" and {stats.other_namespaces:,} with fewer blocks: give the id of one" if stats.other_namespaces else ""
    raise CommandFailed(f"no namespace {name!r}; the daemon has: {known}{more}")


def _describe(namespace: admin_pb2.NamespaceStats) -> str:
    worker = ", of the daemon's model" if namespace.worker else ""
    return f"tenant {namespace.tenant or DEFAULT}{worker}, {namespace.blocks:,} blocks"


def _pin_result(answer: admin_pb2.PinResponse | admin_pb2.UnpinResponse) -> dict[str, int | str]:
    return {"blocks": answer.blocks, "durable": answer.durable, **({"reason": answer.reason} if answer.reason else {})}


def _print_result(fields: Mapping[str, int | str], line: str, as_json: bool) -> None:
    typer.echo(json.dumps(fields, indent=2) if as_json else line)
