"""Tables on terminals of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from prefixd.cli.output.tables.grid import table


def printed(width: int) -> str:
    made = table("prefix", "namespace", "tokens", "", right=("tokens",), fold=("namespace",))
    made.add_row("9f86d081884c", "llama-3-8b-instruct-0123456789", "1,024", "pinned")
    made.add_row("0badc0de1234", "tiny", "7", "")
    out = Console(file=io.StringIO(), width=width, color_system=None)
    out.print(made)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_a_wide_terminal_gets_a_table() -> None:
    lines = printed(100).splitlines()
    assert lines[1].split() == ["prefix", "namespace", "tokens"]
    assert lines[3].split() == ["9f86d081884c", "llama-3-8b-instruct-0123456789", "1,024", "pinned"]


@pytest.mark.parametrize("width", [40, 20])
def test_a_narrow_terminal_gets_a_line_for_each_value(width: int) -> None:
    text = printed(width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "".join(text.split()).startswith(
        "prefix9f86d081884cnamespacellama-3-8b-instruct-0123456789tokens1,024pinned"
    )
    assert text.splitlines()[-5:-1] == ["", "prefix 0badc0de1234", "namespace tiny", "tokens 7"]
