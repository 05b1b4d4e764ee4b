"""Where a client finds the daemon: the daemon's own settings say the same, and need more packages to be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.base.errors import ConfigError
from prefixd.base.setting_sources import find_socket
from prefixd.settings import Settings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "environ", "socket"),
    [
        ("", {}, "/run/user/7/prefixd/prefixd.sock"),
        ('[server]\nsocket = "mine.sock"\n', {}, "{folder}/mine.sock"),
        ('[server]\nsocket = "~/mine.sock"\n', {"PREFIXD_SERVER__TCP": "no port"}, "{folder}/mine.sock"),
        ('[server]\nsocket = "mine.sock"\n', {"PREFIXD_SERVER__SOCKET": "/run/other"}, "/run/other"),
        ("[cpu]\nbytes = -1\n", {"PREFIXD_SERVER__SOCKET": ""}, "/run/user/7/prefixd/prefixd.sock"),
    ],
)
def test_the_socket_is_the_daemons(folder: Path, file: str, environ: dict[str, str], socket: str) -> None:
    (folder / "prefixd.toml").write_text(file)
    found = find_socket(environ)
    assert found == Path(socket.format(folder=folder))
    if "bytes" not in file and "PREFIXD_SERVER__TCP" not in environ:  # what is wrong elsewhere is not a client's affair
        assert Settings.load(environ=environ).server.socket == found


@pytest.mark.parametrize(
    ("file", "environ", "error"),
    [
        ("[server]\nsocket = 7\n", {}, r"server\.socket = 7 \(set by prefixd.toml\) is no path; write it as a string"),
        ("[server\n", {}, "prefixd.toml is not valid TOML"),
        ("", {"PREFIXD_SERVER_SOCKET": "/x"}, "two underscores: PREFIXD_SERVER__SOCKET"),
    ],
)
def test_a_mistake_in_it_is_told(folder: Path, file: str, environ: dict[str, str], error: str) -> None:
    (folder / "prefixd.toml").write_text(file)
    with pytest.raises(ConfigError, match=error):
        find_socket(environ)
