"""A name for a model's computation: what must be equal for two caches of KV to be interchangeable."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import xxhash

from prefixd.errors import ConfigError

CACHE_NAME = "fingerprints.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
_READ_BYTES = 8 << 20


def fingerprint(model_directory: Path, cache_directory: Path) -> str:
    """32 hexadecimal digits: XXH3 over config.json and every weight file, by content.

    A file that was hashed before is not read again while path, size, modification time and inode are the
    same; that is kept in `fingerprints.json` under `cache_directory`. Raises ConfigError if there is no
    config.json or no weights.
    """
    config = model_directory / "config.json"
    weights = sorted({path for pattern in _WEIGHTS for path in model_directory.glob(pattern) if path.is_file()})
    if not config.is_file() or not weights:
        lacking = "weights" if config.is_file() else "config.json"
        raise ConfigError(
            f"model directory {str(model_directory)!r} lacks {lacking}; "
            "give a directory with config.json and *.safetensors or *.bin files"
        )
    cache = _Cache(cache_directory / CACHE_NAME)
    total = xxhash.xxh3_128()
    for path in [config, *weights]:
        total.update(f"{path.name}\0{cache.digest(path)}\0".encode())
    cache.save()
    return total.hexdigest()


def fingerprint_of_both(model_directory: Path, draft_directory: Path, cache_directory: Path) -> str:
    """As `fingerprint`, for caches of blocks that hold the KV of a model and of its draft."""
    both = [fingerprint(directory, cache_directory) for directory in (model_directory, draft_directory)]
    return xxhash.xxh3_128_hexdigest("\0".join(both).encode())


class _Cache:
    """Digests of files, by what tells that a file is the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _load(path)
        self._changed = False

    def digest(self, path: Path) -> str:
        """The file's XXH3, read only if it is not known."""
        status = path.stat()
        identity = [status.st_size, status.st_mtime_ns, status.st_ino]
        name = str(path.resolve())
        entry = self._known.get(name)
        if isinstance(entry, list) and entry[:3] == identity and isinstance(entry[-1], str):
            return entry[-1]
        digest = _hash_file(path)
        self._known[name] = [*identity, digest]
        self._changed = True
        return digest

    def save(self) -> None:
        """Replace the file at once. Where it cannot be written, the files are hashed again next time."""
        if not self._changed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        except OSError:
            return
        with os.fdopen(descriptor, "w") as file:
            json.dump(self._known, file)
        os.replace(temporary, self._path)


def _load(path: Path) -> dict[str, object]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
