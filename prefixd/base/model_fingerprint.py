"""Fingerprints of models: two models with the same fingerprint compute the same KV, so their caches can be shared."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from prefixd.base.errors import ConfigError

CACHE_NAME = "fingerprints.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
_READ_BYTES = 8 << 20
_MOST_FILES = 4096

_DECIDES_KV = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py")
_DECIDES_TEXT = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_state.json",
        "vocab.json",
    }
)
"""Files that affect only text before it becomes token ids, or tokens after the logits: caches compare token ids."""


def fingerprint(model_directory: Path, cache_directory: Path) -> str:
    """Returns 32 hexadecimal digits: XXH3 over the content of the files that decide what the model computes from token
    ids and images: weights, configurations (also of the image processor and of quantization), code.

    A file is not read again while its path, size, times of change and inode stay the same: `fingerprints.json` in
    `cache_directory` has the digests of the last 4,096 files.

    Raises:
        ConfigError: the directory has no config.json or no weights.
    """
    config = model_directory / "config.json"
    weights = any(path.is_file() for pattern in _WEIGHTS for path in model_directory.glob(pattern))
    if not config.is_file() or not weights:
        lacking = "weights" if config.is_file() else "config.json"
        raise ConfigError(
            f"model directory {str(model_directory)!r} lacks {lacking}; "
            "give a directory with config.json and *.safetensors or *.bin files"
        )
    return fingerprint_of_files(
        [
            path
            for path in model_directory.iterdir()
            if path.is_file() and path.suffix in _DECIDES_KV and path.name not in _DECIDES_TEXT
        ],
        model_directory,
        cache_directory,
    )


def fingerprint_of_folder(folder: Path, cache_directory: Path) -> str:
    """Returns a fingerprint over all files below a folder and their paths in it: for a folder without a whole model."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return fingerprint_of_files(files, folder, cache_directory)


def state_of_folder(folder: Path) -> list[tuple[str, int, int, int, int]]:
    """Returns path, size, times of change and inode of all files below a folder: they differ after any write.

    It reads no file.
    """
    states = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            states.append((str(path.relative_to(folder)), status.st_size, *times, status.st_ino))
    return states


def last_change_ns(folder: Path) -> int:
    """Returns the latest time of change of a folder, of everything below it, and of the symbolic links that lead there.

    In nanoseconds, by the wall clock of this host or of the file server.
    """
    latest = 0
    for path in (folder.absolute(), *folder.absolute().rglob("*")):
        if path.exists():  # false for a symbolic link to a missing file or to itself
            for state in (path.stat(), *(link.lstat() for link in _links(path))):
                latest = max(latest, state.st_mtime_ns, state.st_ctime_ns)
    return latest


def _links(path: Path) -> Iterator[Path]:
    """Yields the symbolic links between a path and its file, including those in its folders."""
    for part in (path, *path.parents):
        if part.is_symlink():
            yield part
            yield from _links(part.parent / part.readlink())


def fingerprint_of_files(files: Iterable[Path], folder: Path, cache_directory: Path) -> str:
    """Returns a fingerprint over these files of a folder, as `fingerprint` does."""
    cache = _Cache(cache_directory / CACHE_NAME)
    total = xxhash.xxh3_128()
    for path in sorted(files):
        total.update(f"{path.relative_to(folder)}\0{cache.digest(path)}\0".encode(errors="surrogateescape"))
    cache.save()
    return total.hexdigest()


def fingerprint_of_both(model_directory: Path, draft_directory: Path, cache_directory: Path) -> str:
    """Returns the fingerprint for blocks that hold the KV of a model and of its draft model."""
    both = [fingerprint(directory, cache_directory) for directory in (model_directory, draft_directory)]
    return xxhash.xxh3_128_hexdigest("\0".join(both).encode())


class _Cache:
    """Digests of files, kept by path, size, times of change and inode."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved = _load(path)
        self._known = dict(self._saved)  # the most recently used last
        self._used = set[str]()

    def digest(self, path: Path) -> str:
        """Returns the file's XXH3; reads the file only if the digest is not known."""
        status = path.stat()
        # A writer can set a file's modification time back, but not the change time of its inode.
        identity = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        name = str(path.resolve())
        self._used.add(name)
        entry = self._known.pop(name, None)
        if isinstance(entry, list) and entry[:-1] == identity and isinstance(entry[-1], str):
            self._known[name] = entry
            return entry[-1]
        digest = _hash_file(path)
        self._known[name] = [*identity, digest]
        return digest

    def save(self) -> None:
        """Replaces `fingerprints.json` atomically. If it cannot be written, the files are hashed again next time."""
        for name in list(self._known)[: -max(_MOST_FILES, len(self._used))]:
            del self._known[name]
        if list(self._known.items()) == list(self._saved.items()):
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
