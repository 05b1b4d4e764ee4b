"""The fingerprint follows the contents of a model and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prefixd.base import model_fingerprint
from prefixd.base.errors import ConfigError
from prefixd.base.model_fingerprint import (
    CACHE_NAME,
    fingerprint,
    fingerprint_of_both,
    fingerprint_of_folder,
    last_change_ns,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model-1.safetensors").write_bytes(bytes(range(256)) * 100)
    (directory / "model-2.safetensors").write_bytes(b"weights")
    return directory


def copy(directory: Path, target: Path) -> Path:
    target.mkdir()
    for path in directory.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_a_copy_has_the_same_and_one_changed_bit_another(directory, tmp_path):
    cache = tmp_path / "cache"
    before = fingerprint(directory, cache)
    assert len(before) == 32
    assert fingerprint(copy(directory, tmp_path / "copy"), cache) == before
    weights = directory / "model-1.safetensors"
    data = bytearray(weights.read_bytes())
    data[12_345] ^= 1
    weights.write_bytes(data)
    assert fingerprint(directory, cache) != before


def test_config_and_file_names_count_and_other_files_do_not(directory, tmp_path):
    before = fingerprint(directory, tmp_path)
    (directory / "README.md").write_text("hello")
    (directory / "tokenizer.json").write_text("{}")
    assert fingerprint(directory, tmp_path) == before
    (directory / "model-2.safetensors").rename(directory / "model-3.safetensors")
    assert fingerprint(directory, tmp_path) != before
    (directory / "model-3.safetensors").rename(directory / "model-2.safetensors")
    (directory / "config.json").write_text('{"rope_theta": 1}')
    assert fingerprint(directory, tmp_path) != before


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "quantize_config.json", "modeling.py", "vision.pt"]
)
def test_whatever_else_may_decide_what_is_computed_counts(directory, tmp_path, name):
    before = fingerprint(directory, tmp_path)
    (directory / name).write_text("{}")
    with_it = fingerprint(directory, tmp_path)
    (directory / name).write_text("[]")
    assert len({before, with_it, fingerprint(directory, tmp_path)}) == 3


def test_a_file_that_was_written_to_is_read_again_whatever_its_time_of_modification_says(directory, tmp_path):
    weights = directory / "model-2.safetensors"
    before, status = fingerprint(directory, tmp_path), weights.stat()
    with weights.open("r+b") as file:
        file.write(b"W")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = weights.stat()
    same = ("st_size", "st_mtime_ns", "st_ino")
    assert [getattr(after, name) for name in same] == [getattr(status, name) for name in same]
    assert fingerprint(directory, tmp_path) != before


def test_of_a_folder_every_file_counts_by_its_path_and_content(directory, tmp_path):
    cache, folder = tmp_path / "cache", tmp_path / "adapter"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "adapter.txt").write_text("one")
    before = fingerprint_of_folder(folder, cache)
    (folder / "sub" / "adapter.txt").write_text("two")
    other = fingerprint_of_folder(folder, cache)
    (folder / "sub" / "adapter.txt").rename(folder / "adapter.txt")
    assert len({before, other, fingerprint_of_folder(folder, cache)}) == 3


def test_files_that_are_known_are_not_read_again(directory, tmp_path, monkeypatch):
    read: list[str] = []
    hash_file = model_fingerprint._hash_file
    monkeypatch.setattr(model_fingerprint, "_hash_file", lambda path: (read.append(path.name), hash_file(path))[1])
    before = fingerprint(directory, tmp_path)
    assert sorted(read) == ["config.json", "model-1.safetensors", "model-2.safetensors"]
    read.clear()
    assert fingerprint(directory, tmp_path) == before
    assert read == []
    os.utime(directory / "model-2.safetensors", ns=(1, 1))
    assert fingerprint(directory, tmp_path) == before
    assert read == ["model-2.safetensors"]


@pytest.mark.parametrize("content", ["", "not json", "[]", '{"x": 1}'])
def test_a_damaged_cache_is_replaced(directory, tmp_path, content):
    expected = fingerprint(directory, tmp_path / "other")
    (tmp_path / CACHE_NAME).write_text(content)
    assert fingerprint(directory, tmp_path) == expected
    assert len(json.loads((tmp_path / CACHE_NAME).read_text())) >= 3


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"lacks config\.json"):
        fingerprint(tmp_path, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="lacks weights"):
        fingerprint(tmp_path, tmp_path)


def test_that_of_a_model_with_a_draft_is_neither_ones_and_says_which_is_which(directory, tmp_path):
    draft = copy(directory, tmp_path / "draft")
    (draft / "config.json").write_text('{"small": true}')
    names = {
        fingerprint(directory, tmp_path),
        fingerprint(draft, tmp_path),
        fingerprint_of_both(directory, draft, tmp_path),
        fingerprint_of_both(draft, directory, tmp_path),
    }
    assert {len(name) for name in names} == {32}
    assert len(names) == 4
    assert fingerprint_of_both(directory, draft, tmp_path) in names


def test_files_that_were_asked_about_longest_ago_are_forgotten(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(model_fingerprint, "_MOST_FILES", 9, raising=False)
    models = [copy(directory, tmp_path / str(number)) for number in range(4)]
    for number in (0, 1, 2, 0, 3):
        fingerprint(models[number], tmp_path)

    def known() -> set[str]:
        return {Path(name).parent.name for name in json.loads((tmp_path / CACHE_NAME).read_text())}

    assert known() == {"2", "0", "3"}
    monkeypatch.setattr(model_fingerprint, "_MOST_FILES", 2, raising=False)
    fingerprint(models[1], tmp_path)
    assert known() == {"1"}, "a model with more files than that is known all the same"


def test_what_is_known_is_not_written_again(directory, tmp_path):
    fingerprint(directory, tmp_path)
    before = (tmp_path / CACHE_NAME).stat()
    fingerprint(directory, tmp_path)
    after = (tmp_path / CACHE_NAME).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_links_that_lead_nowhere_are_no_change(directory):
    (directory / "gone").symlink_to("nothing")
    (directory / "round").symlink_to("round")
    assert last_change_ns(directory) >= directory.stat().st_ctime_ns
