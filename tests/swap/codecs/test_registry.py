from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

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


def test_a_shortage_is_no_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *rest: Any) -> Any:
        if name.endswith("codecs.lossless"):
            raise OSError(24, "Too many open files")
        return really(name, *rest)

    really = builtins.__import__
    find_codec.cache_clear()
    with monkeypatch.context() as short:
        short.setattr(builtins, "__import__", refuse)
        with pytest.raises(CodecShortageError, match="cannot be loaded now"):
            find_codec("lossless")
    assert find_codec("lossless").name == "lossless", "and it is tried again"
