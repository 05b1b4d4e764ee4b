"""Every command has `--json`, and with it stdout has JSON alone: an answer, or an error with the same exit status."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.main import get_command

from prefixd.cli.app import app

Cli = Callable[..., Any]

ARGUMENTS = {
    "generate": ["hello"],
    "inspect": ["9f86d081"],
    "pin": ["9f86d081"],
    "unpin": ["9f86d081"],
    "evict": ["9f86d081"],
    "tier resize": ["gpu", "4GiB"],
    "tenants set": ["acme", "--calls", "3"],
    "warm load": ["warm.jsonl"],
    "warm record": ["warm.jsonl"],
    "why": ["r1"],
    "trace record": ["trace.jsonl"],
    "plan": ["--trace", "nowhere.jsonl", "--model", "llama-3-8b", "--gpu", "1GiB", "--cpu", "1GiB"],
    "serve": ["--cpu-bytes", "900TB"],
    "demo": ["--out", "no/folder/demo.json"],
    "recover": ["--data-dir", "nowhere"],
    "config show": ["--set", "cpu.bytes=apples"],
}
"""What a command needs to get as far as its daemon, or to its own error."""


def commands(group: Any, before: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name


COMMANDS = sorted(commands(get_command(app)))


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "top"])  # as text it wants a terminal first
def test_an_error_is_json_with_the_same_status(cli: Cli, command: str) -> None:
    arguments = [*command.split(), *ARGUMENTS.get(command, [])]
    as_text, as_json = cli(*arguments), cli(*arguments, "--json")
    assert as_text.exit_code == as_json.exit_code != 0, "there is no daemon"
    document = json.loads(as_json.stdout)
    assert document["error"]["exit_status"] == as_json.exit_code
    assert document["error"]["message"] and document["error"]["status"].isupper()
    assert as_json.stderr.startswith("prefixd: ") and as_json.stderr == as_text.stderr


@pytest.mark.parametrize("command", ["stats", "generate", "tenants set", "config show"])
def test_a_wrong_option_is_json(cli: Cli, command: str) -> None:
    result = cli(*command.split(), "--bogus", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["status"] == "INVALID_ARGUMENT"


LOOKS = [name for name in COMMANDS if name not in ("serve", "demo", "plan", "recover", "config show", "top")]


@pytest.mark.parametrize("command", LOOKS)
def test_an_answer_is_json(cli: Cli, daemon: Any, command: str) -> None:
    result = cli(*command.split(), *ARGUMENTS.get(command, []), "--json", "--address", daemon.address)
    if result.exit_code == 0 and command == "generate":
        assert all(json.loads(line)["event"] for line in result.stdout.splitlines())
    else:  # the daemon of these tests does not answer every call: then it is an error
        json.loads(result.stdout)
