"""Code that differs between the releases of SGLang that prefixd works with: a file for each release with a difference.

A file has `NAMES` for the contract, and `is_storage_writer`.
"""

from __future__ import annotations

from prefixd.integrations.engine.releases import Releases
from prefixd.integrations.sglang.log import log

RELEASES = Releases(
    "SGLang",
    __name__,
    "0.5.22 or 0.5.23",
    {(0, 5, 22): "v0_5_22", (0, 5, 23): "v0_5_23"},
    "--hicache-storage-backend",
    log,
)
