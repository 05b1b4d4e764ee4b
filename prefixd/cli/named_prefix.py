"""The prefix that a command is about: named by its key, or by a prompt that begins with it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixd.base.tenancy.tenants import DEFAULT
from prefixd.cli.completions import complete_keys, complete_models, complete_namespaces
from prefixd.cli.failures import CommandFailed, WrongUsage

if TYPE_CHECKING:
    from prefixd.client import AsyncClient
    from prefixd.v1 import admin_pb2

PANEL = "A prompt instead of KEY: the command takes its longest cached prefix"


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """Options of a command; it calls `key_in`."""

    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY",
            show_default=False,
            autocompletion=complete_keys,
            help="A prefix's key as `prefixd ls` shows it; its first 4 digits or more.",
        ),
    ] = None
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", show_default=False, rich_help_panel=PANEL, help="The prompt's text."),
    ] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file",
            metavar="FILE",
            show_default=False,
            rich_help_panel=PANEL,
            help="A file with the prompt's text; - reads standard input.",
        ),
    ] = None
    token_ids: Annotated[
        str | None,
        typer.Option(
            "--token-ids",
            metavar="IDS",
            show_default=False,
            rich_help_panel=PANEL,
            help="The prompt as ids: 1,2,3 or '1 2 3'.",
        ),
    ] = None
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME",
            show_default=False,
            autocompletion=complete_models,
            rich_help_panel=PANEL,
            help="One of the daemon's models, by default its first: its tokenizer, and its namespace without a salt.",
        ),
    ] = ""
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="NAME|ID",
            show_default=False,
            autocompletion=complete_namespaces,
            rich_help_panel=PANEL,
            help="The namespace, by name or by id, instead of the model's: that of an engine, or of a salt.",
        ),
    ] = None

    @property
    def is_given(self) -> bool:
        """True if a prefix is named."""
        return any(each is not None for each in (self.key, self.prompt, self.prompt_file, self.token_ids))

    async def key_in(self, client: AsyncClient) -> str:
        """Returns the key for the daemon's calls.

        Raises:
            WrongUsage: not exactly one of the key and the prompt's forms is given, or the file cannot be read.
            CommandFailed: there is no such namespace.
        """
        if sum(each is not None for each in (self.key, self.prompt, self.prompt_file, self.token_ids)) != 1:
            raise WrongUsage("give one of KEY, --prompt, --prompt-file and --token-ids")
        if self.key is not None:
            if self.namespace is not None and "/" not in self.key:
                return f"{(await namespace_id_of(client, self.namespace)).hex()}/{self.key}"
            return self.key
        chosen = b"" if self.namespace is None else await namespace_id_of(client, self.namespace)
        found = await client.find_prefix(self._read(), model=self.model, namespace_id=chosen)
        if found.tokens < found.prompt_tokens:
            typer.echo(f"prefixd: {found.tokens:,} of the prompt's {found.prompt_tokens:,} tokens are cached", err=True)
        return found.key

    def _read(self) -> str | list[int]:
        if self.token_ids is not None:
            return parse_token_ids(self.token_ids)
        if self.prompt_file is None:
            return self.prompt or ""
        try:
            return sys.stdin.read() if str(self.prompt_file) == "-" else self.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise WrongUsage(f"--prompt-file {self.prompt_file} cannot be read ({why}); give a text file") from error


def parse_token_ids(text: str) -> list[int]:
    """Parses "1,2,3" or "1 2 3"; raises WrongUsage."""
    try:
        return [int(token) for token in text.replace(",", " ").split()]
    except ValueError as error:
        raise WrongUsage(f"--token-ids {text!r}: write ids such as 1,2,3") from error


async def namespace_id_of(client: AsyncClient, name: str) -> bytes:
    """Returns the id of the one namespace that has this name, of this model, or with this id in hex.

    The first 8 digits of an id, which `prefixd ls` shows, will do. Raises CommandFailed.
    """
    stats = await client.stats()
    models = names_by_model(stats)

    def names(each: admin_pb2.NamespaceStats) -> tuple[str, str]:
        own = each.namespace.name
        return (models.get(own, own) if each.worker else own), own

    found = [each for each in stats.namespaces if name in (*names(each), each.namespace_id.hex())]
    if not found and re.fullmatch("[0-9a-f]{8,16}", name):
        found = [each for each in stats.namespaces if each.namespace_id.hex().startswith(name)]
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
    known = ", ".join(dict.fromkeys(names(each)[0] for each in stats.namespaces)) or "none yet"
    more = f" and {stats.other_namespaces:,} with fewer blocks: give the id of one" if stats.other_namespaces else ""
    raise CommandFailed(f"no namespace {name!r}; the daemon has: {known}{more}")


def names_by_model(stats: admin_pb2.StatsResponse) -> dict[str, str]:
    """Returns what people call the namespaces of the daemon's models, by their own names: `{"5f1e...": "llama"}`."""
    named = {model.namespace: model.name for model in reversed(stats.models)}
    return named | {f"{namespace}-images": f"{name}-images" for namespace, name in named.items()}


def _describe(namespace: admin_pb2.NamespaceStats) -> str:
    worker = ", of the daemon's model" if namespace.worker else ""
    return f"tenant {namespace.tenant or DEFAULT}{worker}, {namespace.blocks:,} blocks"
