"""Folders of Hugging Face models: named by a path, or by a name such as `meta-llama/Llama-3.1-8B` that was downloaded.

A name is looked up where `hf download` puts models; nothing is downloaded.

    $HF_HUB_CACHE/models--meta-llama--Llama-3.1-8B/refs/main              the commit that `main` was at the download
    $HF_HUB_CACHE/models--meta-llama--Llama-3.1-8B/snapshots/COMMIT/      the model's folder
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import AfterValidator, BeforeValidator

_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+", re.ASCII)
_IN_CACHE = re.compile(r"models--([\w.-]+)", re.ASCII)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_LFS_POINTER = b"version https://git-lfs"
_LFS_BYTES = 1024  # a pointer has some 130
_MOST_HEADER = 100 << 20
"""Bytes of a safetensors header, as the format limits them."""


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Returns the folder into which huggingface_hub downloads models."""
    if cache := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def find_model_folder(value: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder of a downloaded model by its name, such as `gpt2` or `meta-llama/Llama-3.1-8B`, or None."""
    if not _NAME.fullmatch(value):
        return None
    folder = hub_cache(environ) / f"models--{value.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def model_name(folder: Path) -> str:
    """Returns the name by which requests choose a model: that of its folder, or the name by which it was downloaded."""
    if folder.parent.name == "snapshots" and (found := _IN_CACHE.fullmatch(folder.parent.parent.name)):
        return found[1].replace("--", "/", 1)
    return folder.name


def _folder(value: object) -> object:
    """Replaces the name of a downloaded model by its folder, unless there is a folder of this path."""
    if isinstance(value, str | os.PathLike) and not Path(value).expanduser().exists():
        return find_model_folder(os.fspath(value)) or value
    return value


def _make_absolute(value: Path) -> Path:
    return Path(os.path.abspath(value.expanduser()))


ModelFolder = Annotated[Path, BeforeValidator(_folder), AfterValidator(_make_absolute)]


def why_not_a_model(folder: Path) -> str:
    """Returns why a folder has no whole model, with the remedy; empty if it has one. Reads no weights."""
    if not folder.is_dir():
        return _why_no_folder(folder)
    if not (folder / "config.json").is_file():
        return "has no config.json; give the folder of a Hugging Face model"
    again = _remedy(folder)
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    needed = {folder / name for index in _INDEXES for name in _shards(folder / index)}
    missing = sorted(path.name for path in needed | set(weights) if not path.is_file())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"lacks {missing[0]}{more}: the download is not complete; {again}"
    if not weights:
        return f"has a config.json but no weights (*.safetensors or *.bin); {again}"
    for path in weights:
        if why := _why_not_whole(path):
            return f"has {path.name}, {why}; {again}"
    return ""


def _why_no_folder(folder: Path) -> str:
    given = os.path.relpath(folder)
    if not _NAME.fullmatch(given) or given.startswith(".."):
        return "is not a directory; give the directory of a Hugging Face model"
    return (
        f"is not a directory, and no model {given} is in the Hugging Face cache ({hub_cache(os.environ)}); download it "
        f"with `hf download {given}`, or give the directory of a model"
    )


def _remedy(folder: Path) -> str:
    if folder.parent.name == "snapshots":
        return f"download it again with `hf download {model_name(folder)}`"
    return "copy or download the model again (`git lfs pull` if it is a clone)"


def _shards(index: Path) -> set[str]:
    """Returns the files that an index of weights names."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()  # there is none, or transformers will say what is wrong with it


def _why_not_whole(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if size < _LFS_BYTES and start == _LFS_POINTER:
            return "which is a pointer of git-lfs and no weights"
        if path.suffix != ".safetensors":
            return "" if size else "which is empty"
        file.seek(0)
        whole = _safetensors_bytes(file)
    return "" if size >= whole else f"which has {size:,} of {whole:,} bytes"


def _safetensors_bytes(file: BinaryIO) -> int:
    """Returns the size that a file's header gives it: 8 bytes with the header's length, the header, the tensors."""
    length = file.read(8)
    header_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
    if not 0 < header_bytes <= _MOST_HEADER:
        return 8
    try:
        header = json.loads(file.read(header_bytes))
        ends = (tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__")
        return 8 + int(header_bytes) + int(max(ends, default=0))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return 8 + int(header_bytes)
