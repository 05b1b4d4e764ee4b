from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from prefixd_swap.vmem import create_memory
from prefixd_swap.vmem.backends.mapping_budget import PROCESS_MAPPINGS, kernel_limit

_EXHAUST = """
import json
from prefixd_swap.errors import OutOfMemoryError
from prefixd_swap.vmem import create_memory
from prefixd_swap.vmem.backends.mapping_budget import PROCESS_MAPPINGS, kernel_limit
count = kernel_limit()
with create_memory("cpu", 4096) as memory:
    memory.create(count)
    mapped = memory.reserve(count * 4096)
    most = PROCESS_MAPPINGS.limit - 8
    mapped.map(0, range(most - 1, -1, -1))  # backwards: no two neighbours merge
    said = ""
    try:
        mapped.map(most * 4096, range(count - 1, most - 1, -1))
    except OutOfMemoryError as error:
        said = str(error)
    memory.check_integrity()
    left = len(mapped.mapped_chunks())
    in_kernel = sum(1 for _ in open("/proc/self/maps"))
    mapped.map(most * 4096, range(most, count))
    mapped.unmap(0, count * 4096)
    print(json.dumps([said, left == most, in_kernel > most, PROCESS_MAPPINGS.used]))
"""


def test_running_out_of_mappings_names_the_limit_and_changes_nothing() -> None:
    if kernel_limit() > 300_000:
        pytest.skip("vm.max_map_count is so high here that reaching it would take too long")
    done = subprocess.run(
        [sys.executable, "-c", _EXHAUST],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said, unchanged, counted_right, used_in_the_end = json.loads(done.stdout)
    assert "sysctl vm.max_map_count" in said
    assert unchanged, "the refused call must leave what was mapped before, and nothing of its own"
    assert counted_right, "what is counted as a mapping is one for the kernel"
    assert used_in_the_end == 0


def test_the_budget_counts_what_the_kernel_merges_and_splits() -> None:
    before = PROCESS_MAPPINGS.used
    with create_memory("cpu", 4096) as memory:
        memory.create(16)
        mapped = memory.reserve(16 * 4096)
        counts = []
        for offset, chunks in ((0, [0]), (2, [2]), (1, [1]), (4, [9, 8]), (8, range(8))):
            mapped.map(offset * 4096, chunks)
            counts.append(PROCESS_MAPPINGS.used - before)
        mapped.unmap(10 * 4096, 4096)
        counts.append(PROCESS_MAPPINGS.used - before)
        # Borders between a mapping and what is beside it; three neighbours with consecutive ids are one
        # mapping.
        assert counts == [1, 3, 1, 4, 5, 7]
    assert PROCESS_MAPPINGS.used == before
