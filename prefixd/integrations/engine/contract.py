"""What prefixd uses of an engine's release, looked for when the engine starts.

Engines move names with every release. What a release lacks would be an ImportError in the middle of a start, or an
AttributeError in the middle of a night; a method that its base class has and prefixd does not know may be a duty that
nobody fulfils. Both are said here in one line each.
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
        path: where it is: "package.module:Class".
        called: the methods that the engine calls and prefixd overrides.
        known: the other methods that it is known to have, whose defaults are right for prefixd.
    """

    path: str
    called: frozenset[str]
    known: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Contract:
    """What is needed of an engine.

    Args:
        engine: its name, as in "vLLM".
        version: of the release that is installed.
        works_with: the releases that prefixd works with, in words.
        names: "module", "module:name" or "module:Class.attribute"; an attribute may be one that the constructor sets.
        bases: what prefixd derives from.
    """

    engine: str
    version: str
    works_with: str
    names: frozenset[str]
    bases: tuple[BaseClass, ...] = ()

    def check(self, log: logging.Logger) -> None:
        """Warns, in one line, of methods that prefixd does not know.

        Raises:
            ConfigError: names of what the release lacks, in one line.
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
        """The names, and the methods of base classes, that are not there."""
        return {name for name in {*self.names, *_methods_called(self.bases)} if not _is_there(name)}

    def unknown(self) -> set[str]:
        """Public methods of the base classes that are neither overridden nor known."""
        unknown = set()
        for base in self.bases:
            here = _public_methods(_find(base.path))
            unknown |= {f"{base.path.rpartition(':')[2]}.{name}" for name in here - base.called - base.known}
        return unknown


@contextmanager
def imports_of(engine: str, version: str, works_with: str) -> Iterator[None]:
    """A context in which modules import an engine's names. Raises ConfigError, in one line, for a name that is not
    there; arguments as those of `Contract`."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != engine.lower():
            raise
        raise _lacks(engine, version, works_with, str(error).partition(" (")[0]) from None


def _lacks(engine: str, version: str, works_with: str, what: str) -> ConfigError:
    return ConfigError(
        f"{engine} {version} lacks what prefixd needs of it: {what}; install {engine} {works_with}, or a prefixd that "
        "is made for this release"
    )


def _methods_called(bases: Iterable[BaseClass]) -> Iterable[str]:
    return (f"{base.path}.{name}" for base in bases for name in base.called)


def _public_methods(kind: type) -> set[str]:
    members = (kind.__dict__ if kind is not object else {} for kind in inspect.getmro(kind))
    return {name for each in members for name, value in each.items() if not name.startswith("_") and _is_method(value)}


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, classmethod | staticmethod | property)


def _is_there(name: str) -> bool:
    try:
        _find(name)
    except (ImportError, AttributeError):
        return False
    return True


def _find(name: str) -> Any:
    """What a name stands for. Raises ImportError or AttributeError where there is nothing."""
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for attribute in filter(None, path.split(".")):
        if inspect.isclass(found) and not hasattr(found, attribute) and _sets(found, attribute):
            return None
        found = getattr(found, attribute)
    return found


def _sets(kind: type, attribute: str) -> bool:
    """Whether objects of a class have an attribute that the class itself has not: a field, or set by a constructor."""
    for each in inspect.getmro(kind):
        code = getattr(each.__dict__.get("__init__"), "__code__", None)
        if attribute in inspect.get_annotations(each) or (code and attribute in code.co_names):
            return True
    return False
