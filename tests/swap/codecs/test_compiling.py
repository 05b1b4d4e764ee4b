"""Compiled code is kept where a folder can be written, and made anew where none can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixd_swap.codecs.warm_up import warm_up
from prefixd_swap.errors import UnavailableCodecError

WARM = "from prefixd_swap.codecs.warm_up import use_all; use_all(['lossless', 'int8'], ['bfloat16']); print('done')"


def run(script: str, folder: Path) -> str:
    """What a fresh Python prints whose compiled code is to lie in `folder`."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_another_process_finds_what_one_has_compiled(tmp_path: Path) -> None:
    assert run(WARM, tmp_path) == "done\n"
    compiled = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nbc")}
    assert len(compiled) >= 5
    refuse = "import numba.core.compiler as c; c.compile_extra = None\n"  # whoever compiles would call it
    assert run(refuse + WARM, tmp_path) == "done\n"
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nbc")} == compiled


@pytest.mark.slow
def test_codecs_work_where_no_folder_can_be_written(tmp_path: Path) -> None:
    refuse = (
        "from numba.core.caching import _CacheLocator\n"
        "def refuse(self): raise PermissionError('read-only')\n"
        "_CacheLocator.ensure_cache_path = refuse\n"
    )
    assert run(refuse + WARM, tmp_path) == "done\n"
    assert not list(tmp_path.rglob("*.nbc"))


@pytest.mark.slow
def test_codecs_work_where_the_folder_is_full(tmp_path: Path) -> None:
    refuse = (
        "from numba.core.caching import IndexDataCacheFile\n"
        "def refuse(self, key, data): raise OSError(28, 'No space left on device')\n"
        "IndexDataCacheFile.save = refuse\n"
    )
    assert run(refuse + WARM, tmp_path) == "done\n"


def test_exact_needs_nothing_and_an_unknown_codec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    warm_up(["exact"])
    warm_up([])
    with pytest.raises(UnavailableCodecError, match="no codec 'fp8'"):
        warm_up(["fp8"])


@pytest.mark.slow
def test_warming_up_leaves_nothing_to_compile(tmp_path: Path) -> None:
    script = (
        "import numba.core.compiler as c; c.compile_extra = None\n"
        "from prefixd_swap.codecs.warm_up import warm_up; warm_up(['int8', 'k8v4'], ['bfloat16']); print('done')"
    )
    assert run(script, tmp_path) == "done\n"
