"""A thread that steps back leaves the others as they are."""

from __future__ import annotations

import os
import sys

import pytest

from prefixd.serving.text.tokenizer_threads import step_back
from prefixd_swap import started_threads


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_a_thread_steps_back_alone() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with started_threads(1, "behind", step_back) as behind, started_threads(1, "beside") as beside:
        nice = [pool.submit(os.getpriority, os.PRIO_PROCESS, 0).result() for pool in (behind, beside)]
    assert nice == [10, before] and os.getpriority(os.PRIO_PROCESS, 0) == before
