"""Cached blocks that a run has used and whose values may not be finite.

No token can be chosen from logits that are not finite. Of a run that used cached blocks, or another run's, those may be
the reason: it is run again without, and leaves nothing in the cache then. If that gives a token, they were the reason:
they are refused (`RefusedBlocks`). If it does not, the model is, and they stay.
"""

from __future__ import annotations

from prefixd.cache import TieredCache
from prefixd.server.request import Request
from prefixd.server.run import Suspect


def suspects_of(request: Request) -> list[Suspect]:
    """The first block of each prefix that a request holds, or will load, when it is handed over."""
    behind = () if request.beside is None else request.beside.rows[:1].tolist()
    found = [(request.trie, row) for row in request.rows[:1].tolist() or behind]
    if (images := request.image_holds) is not None:
        found += [(images.kv.trie, row) for row in images.first_rows]
    return [Suspect(trie, row, int(trie.generation[row])) for trie, row in found]


def refuse(cache: TieredCache, request: Request) -> None:
    """A request has its tokens now that it runs without what it used before."""
    suspects, request.suspects = request.suspects, []
    for suspect in suspects:
        cache.refused.refuse(suspect.trie, suspect.row, suspect.generation)
