"""Models by the name of a download, and folders that have no whole model."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixd.base.errors import ConfigError
from prefixd.settings import Settings
from prefixd.settings.checks import check_start
from prefixd.settings.model_folder import find_model_folder, hub_cache, model_name, why_not_a_model

NAME = "meta-llama/Llama-3.1-8B"


def tensors(nbytes: int, present: int | None = None) -> bytes:
    """A file of safetensors with one tensor, of which `present` bytes are there."""
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    return struct.pack("<Q", len(header)) + header.encode() + bytes(nbytes if present is None else present)


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a model as `hf download` leaves it: its files are links to blobs."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--meta-llama--Llama-3.1-8B"
    snapshot = folder / "snapshots" / "0123abcd"
    for each in (snapshot, folder / "refs", folder / "blobs"):
        each.mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abcd")
    for name, content in (("config.json", b"{}"), ("model.safetensors", tensors(8))):
        (folder / "blobs" / name).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return snapshot


def test_a_name_is_looked_up_in_the_cache_of_hugging_face(downloaded: Path) -> None:
    assert find_model_folder(NAME) == downloaded
    assert model_name(downloaded) == NAME
    assert model_name(Path("/models/llama")) == "llama"
    assert not why_not_a_model(downloaded)
    worker = Settings.load(None, {"worker.model": NAME, "worker.draft_model": NAME}).worker
    assert worker.model == worker.draft_model == downloaded
    assert Settings.load(None, {"worker.model": "/m", "worker.more_models": NAME}).worker.more_models == (downloaded,)
    for other in ("meta-llama/Llama", "gpt2", "../x", "a/b/c", "/abs", ""):
        assert find_model_folder(other) is None


def test_a_folder_of_the_name_comes_before_the_cache(
    downloaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert Settings.load(None, {"worker.model": NAME}).worker.model == tmp_path / NAME


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_cache_is_where_hugging_face_has_it(environ: dict[str, str], folder: str) -> None:
    assert hub_cache(environ) == Path(folder)


def test_a_model_that_was_not_downloaded_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    settings = Settings.load(None, {"worker.model": NAME, "data_dir": tmp_path, "server.socket": tmp_path / "s"})
    with pytest.raises(ConfigError, match=rf"worker.model .*{tmp_path}/hub.*`hf download {NAME}`"):
        check_start(settings)
    settings = Settings.load(None, {"worker.model": "/no/model/here", "data_dir": tmp_path, "server.socket": "s"})
    with pytest.raises(ConfigError, match=r"worker\.model = /no/model/here is not a directory; give"):
        check_start(settings)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def a_blob_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/nothing")


def a_shard_is_missing(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model.safetensors", "c": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def a_pointer(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def cut_off(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(tensors(1000, 10))


def empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_config, "has no config.json"),
        (no_weights, "no weights (*.safetensors or *.bin)"),
        (a_blob_is_missing, "lacks model.safetensors: the download is not complete"),
        (a_shard_is_missing, "lacks model-1-of-2.safetensors and 1 more"),
        (a_pointer, "which is a pointer of git-lfs"),
        (cut_off, "bytes; download it again with `hf download meta-llama/Llama-3.1-8B`"),
        (empty, "pytorch_model.bin, which is empty"),
    ],
)
def test_a_folder_without_a_whole_model_is_refused_with_the_reason(
    downloaded: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(downloaded)
    assert words in why_not_a_model(downloaded)
