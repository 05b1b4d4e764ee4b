from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

from prefixd.client import NamespaceSpec, PartSpec
from prefixd.integrations.vllm.link import Link
from prefixd.integrations.vllm.lookups import Lookups
from prefixd.integrations.vllm.seen import SeenPrefix
from prefixd_scheduler import Distance

SPEC = NamespaceSpec("model", 16, (PartSpec("full", 0, 64),))
CACHED = SeenPrefix.of([Distance.CPU], 16)


class SilentLink:
    """A line on which the test answers."""

    up = True
    timeout_s = 1.0

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []

    def start(self, work: Callable[[], Any], timeout_s: float | None = None) -> Future[Any]:
        self.asked.append(Future())
        return self.asked[-1]

    def answer(self) -> int:
        """Answers all that was asked; how much that was."""
        asked, self.asked = self.asked, []
        for future in asked:
            future.set_result(CACHED)
        return len(asked)


def test_old_answers_are_renewed_a_few_at_a_time() -> None:
    now_s = 0.0
    link = SilentLink()
    lookups = Lookups(cast(Link, link), 16, 64, 0, None, lambda: now_s)
    names = [str(number) for number in range(50)]
    for name in names:
        lookups.add(name, SPEC, [5] * 32)
    assert link.answer() == 50, "a request that is new is asked about at once"

    def all_seen() -> bool:
        return all([lookups.seen(name) == CACHED for name in names])

    assert all_seen() and not link.asked
    now_s = 10.0
    assert all_seen()
    renewed = len(link.asked)
    assert 0 < renewed < 10
    assert all_seen() and len(link.asked) == renewed, "no more until they are answered"
    rounds = 0
    while (answered := link.answer()) > 0:
        assert answered == renewed or rounds == 50 // renewed
        rounds += 1
        all_seen()
    assert rounds == -(-50 // renewed), "each was asked about once more"
