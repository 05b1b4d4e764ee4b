"""A name for a model's computation: what must be equal for two caches of KV to be interchangeable."""

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
"""Files that act before there are token ids, or behind the logits: caches compare token ids."""


def fingerprint(model_directory: Path, cache_directory: Path) -> str:
    """32 hexadecimal digits: XXH3 over the files that decide what the model computes from token ids and from images, by
    content: weights, configurations (also of the image processor and of quantization), code.

    A file that was hashed before is not read again while path, size, times of change and inode are the same; that is
    kept in `fingerprints.json` under `cache_directory`, of the last 4,096 files that were asked about.

    Raises:
        ConfigError: there is no config.json, or there are no weights.
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
    """As `fingerprint`, over all files below a folder, by their paths in it: for what is no whole model."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return fingerprint_of_files(files, folder, cache_directory)


def state_of_folder(folder: Path) -> list[tuple[str, int, int, int, int]]:
    """What changes when somebody writes to a file below a folder, without reading any: path, size, times, inode."""
    states = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            states.append((str(path.relative_to(folder)), status.st_size, *times, status.st_ino))
    return states


def last_change_ns(folder: Path) -> int:
    """When what is read at a folder last became other: the latest time of change of the folder, of all below it, and of
    the symbolic links that lead there. In nanoseconds of the wall clock, or of the file server's."""
    latest = 0
    for path in (folder.absolute(), *folder.absolute().rglob("*")):
        if path.exists():  # which a link to nowhere, or to itself, does not
            for state in (path.stat(), *(link.lstat() for link in _links(path))):
                latest = max(latest, state.st_mtime_ns, state.st_ctime_ns)
    return latest


def _links(path: Path) -> Iterator[Path]:
    """The symbolic links between a path and its file, those that its folders are included."""
    for place in (path, *path.parents):
        if place.is_symlink():
            yield place
            yield from _links(place.parent / place.readlink())


def fingerprint_of_files(files: Iterable[Path], folder: Path, cache_directory: Path) -> str:
    """As `fingerprint`, over these files of a folder."""
    cache = _Cache(cache_directory / CACHE_NAME)
    total = xxhash.xxh3_128()
    for path in sorted(files):
        total.update(f"{path.relative_to(folder)}\0{cache.digest(path)}\0".encode(errors="surrogateescape"))
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
        self._saved = _load(path)
        self._known = dict(self._saved)  # those that were asked about last, last
        self._used = set[str]()

    def digest(self, path: Path) -> str:
        """The file's XXH3, read only if it is not known."""
        status = path.stat()
        # Who puts other bytes into a file can set its time of modification back, and not that of its inode's change.
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
        """Replace the file at once. Where it cannot be written, the files are hashed again next time."""
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
