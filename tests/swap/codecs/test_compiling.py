"""Compiled code is kept where a folder can be written, and made anew where none can."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from prefixd_swap.codecs.kernels import compiling
from prefixd_swap.codecs.warm_up import WarmUp
from prefixd_swap.errors import UnavailableCodecError
from tests.waiting import WAIT_S

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


def test_a_function_that_cannot_be_compiled_is_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above, that is a block without its codec, or one that cannot be read now: neither ends a daemon nor drops it."""
    errors: list[Exception] = []

    def add(number: int) -> int:
        return number + 1

    def refuse(function: Any, **_: Any) -> Any:
        def kernel(number: int) -> int:
            if errors:
                raise errors.pop(0)
            return int(function(number))

        return kernel

    monkeypatch.setattr("numba.njit", refuse)
    monkeypatch.setattr(compiling, "cut_short", threading.Event())
    call = compiling.compiled()(add)
    errors.append(AttributeError("a defect"))
    with pytest.raises(AttributeError, match="a defect"):
        call(1)
    errors += [OSError(24, "Too many open files"), ImportError("half of it")]
    with pytest.raises(MemoryError, match="cannot be compiled now: ImportError"):
        call(1)
    errors += [AttributeError("half of it"), AttributeError("half of it")]
    with pytest.raises(MemoryError, match="half of it"):
        call(1)
    assert call(1) == 2


def test_exact_needs_nothing_and_an_unknown_codec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    WarmUp(["exact"]).run()
    WarmUp([]).run()
    with pytest.raises(UnavailableCodecError, match="no codec 'fp8'"):
        WarmUp(["fp8"]).run()


@pytest.mark.slow
def test_warming_up_leaves_nothing_to_compile(tmp_path: Path) -> None:
    script = (
        "import numba.core.compiler as c; c.compile_extra = None\n"
        "from prefixd_swap.codecs.warm_up import WarmUp; WarmUp(['int8', 'k8v4'], ['bfloat16']).run(); print('done')"
    )
    assert run(script, tmp_path) == "done\n"


@pytest.mark.slow
def test_warming_up_ends_at_once_where_it_is_not_wanted_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the end of a daemon would wait for what it has just begun to compile."""
    compiled: list[str] = []
    monkeypatch.setattr("prefixd_swap.codecs.warm_up.use_all", lambda names, dtypes: compiled.extend(names))
    monkeypatch.setattr(sys, "executable", shutil.which("sleep"))
    started, popen = threading.Event(), subprocess.Popen

    def sleep(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        try:
            return popen([command[0], "1000"], **how)
        finally:
            started.set()

    monkeypatch.setattr(subprocess, "Popen", sleep)
    work = WarmUp(["lossless"])
    thread = threading.Thread(target=work.run)
    thread.start()
    assert started.wait(WAIT_S)
    work.end()
    thread.join(WAIT_S)
    assert not thread.is_alive() and not compiled
    work.run()  # begun when it had ended
    assert not compiled
