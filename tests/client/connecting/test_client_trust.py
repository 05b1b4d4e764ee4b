"""The default socket is used only where nobody else can have put it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.base.setting_sources import default_socket
from prefixd.client import AsyncClient, NamespaceSpec, ServerUnavailable, SocketUntrusted
from prefixd.client.connecting.default_socket import check_default_socket

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of the default socket, which is there."""
    monkeypatch.delenv("PREFIXD_SERVER__SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    path = default_socket()
    assert path == folder / "prefixd" / "prefixd.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        yield path


def test_our_own_is_trusted_whether_it_is_there_or_not(path: Path) -> None:
    check_default_socket(path)
    path.parent.chmod(0o711)
    check_default_socket(path)
    path.unlink()
    check_default_socket(path)


def _open(path: Path) -> None:
    path.parent.chmod(0o770)


def _link(path: Path) -> None:
    path.parent.rename(path.parents[1] / "elsewhere")
    path.parent.symlink_to(path.parents[1] / "elsewhere")


def _around(path: Path) -> None:
    path.parents[1].chmod(0o777)


def _file(path: Path) -> None:
    path.unlink()
    path.touch()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_open, r"other users can write to .*/prefixd \(mode 0770\)"),
        (_link, f"/prefixd is no directory but was put there by user {os.getuid()}"),
        (_around, "other users can replace"),
        (_file, "is no socket"),
    ],
)
async def test_what_others_can_change_is_not(path: Path, spoil: Callable[[Path], None], why: str) -> None:
    spoil(path)
    with pytest.raises(SocketUntrusted, match=rf"default socket {path} is not used.*{why}.*set XDG_RUNTIME_DIR"):
        check_default_socket(path)
    for address in (None, f"unix:{path}"):
        async with AsyncClient(address) as client:
            with pytest.raises(SocketUntrusted):
                await client.stats()


@as_root
@pytest.mark.parametrize("what", ["directory", "socket"])
def test_anothers_is_not(path: Path, what: str) -> None:
    os.chown(path.parent if what == "directory" else path, NOBODY, NOBODY)
    with pytest.raises(SocketUntrusted, match=rf"belongs to user {NOBODY}, and this process to user {os.getuid()}"):
        check_default_socket(path)


async def test_it_is_looked_at_before_every_call(path: Path) -> None:
    """It may be made by somebody else while the daemon is away."""
    path.unlink()
    path.parent.rmdir()
    async with AsyncClient() as client:
        with pytest.raises(ServerUnavailable, match=f"no answer from the daemon at unix:{path}: No such file"):
            await client.stats()
        path.parent.mkdir()
        path.parent.chmod(0o777)
        with pytest.raises(SocketUntrusted):
            await client.stats()


async def test_a_path_that_was_given_is_the_givers_business(
    stand_in: Any, spec: NamespaceSpec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder.chmod(0o777)
    async with AsyncClient(stand_in.address) as client:
        await client.register(spec)
