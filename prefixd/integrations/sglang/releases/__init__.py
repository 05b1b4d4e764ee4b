"""Code that differs between the releases of SGLang that prefixd works with: a file for each release with a difference.

A file has `NAMES` for the contract, and `is_storage_writer`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from prefixd.integrations.engine.releases import Releases
from prefixd.integrations.sglang.log import log

RELEASES = Releases(
    "SGLang",
    "0.5.22 or 0.5.23",
    {(0, 5, 22): "v0_5_22", (0, 5, 23): "v0_5_23"},
    "--hicache-storage-backend",
    log,
)


def find(version: str) -> Any:
    """The module of a release. Raises ConfigError."""
    return import_module(f"{__name__}.{RELEASES.file_of(version)}")
