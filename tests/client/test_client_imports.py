"""An engine that installs the client must not load what the daemon needs, nor change its protobuf runtime for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import prefixd.client

WORKER = ("torch", "transformers", "tokenizers", "safetensors", "PIL", "cuda")
HEAVY = (*WORKER, "lmdb", "msgspec", "pydantic", "aiofiles", "zmq", "prometheus_client", "rich", "prefixd_swap")
DAEMON = ("prefixd.server", "prefixd.cache", "prefixd.serving", "prefixd.worker", "prefixd.settings", "prefixd.cli.")


def python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_loads_neither_torch_nor_the_daemon() -> None:
    loaded = python("import sys, prefixd.client; print(*sys.modules)").split()
    assert "prefixd.client.sync" in loaded
    assert [name for name in loaded if name.startswith((*HEAVY, "prefixd_scheduler", *DAEMON))] == []


@pytest.mark.slow
def test_the_command_line_loads_what_a_command_needs_only() -> None:
    """And answers --help at once. typer imports pydantic by itself, for types that it does not know."""
    loaded = python("import sys, prefixd.cli.app, prefixd.cli.connect; print(*sys.modules)").split()
    heavy = {name for name in HEAVY if name != "pydantic"}
    assert not heavy & {*loaded} and "prefixd.settings" not in loaded and "grpc" not in loaded


@pytest.mark.slow
def test_a_daemon_without_a_model_loads_nothing_of_the_worker() -> None:
    loaded = python("import sys, prefixd.server.daemon, prefixd.planner.sweep; print(*sys.modules)").split()
    assert "prefixd.serving.models.models" in loaded
    assert not {*WORKER} & {*loaded}


@pytest.mark.slow
def test_what_an_engines_connector_shares_with_the_daemon_loads_no_lmdb() -> None:
    loaded = python("import sys, prefixd_swap; print(*sys.modules)").split()
    assert not {*WORKER, "lmdb", "msgspec", "pydantic"} & {*loaded}


def test_public_names_exist() -> None:
    assert all(hasattr(prefixd.client, name) for name in prefixd.client.__all__)


@pytest.fixture(scope="module", params=["protobuf>=6.33,<7", "protobuf>=7,<8"])
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The major version of a protobuf runtime, and a directory with that runtime alone."""
    requirement: str = request.param
    directory = tmp_path_factory.mktemp("protobuf")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "10"]
    install = [*pip, "install", "--quiet", "--only-binary=:all:", "--no-deps", "--target", str(directory), requirement]
    # The caller's constraints pin one of the two.
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    try:
        done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False, timeout=100)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip has not installed {requirement} here within 100 s")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        pytest.skip(f"pip cannot install {requirement} here: {reason}")
    return requirement.removeprefix("protobuf>=")[0], directory


@pytest.mark.slow
def test_the_generated_code_works_with_the_protobuf_runtimes_that_engines_pin(runtime: tuple[str, Path]) -> None:
    major, directory = runtime
    path = os.pathsep.join([str(directory), *(entry for entry in sys.path if entry)])
    program = """if True:
        import google.protobuf
        from prefixd.client import Client, NamespaceSpec, PartSpec
        from prefixd.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, inference_pb2, inference_pb2_grpc
        spec = NamespaceSpec("model", 16, (PartSpec("full", 0, 4096),), salt=b"tenant")
        sent = cache_pb2.RegisterNamespaceRequest(namespace=spec.to_proto()).SerializeToString()
        got = cache_pb2.RegisterNamespaceRequest.FromString(sent).namespace
        print(google.protobuf.__version__, got.name, got.parts[0].nbytes, got.salt.decode())
    """
    version, *fields = python(program, PYTHONPATH=path).split()
    assert version.partition(".")[0] == major
    assert fields == ["model", "4096", "tenant"]
