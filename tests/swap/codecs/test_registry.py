from __future__ import annotations

import builtins
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from prefixd_swap.codecs import registry
from prefixd_swap.codecs.registry import CODECS, find_codec
from prefixd_swap.errors import CodecShortageError, UnavailableCodecError


@pytest.mark.parametrize(("name", "number"), [("exact", 0), ("lossless", 1), ("int8", 2), ("k8v4", 3)])
def test_a_codec_is_found_by_name_and_by_the_number_that_is_on_disks(name: str, number: int) -> None:
    assert find_codec(name).name == name
    assert find_codec(name).number == number == CODECS[name]
    assert type(find_codec(number)) is type(find_codec(name))


@pytest.mark.parametrize("unknown", ["fp8", "", 4, -1])
def test_an_unknown_codec_is_refused_with_those_there_are(unknown: str | int) -> None:
    with pytest.raises(UnavailableCodecError, match=r"no codec .*; use one of exact, lossless, int8, k8v4"):
        find_codec(unknown)


def test_only_codecs_that_need_packages_import_them_and_name_what_is_missing() -> None:
    script = (
        "import sys, prefixd_swap.codecs.coding\n"
        "from prefixd_swap.codecs.registry import find_codec\n"
        "from prefixd_swap.errors import CodecShortageError, UnavailableCodecError\n"
        "find_codec('exact')\n"
        "assert not {'numba', 'zstandard'} & set(sys.modules)\n"
        "sys.modules['numba'] = None  # importing it fails\n"
        "for name in ('lossless', 'int8', 'k8v4'):\n"
        "    try: find_codec(name)\n"
        "    except UnavailableCodecError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    for name, line in zip(("lossless", "int8", "k8v4"), said.splitlines(), strict=True):
        assert line.startswith(f"codec {name}: a package is missing") and "pip install 'prefixd[codecs]'" in line


@pytest.mark.slow
def test_threads_that_ask_for_their_first_codecs_at_once_all_get_them() -> None:
    script = (
        "import sys, threading\n"
        "from prefixd_swap.codecs.registry import find_codec\n"
        "sys.setswitchinterval(0.0005)\n"
        "begin = threading.Barrier(6)\n"
        "def find(name):\n"
        "    begin.wait()\n"
        "    found.append(find_codec(name).name)\n"
        "names, found = ('lossless', 'int8', 'k8v4') * 2, []\n"
        "threads = [threading.Thread(target=find, args=(name,)) for name in names]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(*sorted(found))"
    )
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ran.stdout == "int8 int8 k8v4 k8v4 lossless lossless\n", ran.stderr


@pytest.fixture
def failing_imports(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Errors that imports of `lossless` raise, one after the other."""
    errors: list[Exception] = []

    def refuse(name: str, *rest: Any) -> Any:
        if name.endswith("codecs.lossless") and errors:
            raise errors.pop(0)
        return really(name, *rest)

    really = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(registry, "cut_short", threading.Event())  # not of this process
    find_codec.cache_clear()
    return errors


@pytest.mark.parametrize(
    "refusal",
    [
        OSError(24, "Too many open files"),
        MemoryError(),
        ImportError("libLLVM.so: cannot open shared object file: Too many open files"),
    ],
)
def test_an_import_that_a_shortage_cuts_short_is_not_tried_again(
    failing_imports: list[Exception], refusal: Exception
) -> None:
    """What is left of it would fail in any way, or work by half."""
    failing_imports.append(refusal)
    for _ in range(2):
        with pytest.raises(CodecShortageError, match=r"cut short.*start this process again"):
            find_codec("lossless")


def test_a_package_that_is_missing_is_no_shortage(failing_imports: list[Exception]) -> None:
    failing_imports.append(ImportError("Numba needs NumPy 2.3 or less"))
    with pytest.raises(UnavailableCodecError, match="Numba needs NumPy") as raised:
        find_codec("lossless")
    assert not isinstance(raised.value, CodecShortageError)


def test_nothing_is_imported_without_descriptors(
    monkeypatch: pytest.MonkeyPatch, failing_imports: list[Exception]
) -> None:
    failing_imports.append(AssertionError("imported"))
    opened: list[int] = []

    def open_few(path: str, flags: int) -> int:
        if len(opened) == 3:
            raise OSError(24, "Too many open files")
        opened.append(really(path, flags))
        return opened[-1]

    really = os.open
    with monkeypatch.context() as short:
        short.setattr(os, "open", open_few)
        with pytest.raises(CodecShortageError, match=r"Too many open files.*tried again"):
            find_codec("lossless")
    failing_imports.clear()
    assert find_codec("lossless").name == "lossless"
    for each in opened:
        with pytest.raises(OSError):
            os.fstat(each)
