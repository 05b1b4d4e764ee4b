"""A release that lacks a name, or whose base class has a method that is not known, is told in one line."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from prefixd.base.errors import ConfigError
from prefixd.integrations.engine.contract import BaseClass, Contract

log = logging.getLogger("test.contract")


class Connector:
    """As an engine's base class is."""

    def __init__(self) -> None:
        self.role = "worker"

    def load(self) -> None: ...

    @classmethod
    def layout(cls) -> None: ...

    def _private(self) -> None: ...


@dataclass
class Step:
    """As what it hands over is."""

    tokens: int


def planted(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    """A release of an engine: `planted_engine.v1`."""
    module = ModuleType("planted_engine.v1")
    vars(module).update({"Connector": Connector, "Step": Step, **names})
    monkeypatch.setitem(sys.modules, "planted_engine", ModuleType("planted_engine"))
    monkeypatch.setitem(sys.modules, "planted_engine.v1", module)


def contract(*names: str, called: str = "load", known: str = "layout") -> Contract:
    base = BaseClass("planted_engine.v1:Connector", frozenset(called.split()), frozenset(known.split()))
    return Contract("Engine", "7.1", "6 to 7.0", frozenset(names), (base,))


WHOLE = ("planted_engine.v1:Step.tokens", "planted_engine.v1:Connector.role", "planted_engine.v1")


def test_a_release_with_everything(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    planted(monkeypatch)
    contract(*WHOLE).check(log)
    assert not caplog.records


def test_names_that_are_missing_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    gone = (
        "planted_engine.v1:Step.pages",
        "planted_engine.v1:Gone",
        "planted_engine.v2",
        "planted_engine.v1:Connector.job",
    )
    with pytest.raises(ConfigError) as error:
        contract(*WHOLE, *gone, called="load save").check(log)
    assert str(error.value) == (
        "Engine 7.1 lacks what prefixd needs of it: planted_engine.v1:Connector.job, planted_engine.v1:Connector.save, "
        "planted_engine.v1:Gone, planted_engine.v1:Step.pages, planted_engine.v2; install Engine 6 to 7.0, or a "
        "prefixd that is made for this release"
    )


def test_a_new_method_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Later(Connector):
        def restore(self) -> None: ...

        @property
        def needs_more(self) -> bool:
            return True

    planted(monkeypatch, Connector=Later)
    contract(*WHOLE).check(log)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "prefixd: Engine 7.1 calls methods that this prefixd does not know, and leaves at their defaults: "
        "Connector.needs_more, Connector.restore; it was tested with Engine 6 to 7.0"
    )
