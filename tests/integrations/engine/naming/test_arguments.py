"""What of an engine's arguments goes into the name."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefixd.base.errors import ConfigError
from prefixd.integrations.engine.naming import arguments
from prefixd.integrations.engine.naming.arguments import Argument, ArgumentTable, content_of, plain


@pytest.fixture(autouse=True)
def own_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "default_data_dir", lambda: tmp_path / "data")


TABLE = ArgumentTable(
    in_name={"numbers": "dtype scales", "all of a section": "attention"},
    files={"by content": "adapter"},
    covered={"the weights": "model"},
    harmless={"logs": "observability", "says nothing": "cache.size"},
    refused={"own_scales": "every engine would have its own"},
)


def facts(**values: Any) -> dict[str, Any]:
    return TABLE.facts(Argument(name.replace("__", "."), value, None) for name, value in values.items())


def test_what_is_in_the_name_is_there_with_its_value_and_what_is_not_set_is_not() -> None:
    assert facts(dtype="fp8", attention__backend="x", model="m", observability__level=3, cache__size=5) == {
        "dtype": "fp8",
        "attention.backend": "x",
    }
    assert facts(dtype=None, scales=False, attention=[]) == facts()


def test_an_argument_that_is_not_known_counts_once_it_has_another_value_than_its_default() -> None:
    assert TABLE.facts([Argument("new", 4, 4), Argument("cache.new", "on", "off")]) == {"cache.new": "on"}
    assert "new" not in TABLE and "cache.new" not in TABLE
    assert "attention.new" in TABLE and "observability.deep.new" in TABLE
    assert TABLE.facts([Argument("new", False, True)]) == {"new": False}


def test_what_is_refused_is_so_only_when_it_is_set() -> None:
    assert facts(own_scales=False) == {}
    with pytest.raises(ConfigError, match="own_scales = True: every engine would have its own"):
        facts(own_scales=True)


def test_files_are_what_is_in_them(tmp_path: Path) -> None:
    file, folder = tmp_path / "scales.json", tmp_path / "adapter"
    folder.mkdir()
    found = set()
    for content in ("1", "2"):
        file.write_text(content)
        (folder / "weights").write_text(content)
        found |= {str(facts(adapter=path)) for path in (str(file), str(folder), {"poet": str(folder)}, [str(file)])}
    assert len(found) == 8
    others = ["a name of the hub", None, 3, "", "poet=", {"pinned": True}]
    assert content_of(others) == others
    assert content_of(f"poet={folder}") == content_of(str(folder))


def test_a_name_is_in_a_table_once() -> None:
    with pytest.raises(AssertionError, match="dtype"):
        ArgumentTable(in_name={"a": "dtype"}, files={}, covered={"b": "dtype"}, harmless={}, refused={})


class Kind(enum.Enum):
    ONE = 1


@dataclass
class Section:
    kind: Kind
    of_a_later_version: Any = None


class Slots:
    pass


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Kind.ONE, "ONE"),
        (Path("/x"), "/x"),
        ({3: {Path("b"), Path("a")}}, {"3": ["a", "b"]}),
        ((1, None, 2.5), [1, None, 2.5]),
        (Section(Kind.ONE), {"kind": "ONE"}),
        (Slots, f"{__name__}.Slots"),
        (partial(print), "functools.partial(<built-in function print>)"),
    ],
)
def test_values_are_told_in_the_same_way_in_every_process(value: Any, expected: Any) -> None:
    assert plain(value) == expected


def test_of_an_object_its_address_does_not_count() -> None:
    assert plain(Slots()) == plain(Slots())
