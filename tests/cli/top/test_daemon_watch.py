"""`prefixd top` and a real daemon: one look, and a restart."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from prefixd.base import extras
from prefixd.cli.app import app
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.cli.failures import CommandFailed
from prefixd.cli.top.daemon_watch import Snapshot, watch


@pytest.mark.slow
async def test_it_looks_once_and_survives_a_restart() -> None:
    with DaemonProcess({"cpu.bytes": "1MiB", "disk.bytes": 0}) as daemon:
        answers = watch(daemon.address, 0.05)
        first = await anext(answers)
        assert isinstance(first, Snapshot) and first.stats.tiers[0].capacity_bytes == 1 << 20
        daemon.stop()
        errors = [each async for each in until_true(answers, lambda each: isinstance(each, CommandFailed))]
        assert "prefixd serve" in str(errors[-1])
        daemon.start()
        again = [each async for each in until_true(answers, lambda each: isinstance(each, Snapshot))][-1]
        assert isinstance(again, Snapshot) and again.stats.uptime_s < first.stats.uptime_s + 60
        await answers.aclose()  # type: ignore[attr-defined]


async def until_true(answers: object, last: Callable[[object], bool]) -> object:
    async for each in answers:  # type: ignore[attr-defined]
        yield each
        if last(each):
            return


@pytest.mark.slow
def test_json_is_one_look() -> None:
    with DaemonProcess({"cpu.bytes": "1MiB", "disk.bytes": 0}) as daemon:
        result = CliRunner().invoke(app, ["top", "--json", "--address", daemon.address])
    assert result.exit_code == 0, result.output
    look = json.loads(result.stdout)
    assert look["stats"]["tiers"][0]["tier"] == "cpu" and look["requests"] == []


def test_without_a_terminal_it_says_what_to_do() -> None:
    result = CliRunner().invoke(app, ["top"])
    assert result.exit_code == 2 and "prefixd top --json" in result.stderr


def test_without_its_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    result = CliRunner().invoke(app, ["top"])
    assert result.exit_code == 2 and "pip install 'prefixd[top]'" in result.stderr
