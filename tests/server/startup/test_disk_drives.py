"""A daemon whose disk tier lies in several directories: what it needs of them, and how a start says what is missing."""

from __future__ import annotations

import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from prefixd.base.errors import ConfigError
from prefixd.server.access.socket_access import make_private
from prefixd.server.startup.storage import open_store
from prefixd.settings import Settings
from prefixd.settings.checks import check_start


def settings(folder: Path, **disk: object) -> Settings:
    named = {"bytes": "8MiB", "more_paths": f"{folder}/second,{folder}/third"} | disk
    return Settings.load(None, {"data_dir": folder, **{f"disk.{name}": value for name, value in named.items()}}, {})


def test_directories_are_listed_by_the_settings_that_name_them(tmp_path: Path) -> None:
    assert settings(tmp_path).disk_paths == {
        "disk.path": tmp_path / "blocks",
        "disk.more_paths[0]": tmp_path / "second",
        "disk.more_paths[1]": tmp_path / "third",
    }
    assert settings(tmp_path, more_paths="").disk_paths == {"disk.path": tmp_path / "blocks"}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("{0}/blocks", "disk.more_paths[0] = {0}/blocks is the same directory as disk.path = {0}/blocks"),
        ("{0}/blocks/x/y", "disk.more_paths[0] = {0}/blocks/x/y is inside disk.path = {0}/blocks"),
        ("{0}", "disk.more_paths[0] = {0} contains disk.path = {0}/blocks"),
        ("{0}/m,{0}/n,{0}/m", "disk.more_paths[2] = {0}/m is the same directory as disk.more_paths[0] = {0}/m"),
        ("{0}/m,{0}/m/n", "disk.more_paths[1] = {0}/m/n is inside disk.more_paths[0] = {0}/m"),
        ('["{0}/m"]', "write the texts with commas between them, without brackets"),
    ],
)
def test_directories_that_overlap_are_refused_before_one_is_made(tmp_path: Path, more: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(tmp_path, more_paths=more.format(tmp_path))
    assert says.format(tmp_path) in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"disk\.more_paths\[1\] = .*/file/third cannot be made \(Not a directory\)"):
        make_private("disk.more_paths[1]", tmp_path / "file" / "third")


def test_directories_whose_names_begin_alike_do_not_overlap(tmp_path: Path) -> None:
    assert len(settings(tmp_path, more_paths=f"{tmp_path}/blocks2,{tmp_path}/blocks20").disk_paths) == 3


def test_a_directory_that_cannot_be_made_is_named_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "third").touch()
    with pytest.raises(ConfigError, match=r"disk\.more_paths\[1\] = .*/third.* is not a directory"):
        check_start(settings(tmp_path))


async def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir(mode=0o777)
    (tmp_path / "second").chmod(0o777)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"disk\.more_paths\[0\] = .*can be written to by other users"):
            open_store(settings(tmp_path), None, stack)


@pytest.mark.parametrize("name", ["disk.path", "disk.more_paths"])
async def test_a_directory_with_other_files_is_refused_as_it_is(tmp_path: Path, name: str) -> None:
    photos = tmp_path / "photos"
    photos.mkdir(mode=0o755)
    (photos / "cat.jpeg").touch()
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"holds 'cat\.jpeg'.*choose an empty directory"):
            open_store(settings(tmp_path, **{name.removeprefix("disk."): str(photos)}), None, stack)
    assert photos.stat().st_mode & 0o777 == 0o755
    assert [each.name for each in photos.iterdir()] == ["cat.jpeg"]


async def test_directories_that_others_can_list_are_closed(tmp_path: Path) -> None:
    for name in ("blocks", "second", "third"):
        (tmp_path / name).mkdir(mode=0o755)
    async with AsyncExitStack() as stack:
        assert open_store(settings(tmp_path), None, stack) is not None
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("blocks", "second", "third")} == {0o700}


def test_a_relative_directory_is_meant_from_where_the_daemon_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings(tmp_path, path="first", more_paths="second").disk_paths == {
        "disk.path": tmp_path / "first",
        "disk.more_paths[0]": tmp_path / "second",
    }


async def test_a_drive_that_is_gone_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        assert open_store(settings(tmp_path), None, stack) is not None
    shutil.rmtree(tmp_path / "third")
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"disk\.more_paths: .*/third.* not there.*disk\.drop_missing = true"):
            open_store(settings(tmp_path), None, stack)
        assert open_store(settings(tmp_path, drop_missing=True), None, stack) is not None
