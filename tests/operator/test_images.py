"""deploy/Dockerfile: a linter finds nothing, and its context has what the wheel is built from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from benchmarks.wheels import build_wheel
from tests.operator.programs import ROOT, run_program

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
