"""What a shell is told when a user presses the tab key."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from prefixd.cli.app import app
from tests.cli.conftest import KEY


def completed(words: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("_PREFIXD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    return CliRunner().invoke(app, [], prog_name="prefixd").stdout.split()


def test_commands_and_options_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed("prefixd und", monkeypatch) == ["undrain"]
    assert completed("prefixd ls --b", monkeypatch) == ["--by"]
    assert completed("prefixd ls --by s", monkeypatch) == ["size"]


def test_keys_and_namespaces_are_those_of_the_daemon(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_ADDRESS", daemon.address)
    assert completed("prefixd pin 9f", monkeypatch) == [KEY]
    assert completed("prefixd inspect --namespace ti", monkeypatch) == ["tiny-llama"]


def test_without_a_daemon_nothing_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_ADDRESS", "unix:/nowhere/s")
    assert completed("prefixd pin 9", monkeypatch) == []
