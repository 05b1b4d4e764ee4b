"""Finds the module with an engine release's own code, by the release's version."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from prefixd.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Releases:
    """The releases of an engine that prefixd works with.

    Args:
        engine: its name, as in "vLLM".
        package: the package that has the files.
        works_with: the releases in words, as "0.29 to 0.33".
        files: the file of each release, by the parts of its number that count: {(0, 32): "v0_32"}.
        flag: the engine's option that a user leaves out to start it without prefixd.
        log: the integration's.
    """

    engine: str
    package: str
    works_with: str
    files: Mapping[tuple[int, ...], str]
    flag: str
    log: logging.Logger

    def file_of(self, version: str) -> str:
        """The file of a release, by its version ("0.32.0+cpu"). A later release, or a build from source without a
        useful version, gets the file of the last known release and a warning in the log.

        Raises:
            ConfigError: the release is older than all known ones.
        """
        first, last = min(self.files), max(self.files)
        said = re.match(r"\.".join([r"(\d+)"] * len(first)), version)
        release = tuple(map(int, said.groups())) if said else ()
        if (0, 1) < release < first:
            raise ConfigError(
                f"{self.engine} {version} is older than prefixd works with; install {self.engine} {self.works_with}, "
                f"or start {self.engine} without {self.flag}"
            )
        if release not in self.files:
            self.log.warning(
                "prefixd: %s %s is not among the releases that prefixd was tested with (%s); it is taken for %s",
                *(self.engine, version, self.works_with, ".".join(map(str, last))),
            )
            release = last
        return self.files[release]

    def module_of(self, version: str) -> Any:
        """The module of a release. Raises ConfigError as `file_of` does."""
        return import_module(f"{self.package}.{self.file_of(version)}")
