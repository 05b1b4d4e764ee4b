"""Prints cached prefixes as tables, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from prefixd.base.rules.rules import FULL_ATTENTION
from prefixd.base.sizes import as_size
from prefixd.base.tiers import QUOTA_TIERS, Tier
from prefixd.cli.output.tables.grid import console, duration, table, tier_name
from prefixd.cli.output.tables.stored_text import errors_text, layer_table, percent
from prefixd.cli.output.terminal import cleaned
from prefixd.v1 import admin_pb2

KEY_DIGITS = 12
_ID_DIGITS = 8  # of a namespace's 16, where several have one name


def print_prefixes(prefixes: Iterable[admin_pb2.PrefixInfo], total: int, *, by_hits: bool = False) -> None:
    """Prints a list of prefixes in the given order; `by_hits`: it has only prefixes that prompts have found."""
    prefixes = [cleaned(prefix) for prefix in prefixes]
    tiers = (*QUOTA_TIERS, *([Tier.REMOTE.label] if any(prefix.remote_blocks for prefix in prefixes) else []))
    hits = ("hits",) if any(prefix.hits for prefix in prefixes) else ()
    coded = any(prefix.storage.altered_blocks or prefix.storage.coded_blocks for prefix in prefixes)
    stored = ("stored", "error") if coded else ()
    numbers = ("tokens", "size", *stored, *tiers, *hits, "idle")
    groups = ("groups",) if any(_has_rules(prefix.groups) for prefix in prefixes) else ()
    tenants = ("tenant",) if len({prefix.tenant for prefix in prefixes}) > 1 else ()
    made = table("prefix", *tenants, "namespace", *numbers, *groups, "", right=numbers, fold=("namespace", "groups"))
    ids: dict[str, set[bytes]] = {}
    for prefix in prefixes:
        ids.setdefault(_namespace_name(prefix), set()).add(prefix.namespace_id)
    for prefix in prefixes:
        name = _namespace_name(prefix)
        which = f" ({prefix.namespace_id.hex()[:_ID_DIGITS]})" if len(ids[name]) > 1 else ""
        made.add_row(
            prefix.key[:KEY_DIGITS],
            *([Text(prefix.tenant)] if tenants else []),
            Text(f"{name}{which}"),
            f"{prefix.tokens:,}",
            as_size(prefix.nbytes),
            *([as_size(prefix.storage.stored_bytes), _error(prefix.storage.largest_error)] if stored else []),
            *(str(getattr(prefix, f"{tier}_blocks") or "-") for tier in tiers),
            *([f"{prefix.hits:,}" if prefix.hits else "-"] if hits else []),
            duration(prefix.idle_s),
            *([Text(_group_counts(prefix.groups))] if groups else []),
            _marks(prefix.pinned, prefix.held),
        )
    out = console()
    if not total:
        out.print("No prompt has found a cached prefix yet." if by_hits else "Nothing is cached yet.")
        return
    out.print(made)
    if len(prefixes) < total:
        out.print(f"{len(prefixes)} of {total} prefixes; --limit {total} shows all")


def print_pinned(blocks: int, nbytes: int) -> None:
    """Prints the total of pinned blocks, if there are any."""
    if blocks:
        console().print(f"{blocks:,} blocks pinned, {as_size(nbytes)}")


def _namespace_name(prefix: admin_pb2.PrefixInfo) -> str:
    """Returns the model's name, or the name that an engine gave."""
    images = "-images" if prefix.namespace_name.endswith("-images") else ""
    return f"{prefix.model}{images}" if prefix.model else prefix.namespace_name


def _error(largest: float) -> str:
    return percent(largest) if largest else "-"


def _marks(pinned: bool, held: int) -> str:
    return ", ".join([*(["pinned"] if pinned else []), *([f"held {held}x"] if held else [])])


def _has_rules(groups: Sequence[admin_pb2.GroupInfo]) -> bool:
    """True unless there is a single group with full attention."""
    return len(groups) > 1 or any(group.rule != FULL_ATTENTION for group in groups)


def _group_name(group: admin_pb2.GroupInfo) -> str:
    """Returns `full`, or `full +7` if 8 parts follow one rule."""
    others = len(group.names) - 1
    return (group.names[0] if group.names else "") + (f" +{others}" if others > 0 else "")


def _group_counts(groups: Sequence[admin_pb2.GroupInfo]) -> str:
    """Returns the number of cached blocks of each group: `full 10, window 2`."""
    return ", ".join(f"{_group_name(group)} {group.blocks}" for group in groups) if _has_rules(groups) else ""


def print_inspection(inspection: admin_pb2.InspectResponse, *, tokens: bool, text: bool = False) -> None:
    """Prints one prefix, block by block; with the ids of its tokens, and their text as far as the daemon sent it."""
    inspection = cleaned(inspection)
    prefix = inspection.prefix
    out = console()
    of = f" of {prefix.tenant}" if prefix.tenant not in ("", "default") else ""
    out.print(Text(f"{prefix.key} in {_namespace_name(prefix)} ({prefix.namespace_id.hex()}){of}"))
    hits = f", {prefix.hits:,} {'hit' if prefix.hits == 1 else 'hits'}" if prefix.hits else ""
    out.print(
        f"{prefix.tokens:,} tokens in {prefix.blocks} blocks, {as_size(prefix.nbytes)}, "
        f"idle {duration(prefix.idle_s)}{hits}"
    )
    if prefix.storage.coded_blocks or prefix.storage.altered_blocks:
        out.print(_storage(prefix.storage))
    if _has_rules(prefix.groups):
        for group in prefix.groups:
            each = f"{as_size(group.block_bytes)} a block, {group.blocks} of {prefix.blocks} blocks"
            out.print(Text(f"{_group_name(group)}: {group.rule}, {each}"))
    by_group = len(prefix.groups) > 1
    numbers = ("block", "size", "children")
    places = [_group_name(group) for group in prefix.groups] if by_group else ["tiers"]
    text = text and any(block.HasField("text") for block in inspection.blocks)
    more = (*(["token ids"] if tokens else []), *(["text"] if text else []))
    coded = any(block.HasField("storage") for block in inspection.blocks)
    stored = ("stored", "error") if coded else ()
    made = table("block", "key", *places, "size", *stored, "children", "", *more, right=(*numbers, *stored), fold=more)
    for block in inspection.blocks:
        made.add_row(
            str(block.index),
            block.key[:KEY_DIGITS],
            *(_tier_names_by_group(block, len(prefix.groups)) if by_group else [_tier_names(block.tiers)]),
            as_size(block.nbytes),
            *(_stored_and_error(block) if stored else []),
            str(block.children),
            ", ".join(filter(None, [_marks(block.pinned, block.held), _priority(block)])),
            *([" ".join(map(str, block.token_ids))] if tokens else []),
            *([Text(block.text)] if text else []),
        )
    out.print(made)
    if (layers := layer_table(inspection.blocks)) is not None:
        out.print(layers)
    for block in inspection.blocks:
        if block.storage.unread:
            out.print(Text(f"block {block.index} could not be read: {block.storage.unread}", style="red"))


def _storage(storage: admin_pb2.PrefixStorage) -> str:
    """Returns `on disk: 1.0 MiB stored of 2.0 MiB; 3 blocks altered, largest error 1.6% (RMS 0.7%)`."""
    line = f"on disk: {as_size(storage.stored_bytes)} stored of {as_size(storage.exact_bytes)}"
    if not storage.altered_blocks:
        return f"{line}; all exact when read"
    blocks = "1 block" if storage.altered_blocks == 1 else f"{storage.altered_blocks:,} blocks"
    return f"{line}; {blocks} altered by a lossy codec, {errors_text(storage.largest_error, storage.rms_error)}"


def _stored_and_error(block: admin_pb2.BlockInfo) -> list[str]:
    """Returns a block's stored bytes and largest error; `-` where it is stored as it is, or is exact."""
    if not block.HasField("storage"):
        return ["-", "-"]
    storage = block.storage
    return [as_size(storage.stored_bytes) if storage.form else "-", _error(storage.largest_error)]


def _priority(block: admin_pb2.BlockInfo) -> str:
    """Returns `priority 50 for 1:00:00`; empty for priority 0."""
    until = f" for {duration(block.priority_s)}" if block.HasField("priority_s") else ""
    return f"priority {block.priority}{until}" if block.priority else ""


def _tier_names(tiers: Iterable[int]) -> str:
    return " ".join(tier_name(tier) for tier in tiers)


def _tier_names_by_group(block: admin_pb2.BlockInfo, groups: int) -> list[str]:
    """Returns for each KV group the tiers that have its part of the block: `cpu disk`, or `-`."""
    return [_tier_names(entry.tier for entry in block.there if group in entry.groups) or "-" for group in range(groups)]
