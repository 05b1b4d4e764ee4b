"""What differs between the releases of vLLM that prefixd works with: a file for each that differs from the one before.

A file has `NAMES` and `CALLED` for the contract, `ReleaseConnector` (what PrefixdConnector derives from), `tables_of`
and `install`.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from prefixd.errors import ConfigError
from prefixd.integrations.vllm.log import log

WORKS_WITH = "0.29 to 0.33"

_FILES = {(0, 29): "v0_29", (0, 30): "v0_30", (0, 31): "v0_30", (0, 32): "v0_32", (0, 33): "v0_32"}


def file_of(version: str) -> str:
    """The file of a release, by its version ("0.32.0+cpu"). A later release is taken for the last one that is known,
    which is logged; so is a build of vLLM from source, whose version says nothing.

    Raises:
        ConfigError: it is older than all.
    """
    first, last = min(_FILES), max(_FILES)
    said = re.match(r"(\d+)\.(\d+)", version)
    release = (int(said[1]), int(said[2])) if said else (0, 0)
    if (0, 1) < release < first:
        raise ConfigError(
            f"vLLM {version} is older than prefixd works with; install vLLM {WORKS_WITH}, or start vLLM without "
            "--kv-transfer-config"
        )
    if release not in _FILES:
        log.warning(
            "prefixd: vLLM %s is not among the releases that prefixd was tested with (%s); it is taken for %s",
            *(version, WORKS_WITH, ".".join(map(str, last))),
        )
        release = last
    return _FILES[release]


def find(version: str) -> Any:
    """The module of a release."""
    return import_module(f"{__name__}.{file_of(version)}")
