"""`prefixd recover`: brings back the blocks of an index of the disk tier that was set aside."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixd.base.extras import require
from prefixd.cli.commands.config import Assignments, ConfigFile, parse_assignments
from prefixd.cli.connect import Json
from prefixd.cli.failures import CommandFailed, WrongUsage, examples

if TYPE_CHECKING:
    from prefixd.settings import Settings

EXAMPLES = examples("prefixd recover --dry-run", "prefixd recover", "prefixd recover --discard")


@dataclass(slots=True)
class _Outcome:
    """The result for one index."""

    path: str
    reason: str
    blocks: int = 0
    """Blocks brought back; with --dry-run: that can be brought back."""
    pins: int = 0
    there: int = 0
    """Blocks that the index in use already has."""
    lost: Counter[str] = field(default_factory=Counter)
    """Lost blocks by reason."""


def recover_command(
    config: ConfigFile = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", show_default=False, help="The daemon's data directory.")
    ] = None,
    assignments: Assignments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the blocks that can be brought back.")] = False,
    discard: Annotated[
        bool,
        typer.Option("--discard", help="Bring nothing back, and remove the index set aside; the daemon may run."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring back the blocks of a disk index that was set aside because it was damaged. Stop the daemon first.

    The command reads the records that still decode and the bytes of their blocks, compares checksums, and enters the
    undamaged blocks, with their pins, into the index in use. Run it soon: blocks that the daemon has overwritten since
    are lost. The command then removes the index that was set aside, which ends the daemon's trouble.

    Give the same --config, --data-dir and --set as to `prefixd serve`. The exit status is 0, even if no index was set
    aside, but not if there is no disk tier.
    """
    from prefixd.base.setting_sources import find_config_file

    require("daemon", "prefixd recover")
    from prefixd.cli.output import json_values as plain
    from prefixd.settings import Settings
    from prefixd_swap import StorageError, list_set_aside
    from prefixd_swap import discard as remove

    if dry_run and discard:
        raise WrongUsage("--dry-run and --discard exclude each other; keep one")
    flags = {} if data_dir is None else {"data_dir": data_dir}
    overrides = flags | parse_assignments(assignments)
    settings = Settings.load(config or find_config_file(os.environ), overrides)
    if not settings.disk_path.is_dir():
        raise WrongUsage(
            f"there is no disk tier in {settings.disk_path}; give the same --config, --data-dir and --set as to "
            "`prefixd serve`"
        )
    try:
        indexes = list_set_aside(settings.disk_path / "index")
    except StorageError as error:
        raise CommandFailed(str(error)) from error
    outcomes = []
    if discard:
        for index in indexes:
            remove(index)
            outcomes.append(_Outcome(str(index.path), index.reason, lost=Counter(discarded=index.blocks or 0)))
    elif indexes:
        outcomes = _recover(settings, dry_run)
    if as_json:
        plain.print_json({"dry_run": dry_run, "indexes": [_to_plain(outcome) for outcome in outcomes]})
        return
    if not outcomes:
        typer.echo(f"No index was set aside in {settings.disk_path}.")
    for outcome in outcomes:
        _print_outcome(outcome, dry_run)


def _recover(settings: Settings, dry_run: bool) -> list[_Outcome]:
    from prefixd.cache.disk.restore import is_usable
    from prefixd.cli.output.progress import blocks_bar
    from prefixd.server.access.disk_keys import read_disk_keys
    from prefixd_swap import (
        DirectoryInUseError,
        MissingDriveError,
        ShrinkError,
        SlabStore,
        StorageError,
        SwapError,
        discard,
        salvage,
    )

    if not settings.disk.bytes:
        raise WrongUsage("disk.bytes = 0: there is no disk tier; give the settings of `prefixd serve`")
    try:
        store = SlabStore.open(
            settings.disk_path,
            settings.disk.bytes,
            io=settings.disk.io,
            shrink=False,
            more_paths=settings.disk.more_paths,
            keys=read_disk_keys(settings),
        )
    except DirectoryInUseError as error:
        raise CommandFailed(f"{error}; stop the daemon before you recover") from error
    except MissingDriveError as error:
        raise WrongUsage(
            f"disk.more_paths: {error}; mount its drive, and give the settings of `prefixd serve`"
        ) from error
    except ShrinkError as error:
        raise WrongUsage(
            f"disk.bytes = {settings.disk.bytes}: {error}; give the settings of `prefixd serve`"
        ) from error
    except SwapError as error:
        raise CommandFailed(f"disk.path = {settings.disk_path}: {error}") from error
    outcomes = []
    try:
        for index in store.set_aside():
            with blocks_bar(f"reading the blocks of {index.path.name}") as step:
                result = salvage(index, store, step, is_usable)
            if not dry_run:
                store.adopt(result.rows, result.namespaces, result.pins, result.used_keys, result.used_codecs)
                discard(index)
            outcomes.append(
                _Outcome(str(index.path), index.reason, result.blocks, len(result.pins), result.there, result.lost)
            )
    except StorageError as error:
        raise CommandFailed(
            f"{error}; the index whose blocks were not brought back is still set aside, run the command again"
        ) from error
    finally:
        store.close()
    return outcomes


def _to_plain(outcome: _Outcome) -> dict[str, Any]:
    return {
        "path": outcome.path,
        "reason": outcome.reason,
        "brought_back_blocks": outcome.blocks,
        "pinned_blocks": outcome.pins,
        "blocks_there": outcome.there,
        "lost_blocks": dict(outcome.lost),
    }


def _print_outcome(outcome: _Outcome, dry_run: bool) -> None:
    typer.echo(f"{outcome.path}: {outcome.reason or 'reason not known'}")
    done = "can be brought back" if dry_run else "brought back"
    typer.echo(f"  {outcome.blocks:,} blocks {done}, {outcome.pins:,} of them pinned")
    if outcome.there:
        typer.echo(f"  {outcome.there:,} blocks are in the index in use already: they were computed again")
    for reason, blocks in outcome.lost.items():
        typer.echo(f"  {blocks:,} blocks are lost: {reason}")
