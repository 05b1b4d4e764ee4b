"""Checks when an engine starts that its release has the names that prefixd uses.

Engines move names with every release. A missing name would raise ImportError in the middle of a start or AttributeError
while serving; a base class's method that prefixd does not know may need an override. Each is reported in one line.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from prefixd.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BaseClass:
    """A class of the engine's that prefixd derives from.

    Args:
        path: of the class: "package.module:Class".
        called: the methods that the engine calls and prefixd overrides.
        known: the other methods of the class; their defaults are right for prefixd.
    """

    path: str
    called: frozenset[str]
    known: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Contract:
    """The names that prefixd needs of an engine.

    Args:
        engine: its name, as in "vLLM".
        version: of the release that is installed.
        works_with: the releases that prefixd works with, in words: "0.29 to 0.33".
        names: "module", "module:name" or "module:Class.attribute"; an attribute may be one that the constructor sets.
        bases: the classes that prefixd derives from.
    """

    engine: str
    version: str
    works_with: str
    names: frozenset[str]
    bases: tuple[BaseClass, ...] = ()

    def check(self, log: logging.Logger) -> None:
        """Logs a warning, in one line, of methods that prefixd does not know.

        Raises:
            ConfigError: the release lacks names; it lists them in one line.
        """
        if missing := sorted(self.missing()):
            raise _lacks(self.engine, self.version, self.works_with, ", ".join(missing))
        if unknown := sorted(self.unknown()):
            log.warning(
                "prefixd: %s %s calls methods that this prefixd does not know, and leaves at their defaults: %s; "
                "it was tested with %s %s",
                *(self.engine, self.version, ", ".join(unknown), self.engine, self.works_with),
            )

    def missing(self) -> set[str]:
        """The names, and the methods of base classes, that the installed release lacks."""
        return {name for name in {*self.names, *_methods_called(self.bases)} if not _exists(name)}

    def unknown(self) -> set[str]:
        """Public methods of the base classes that prefixd neither overrides nor knows."""
        unknown = set()
        for base in self.bases:
            here = _public_methods(_find(base.path))
            unknown |= {f"{base.path.rpartition(':')[2]}.{name}" for name in here - base.called - base.known}
        return unknown


@contextmanager
def imports_of(engine: str, version: str, works_with: str) -> Iterator[None]:
    """A context for imports from an engine: turns its ImportError into ConfigError of one line. Arguments as
    `Contract`."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != engine.lower():
            raise
        raise _lacks(engine, version, works_with, str(error).partition(" (")[0]) from None


def names_in(where: str, names: str) -> frozenset[str]:
    """Names for a `Contract`: "module:Class." and "a b" are "module:Class.a" and "module:Class.b"."""
    return frozenset(f"{where}{name}" for name in names.split())


def _lacks(engine: str, version: str, works_with: str, names: str) -> ConfigError:
    return ConfigError(
        f"{engine} {version} lacks what prefixd needs of it: {names}; install {engine} {works_with}, or a prefixd that "
        "is made for this release"
    )


def _methods_called(bases: Iterable[BaseClass]) -> Iterable[str]:
    return (f"{base.path}.{name}" for base in bases for name in base.called)


def _public_methods(kind: type) -> set[str]:
    members = (kind.__dict__ if kind is not object else {} for kind in inspect.getmro(kind))
    return {name for each in members for name, value in each.items() if not name.startswith("_") and _is_method(value)}


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, classmethod | staticmethod | property)


def _exists(name: str) -> bool:
    try:
        _find(name)
    except (ImportError, AttributeError):
        return False
    return True


def _find(name: str) -> Any:
    """The object of a name. Raises ImportError or AttributeError if the release has none."""
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for attribute in filter(None, path.split(".")):
        if inspect.isclass(found) and not hasattr(found, attribute) and _has_on_objects(found, attribute):
            return None
        found = getattr(found, attribute)
    return found


def _has_on_objects(kind: type, attribute: str) -> bool:
    """Whether objects of a class have an attribute that the class lacks: a field, or one that a constructor sets."""
    for each in inspect.getmro(kind):
        code = getattr(each.__dict__.get("__init__"), "__code__", None)
        if attribute in inspect.get_annotations(each) or (code and attribute in code.co_names):
            return True
    return False
