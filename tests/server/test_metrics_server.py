"""The metrics' listener when the process is out of descriptors."""

from __future__ import annotations

import time

import pytest

from prefixd.server.snapshot import _Server


def test_a_scrape_that_cannot_be_accepted_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener stays readable: without a pause a thread would try again for ever, at full speed."""
    server = _Server(("127.0.0.1", 0), None)  # type: ignore[arg-type]
    server.socket.close()
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(OSError):
        server.get_request()
    assert pauses and pauses[0] >= 0.05
