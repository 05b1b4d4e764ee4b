"""What the ghosts estimate, as answers to operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.base.errors import NotFoundError, PreconditionError
from prefixd.cache.ghosts.ghosts import Ghosts
from prefixd.server.figures.ghost_figures import GhostFigures
from tests.rig import Rig


async def test_a_tenant_that_nobody_knows_is_no_tenant_without_prompts(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    cache = rig.cache
    figures = GhostFigures(cache, Ghosts(cache, "lru", 1 << 20), {})
    assert figures.answer("").ghosts.tiers and figures.answer("default").ghosts.asked_tokens == 0
    with pytest.raises(NotFoundError, match="there is no tenant 'defualt'"):
        figures.answer("defualt")
    with pytest.raises(PreconditionError, match=r"cache\.ghosts = false"):
        GhostFigures(cache, None, {}).answer("")
    await rig.close()
