"""A file with a key that encrypts blocks on disk."""

from __future__ import annotations

from pathlib import Path

from prefixd_swap.sealing.rest_keys import RestKeys, parse_keys

_KEY = b"a key of a benchmark, not a secret"


def write_key_file(path: Path) -> Path:
    """Writes a file for `disk.encryption_key_file`; returns it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o600)
    path.write_bytes(_KEY)
    return path


def keys_of_file() -> RestKeys:
    """The keys of such a file."""
    return RestKeys(parse_keys(_KEY))
