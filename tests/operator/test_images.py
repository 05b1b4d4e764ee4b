"""deploy/Dockerfile: a linter finds nothing, its context has what the wheel needs, and what it installs runs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.wheels import build_wheel, make_environment
from prefixd.client import Client
from tests.operator.pod import Container
from tests.operator.programs import ROOT, run_program
from tests.waiting import wait_until

DOCKERFILE = ROOT / "deploy/Dockerfile"


def test_hadolint_finds_nothing() -> None:
    done = run_program("hadolint", DOCKERFILE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_images_run_as_an_ordinary_user_from_pinned_bases() -> None:
    text = DOCKERFILE.read_text()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    images = {stage.split()[2]: stage for stage in stages if "COPY --from" in stage and "/opt/prefixd /opt" in stage}
    assert set(images) == {"client", "sidecar", "worker-cuda"}
    assert all("USER 10001:10001" in stage and stage.startswith("base AS") for stage in images.values())
    bases = set(re.findall(r"^ARG PYTHON=(\S+)", text, re.MULTILINE))
    assert bases and all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base) for base in bases)
    assert {stage.split()[0] for stage in stages} == {"${PYTHON}", "environment", "base"}


def test_the_context_has_what_the_wheel_needs(tmp_path: Path) -> None:
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    context = tmp_path / "wheel"
    context.mkdir()
    wheel = build_wheel(context, tmp_path)
    assert wheel.stat().st_size > 1 << 20


def installed(image: str) -> tuple[str, str]:
    """The extras that the Dockerfile installs into an image, as `daemon,otel`, and the image's last stage."""
    text = DOCKERFILE.read_text()
    step = re.search(rf"AS {image}-environment\nRUN \S*/pip install --constraint \S+ \"prefixd\[?([\w,]*)\]? @", text)
    stage = re.search(rf"^FROM base AS {image}\n(.*?)(?=^FROM |\Z)", text, re.DOTALL | re.MULTILINE)
    assert step is not None and stage is not None
    return step[1], stage[1]


def test_the_sidecars_environment_runs_as_its_user_on_a_read_only_root(folder: Path) -> None:
    """The image's steps that need no container runtime: the wheel with its extras, then the command as its user."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a read-only root needs root, and unshare of Debian's package util-linux")
    extras, stage = installed("sidecar")
    assert extras == "daemon,otel,remote" and stage.strip().endswith('CMD ["serve"]')
    folder.chmod(0o755)
    python = make_environment(folder / "prefixd", build_wheel(folder), extras)
    packages = {each.name for each in (folder / "prefixd").glob("lib/python*/site-packages/*")}
    assert {"prefixd", "lmdb", "obstore", "opentelemetry"} <= packages
    assert not {"torch", "transformers", "tokenizers", "PIL", "cuda"} & packages
    for name in ("run", "data"):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777)
    security = {"runAsUser": 10001, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    volumes = [f"{folder / 'run'}:/run/prefixd", f"{folder / 'data'}:/var/lib/prefixd"]
    variables = re.findall(r"(XDG_\w+=\S+)", DOCKERFILE.read_text())
    words = ["-u", "PYTHONPATH", *variables, python, "-m", "prefixd", "serve", "--cpu-bytes=4MiB", "--disk-bytes=16MiB"]
    daemon = Container({"securityContext": security}, volumes, words, folder / "log")
    try:
        ready = "prefixd is ready at unix:/run/prefixd/prefixd.sock"
        wait_until(lambda: ready in daemon.log.read_text() or not daemon.alive, daemon.log.read_text)
        assert daemon.alive, daemon.log.read_text()
        with Client(f"unix:{folder / 'run/prefixd.sock'}") as client:
            client.check_integrity()
        assert (folder / "data/prefixd/blocks").stat().st_uid == 10001
        daemon.terminate()
        assert daemon.wait(60) == 0, daemon.log.read_text()
    finally:
        daemon.kill()
