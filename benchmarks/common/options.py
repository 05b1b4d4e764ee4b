"""Options of commands: each is declared once, with its type, its default and its help."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from prefixd.base.sizes import parse_size
from prefixd.workloads.circumstances import circumstances

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option, with the keywords of `argparse`."""

    flag: str
    keywords: dict[str, Any]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(self.flag, **self.keywords)


def positive(text: str) -> int:
    """A positive integer; an argparse type."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not positive")
    return value


def size(text: str) -> int:
    """Bytes written as 8GiB, 512MiB or 4096; an argparse type."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def number(least: float, most: float) -> Callable[[str], float]:
    """An argparse type: a number from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not from {least:g} to {most:g}")
        return value

    return parse


def json_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value in JSON or else a string; an argparse type."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def writable(text: str) -> Path:
    """A file to write to; refused now rather than after the minutes that the run takes."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make {path.parent}: {error.strerror}; choose another") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {path}; choose another file")
    return path


def result_file(text: str) -> Path:
    """Like `writable`, for a result file. A file inside the repository is refused if there are uncommitted changes."""
    path = writable(text)
    if path.resolve().is_relative_to(ROOT) and str(circumstances()["commit"]).endswith("+changes"):
        raise argparse.ArgumentTypeError(
            f"{path} is in the repository, which has uncommitted changes: its result would be of no commit; commit "
            "them, or write the result elsewhere, where it is marked +changes"
        )
    return path


def drawable(text: str) -> Path:
    """Like `writable`, for a file that matplotlib can save a plot to."""
    path = writable(text)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:  # `harness.plot` says what is missing
        return path
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise argparse.ArgumentTypeError(f"{path} names no kind of picture; end it with one of .{', .'.join(kinds)}")
    return path


def option(
    flag: str,
    default: Any,
    text: str,
    kind: Callable[[str], Any] = positive,
    *,
    shown: bool = True,
    **keywords: Any,
) -> Option:
    """An option with a value; its help is `text` and, if `shown`, the default.

    Args:
        flag: such as "--kills".
        default: the default. None: the text describes the case without the option.
        text: the help.
        kind: an argparse type.
        shown: False: the text names the default itself.
        keywords: further keywords of `argparse`, for example nargs.
    """
    if kind is positive:
        keywords.setdefault("metavar", "N")
    said = "" if default is None or not shown else f" ({_in_words(default, kind)})"
    return Option(flag, {"type": kind, "default": default, "help": text + said, **keywords})


def seed(text: str, default: int = 0) -> Option:
    """Returns the option `--seed`; `text` names the things that it seeds."""
    return option("--seed", default, text, int)


def flag(name: str, text: str) -> Option:
    """Returns an option without a value."""
    return Option(name, {"action": "store_true", "help": text})


def only(names: Iterable[str], text: str = "only this one") -> Option:
    """Returns the option `--only NAME`, which may be repeated; its value is None if it is not given."""
    chosen = list(names)
    text = f"{text}; one of: {', '.join(chosen)}"
    return Option("--only", {"action": "append", "choices": chosen, "metavar": "NAME", "help": text})


def chosen(flag: str, names: Iterable[str], text: str, default: Iterable[str] | None = None) -> Option:
    """Returns an option for one or more of `names`; by default all."""
    every = list(names)
    few = every if default is None else list(default)
    return Option(flag, {"nargs": "+", "choices": every, "default": few, "help": f"{text} ({' '.join(few)})"})


def from_options(kind: type[T], options: argparse.Namespace, **others: Any) -> T:
    """Returns a dataclass made of the options with the names of its fields, and of `others`."""
    made: Any = kind
    named = {each.name: getattr(options, each.name) for each in fields(made) if hasattr(options, each.name)}
    return cast(T, made(**{**named, **others}))


def _in_words(default: Any, kind: Callable[[str], Any]) -> str:
    if kind is size:
        return _size_in_words(default)
    if isinstance(default, list | tuple):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _size_in_words(nbytes: int) -> str:
    """33554432: 32MiB; 50000000 as it is."""
    units = [(power, unit) for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if nbytes % (1 << power) == 0]
    return f"{nbytes >> units[0][0]}{units[0][1]}" if nbytes and units else str(nbytes)
