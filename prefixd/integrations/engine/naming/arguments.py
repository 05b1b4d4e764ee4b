"""Tables that say which of an engine's arguments go into the name of its namespaces, and why the others need not.

A table has every argument of the engine's version that it was written for; a test compares them. An argument that only
another version has goes into the name as soon as its value differs from its default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from prefixd.base.errors import ConfigError
from prefixd.base.model_fingerprint import fingerprint_of_files, fingerprint_of_folder
from prefixd.settings import default_data_dir

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Argument:
    """One of an engine's arguments and its value."""

    name: str
    """With the sections that it is in: "model_config.dtype"."""
    value: Any
    default: Any


class ArgumentTable:
    """Sorts an engine's arguments. Names of arguments are separated by blanks; a section stands for all its arguments.

    Args:
        in_name: arguments with values that go into the name, by reason.
        files: arguments that name files or folders; their content goes into the name; by reason.
        covered: arguments that another part of the name covers, by that part.
        harmless: arguments that cannot change KV, by reason.
        refused: by the name of an argument that must not be set, the reason and the remedy.
    """

    def __init__(
        self,
        *,
        in_name: Mapping[str, str],
        files: Mapping[str, str],
        covered: Mapping[str, str],
        harmless: Mapping[str, str],
        refused: Mapping[str, str],
    ) -> None:
        self._files = _by_name(files)
        self._in_name = _by_name(in_name) | self._files
        self._elsewhere = _by_name(covered) | _by_name(harmless)
        self._refused = dict(refused)
        names = [*_by_name(in_name), *self._files, *_by_name(covered), *_by_name(harmless), *self._refused]
        assert len(names) == len({*names}), f"twice in the table: {sorted(n for n in {*names} if names.count(n) > 1)}"

    def __contains__(self, name: str) -> bool:
        """Whether the table has an argument, or a section that it is in."""
        return self._find(name) is not None

    @property
    def names(self) -> frozenset[str]:
        """All names in the table."""
        return frozenset({*self._in_name, *self._elsewhere, *self._refused})

    def facts(self, arguments: Iterable[Argument]) -> dict[str, Any]:
        """The arguments that go into the name: those that are set. So an argument that an older version of the engine
        lacks counts as not set.

        Raises:
            ConfigError: an argument is set that is refused.
        """
        facts = {}
        for argument in arguments:
            name = self._find(argument.name)
            value = plain(argument.value)
            if name in self._refused:
                if not _unset(value):
                    raise ConfigError(f"{argument.name} = {argument.value!r}: {self._refused[name]}")
            elif name in self._in_name:
                if not _unset(value):
                    facts[argument.name] = content_of(value) if name in self._files else value
            elif name is None and value != plain(argument.default):
                facts[argument.name] = value
        return facts

    def _find(self, name: str) -> str | None:
        while name not in self._in_name and name not in self._elsewhere and name not in self._refused:
            name, dot, _ = name.rpartition(".")
            if not dot:
                return None
        return name


def content_of(paths: Any) -> Any:
    """Digests of the files and folders of this host that `paths` names ("/path", "name=/path"); anything else, such as
    a model's name, stays as it is. Lists and mappings keep their form."""
    if isinstance(paths, Mapping):
        return {name: content_of(path) for name, path in paths.items()}
    if isinstance(paths, list | tuple):
        return [content_of(path) for path in paths]
    path = paths.rpartition("=")[2] if isinstance(paths, str) else ""
    if not path:
        return paths
    place = Path(path).expanduser()
    if place.is_dir():
        return fingerprint_of_folder(place, default_data_dir())
    return fingerprint_of_files([place], place.parent, default_data_dir()) if place.is_file() else paths


def plain(value: Any) -> Any:
    """A value as JSON types, equal in every process for equal values; of a class or function its qualified name."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "__qualname__"):  # a class or a function
        return f"{value.__module__}.{value.__qualname__}"
    fields = getattr(value, "__dataclass_fields__", None) or getattr(value, "__struct_fields__", None)
    if fields is not None:
        plain_fields = {name: plain(getattr(value, name, None)) for name in fields}
        return {name: item for name, item in plain_fields.items() if not _unset(item)}
    return _ADDRESS.sub("", repr(value))


def _unset(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _by_name(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}
