"""Memory of large arrays is the system's again once they are gone."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from prefixd.base import heap

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from prefixd.base import heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] != "as it is":
    heap.keep_large_arrays_apart()
if sys.argv[1] == "reused":
    heap.reuse_large_arrays()
del (warm := [np.ones(31 << 20, np.uint8)])[:]  # from now on glibc would put arrays up to this size on its heap
before = resident()
arrays = [np.ones(8 << 20, np.uint8) for _ in range(20)]
kept = arrays[-1]
del arrays
after = resident()
heap.give_back()
print((after - before) >> 20, (resident() - before) >> 20)
"""


@pytest.mark.parametrize("how", ["apart", "reused", "as it is"])
@pytest.mark.slow
def test_freed_arrays_are_given_back(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    after, given_back = map(int, done.stdout.split())
    if how == "apart":
        assert after < 16, "8 MiB are used"
    else:
        assert after > 100, "the default has changed, and the setting is not needed"
    assert given_back < 16


def test_imports_are_not_visited_by_the_collector() -> None:
    before = gc.get_freeze_count()
    try:
        with heap.imports():
            assert not gc.isenabled()
            made = [[index] for index in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
        with pytest.raises(ImportError), heap.imports():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
