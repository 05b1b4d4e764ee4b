"""Which bytes the likely lengths need, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixd.integrations.engine.saving.resume_points import ResumePoints


@given(
    prompt=st.integers(0, 60),
    branch=st.integers(0, 60),
    every=st.integers(0, 6),
    span=st.integers(1, 9),
    block=st.integers(0, 70),
)
def test_a_block_is_needed_where_a_point_needs_it(prompt: int, branch: int, every: int, span: int, block: int) -> None:
    points = ResumePoints(prompt, every, branch)
    inside = range(every * span, prompt + 1, every * span) if every else ()
    lengths = {prompt, branch, *inside}
    needed = every == 1 or any(block in range(length - span, length) for length in lengths)
    assert points.need(block, span) == needed
    assert (block in points) == (every == 1 or block in (prompt, branch))
