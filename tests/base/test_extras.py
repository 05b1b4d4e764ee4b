"""Extras: what pyproject.toml installs is what is asked for, and who lacks it is told the command."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from prefixd.base.extras import EXTRAS, MissingExtraError, extra_of, require
from prefixd.cli.failures import CleanGroup

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "cuda-bindings": "cuda",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "pyzmq": "zmq",
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_the_modules_that_are_asked_for(extra: str) -> None:
    names = {requirement.partition(">")[0] for requirement in PROJECT["optional-dependencies"][extra]}
    others = {name for name in names if name.startswith("prefixd[")}
    modules = {MODULES.get(name, name) for name in names - others}
    for other in others:
        modules |= {*EXTRAS[other.removeprefix("prefixd[").removesuffix("]")]}
    assert modules == {*EXTRAS[extra]}


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    require("daemon", "prefixd serve")
    monkeypatch.setitem(sys.modules, "lmdb", None)
    require("daemon", "prefixd serve", "msgspec")
    with pytest.raises(MissingExtraError) as raised:
        require("worker", "prefixd demo")
    assert str(raised.value) == "prefixd demo: the package lmdb is missing; pip install 'prefixd[worker]'"


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("zmq.asyncio", "daemon"),
        ("torch", "worker"),
        ("obstore", "remote"),
        ("cryptography", "encryption"),
        ("nonsense", None),
    ],
)
def test_a_module_belongs_to_the_first_extra_that_has_it(module: str, extra: str | None) -> None:
    assert extra_of(module) == extra


@pytest.mark.parametrize(
    ("module", "line"),
    [("msgspec", "prefixd look: the package msgspec is missing; pip install 'prefixd[daemon]'\n"), ("nonsense", "")],
)
def test_a_command_ends_in_that_line(monkeypatch: pytest.MonkeyPatch, module: str, line: str) -> None:
    app = typer.Typer(cls=CleanGroup)
    app.callback()(lambda: None)

    @app.command("look")
    def _look() -> None:
        __import__(module)

    monkeypatch.setitem(sys.modules, module, None)
    done = CliRunner().invoke(app, ["look"], prog_name="prefixd")
    if line:
        assert (done.exit_code, done.stderr) == (2, f"prefixd: {line}")
    else:
        assert isinstance(done.exception, ModuleNotFoundError), "a defect of ours keeps its traceback"


@pytest.mark.parametrize("engine", ["vllm", "vllm.offloading"])
def test_a_connector_says_what_its_engines_environment_lacks(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    (vllm := ModuleType("vllm")).__version__ = "0.32.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "cuda", None)
    room = pytest.importorskip(f"prefixd.integrations.{engine}")
    with pytest.raises(MissingExtraError, match=r"cuda is missing; pip install 'prefixd\[vllm\]'"):
        getattr(room, room.__all__[-1])


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("tests/vllm/requirements.txt", ("vllm", "daemon")),
        ("tests/sglang/requirements.txt", ("sglang", "daemon")),
        ("benchmarks/peers_parts/requirements.txt", ("vllm", "daemon")),
    ],
)
def test_an_engines_environment_has_what_is_installed_without_dependencies(file: str, extras: tuple[str, ...]) -> None:
    """`make` installs prefixd there with --no-deps; the tests' daemons run there, too."""
    text = (ROOT / file).read_text()
    if (more := "-r ../../tests/vllm/requirements.txt") in text:
        text = text.replace(more, (ROOT / "tests/vllm/requirements.txt").read_text())
    there = {line.partition("=")[0].lower().replace("_", "-") for line in text.splitlines()}
    needed = [*PROJECT["dependencies"], *(each for extra in extras for each in PROJECT["optional-dependencies"][extra])]
    assert {requirement.partition(">")[0] for requirement in needed} <= there
