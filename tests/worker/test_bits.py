"""A row of a linear layer has the same bits in every batch of at least 16 rows, with several threads too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from prefixd.serving.models.worker_start import ENVIRONMENT

pytestmark = pytest.mark.slow

_PROGRAM = """
import torch
torch.manual_seed(0)
torch.set_num_threads(2)
for k, n in [(512, 1408), (1408, 512), (512, 272), (64, 96), (2048, 512)]:
    weights, rows = torch.randn(n, k) * 0.05, torch.randn(1024, k)
    sixteen = torch.nn.functional.linear(rows[:16], weights)
    for count in range(32, 1025, 16):
        if not torch.equal(torch.nn.functional.linear(rows[:count], weights)[:16], sixteen):
            print(k, n, count)
"""


def test_a_rows_bits_do_not_depend_on_the_batch_with_two_threads() -> None:
    """Fails without MKL_CBWR on machines where MKL splits sums."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_CBWR")}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env={**environment, **ENVIRONMENT}, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
