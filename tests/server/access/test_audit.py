"""The audit log goes to a file that nobody else has put there."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from prefixd.base.errors import ConfigError
from prefixd.server.access.audit import AuditLog

OTHER = 64_001


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "logs"
    made.mkdir(0o700)
    return made


def test_lines_are_appended_to_a_file_of_ones_own(folder: Path) -> None:
    path = folder / "audit.log"
    for number in range(2):
        log = AuditLog(path)
        log.log_event("evicted", None, what=f"{number}")
        log.close()
    assert [json.loads(line)["what"] for line in path.read_text().splitlines()] == ["0", "1"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_file_in_its_place_is_refused(folder: Path) -> None:
    victim, path = folder / "authorized_keys", folder / "audit.log"
    victim.write_text("key\n")
    path.symlink_to(victim)
    with pytest.raises(ConfigError, match=r"server.audit_log = .*: it is a symbolic link; choose another file"):
        AuditLog(path)
    path.unlink()
    os.link(victim, path)
    with pytest.raises(ConfigError, match=r"it has 2 names, so another user may have linked it"):
        AuditLog(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"audit.log: "):  # without a reader it must not wait
        AuditLog(path)
    assert victim.read_text() == "key\n"


def test_a_folder_in_which_everybody_can_replace_it_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"mode 0777\); run `chmod o-w .*logs`"):
        AuditLog(folder / "audit.log")
    for mode in (0o1777, 0o775):  # /tmp, and /var/log of some systems
        folder.chmod(mode)
        AuditLog(folder / "audit.log").close()


def test_a_folder_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; choose another file"):
        AuditLog(folder / "none" / "audit.log")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_what_belongs_to_another_user_is_refused(folder: Path) -> None:
    path = folder / "audit.log"
    path.touch()
    os.chown(path, OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"it belongs to user {OTHER}; remove it or choose another file"):
        AuditLog(path)
    path.unlink()
    link = folder.parent / "link"
    link.symlink_to(folder)
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"is a symbolic link of user {OTHER}"):
        AuditLog(link / "audit.log")
    os.chown(folder, OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"which belongs to user {OTHER}, who could put another file in its place"):
        AuditLog(path)
    assert not path.exists()


def test_a_rotation_does_not_follow_what_was_put_there_meanwhile(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, victim = folder / "audit.log", folder / "victim"
    victim.write_text("")
    log = AuditLog(path)
    log.log_event("evicted", None, what="before")
    path.rename(folder / "audit.log.1")
    path.symlink_to(victim)
    log.reopen()
    log.log_event("evicted", None, what="after")
    log.close()
    assert victim.read_text() == ""
    assert "it is a symbolic link; choose another file; the audit log goes on in the old file" in caplog.text
    assert [json.loads(line)["what"] for line in (folder / "audit.log.1").read_text().splitlines()] == [
        "before",
        "after",
    ]


def test_a_disk_that_does_not_answer_does_not_keep_the_daemon_from_ending(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, writing, really = threading.Event(), threading.Event(), os.write

    def write(file: int, data: bytes) -> int:
        if b"evicted" in data:
            writing.set()
            hanging.wait(30)
        return really(file, data)

    monkeypatch.setattr("prefixd.server.access.audit.os.write", write)
    monkeypatch.setattr("prefixd.server.access.audit._CLOSE_S", 0.05)
    monkeypatch.setattr("prefixd.server.access.audit._MOST_WAITING", 2)
    log = AuditLog(folder / "audit.log")
    thread = log._thread
    assert thread is not None
    log.log_event("evicted", None)
    assert writing.wait(30)
    for _ in range(5):
        log.log_event("evicted", None)
    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(10)
    ended = not closing.is_alive()
    hanging.set()
    assert ended and "does not take lines: 2 and more are lost" in caplog.text
    log._lines.put(None)
    thread.join(30)
    os.close(log._file)
