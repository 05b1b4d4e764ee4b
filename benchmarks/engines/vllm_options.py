"""Options that the benchmarks with a real vLLM share: sizes of a full run and of a short one, and the connector's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from benchmarks.common.options import Option, flag, json_option, option, seed

Sizes = Mapping[str, int]
"""By name of an option. Example: {"conversations": 8, "turns": 4}."""


def engine_options(texts: Mapping[str, str], full: Sizes, short_run: str) -> tuple[Option, ...]:
    """A size for each of `texts`, and what every run takes; `short_run` says what `--short` is."""
    sizes = (option(f"--{name.replace('_', '-')}", None, f"{text} ({full[name]})") for name, text in texts.items())
    return (
        *sizes,
        option("--threads", 1, "cores that the model computes on"),
        seed("of weights, users and order"),
        flag("--short", short_run),
        option(
            "--option",
            [],
            "an option of prefixd's connector, its value in JSON (block_tokens=128); again for another",
            json_option,
            shown=False,
            action="append",
            metavar="NAME=VALUE",
        ),
    )


def fill_in(options: argparse.Namespace, full: Sizes, short: Sizes) -> None:
    """Gives every size that was not chosen its value of a full or a short run."""
    for name, value in (short if options.short else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
