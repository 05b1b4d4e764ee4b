"""Which file of an engine's folder has what is a release's own."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from prefixd.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Releases:
    """The releases of an engine that prefixd works with.

    Args:
        engine: its name, as in "vLLM".
        works_with: the releases in words, as "0.29 to 0.33".
        files: the file of each, by as much of its number as counts: {(0, 32): "v0_32"}.
        flag: what the engine's user leaves out to start it without prefixd.
        log: the integration's.
    """

    engine: str
    works_with: str
    files: Mapping[tuple[int, ...], str]
    flag: str
    log: logging.Logger

    def file_of(self, version: str) -> str:
        """The file of a release, by its version ("0.32.0+cpu"). A later release is taken for the last one that is
        known, which is logged; so is a build from source, whose version says nothing.

        Raises:
            ConfigError: it is older than all.
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
