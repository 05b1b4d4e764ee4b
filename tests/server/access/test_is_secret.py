"""Which files the daemon takes as secrets."""

from __future__ import annotations

import os
import stat

import pytest

from prefixd.server.access.socket_access import is_secret

ME, GROUP = 10001, 10002


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "secret"),
    [
        (0o600, ME, GROUP, True),
        (0o400, 0, 0, True),
        (0o440, 0, GROUP, True),
        (0o440, 0, 0, False),
        (0o440, ME, GROUP, False),
        (0o460, 0, GROUP, False),
        (0o444, 0, GROUP, False),
        (0o600, 7, GROUP, False),
    ],
)
def test_only_the_daemon_may_be_able_to_read_it(
    monkeypatch: pytest.MonkeyPatch, mode: int, uid: int, gid: int, secret: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    monkeypatch.setattr(os, "getegid", lambda: GROUP)
    assert is_secret(os.stat_result((stat.S_IFREG | mode, 1, 1, 1, uid, gid, 100, 0, 0, 0))) is secret


def test_roots_group_is_not_the_daemons_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getegid", lambda: 0)
    assert not is_secret(os.stat_result((stat.S_IFREG | 0o440, 1, 1, 1, 0, 0, 100, 0, 0, 0)))
