"""Finds a running request that computes what a waiting one needs: the waiting one then starts later and loads it."""

from __future__ import annotations

from collections.abc import Iterable

from prefixd.serving.request.request import Request


def computing_next_block(request: Request, computing: Iterable[Request]) -> Request | None:
    """The request of `computing` that will compute the block behind this one's cached prefix; None if none does.

    Called right before a waiting request is staged. `computing`: requests that still compute blocks of their prompts.
    """
    for other in computing:
        block = request.next_uncut(max(len(request.rows), len(other.rows))) - 1
        if block < min(request.usable_blocks, other.run.computes) and _same_prefix(request, other, block):
            return other
    return None


def keeps_state(request: Request, running: Iterable[Request]) -> bool:
    """Whether a running request will keep a state from which this one can resume.

    Without a state it has to compute those tokens itself, even if another request computes them as well.
    """
    for other in running:
        states = other.run.states
        for blocks in () if states is None else states.keep:
            if len(request.rows) < blocks <= request.usable_blocks and _same_prefix(request, other, blocks - 1):
                return True
    return False


def embeds_image(request: Request, running: Iterable[Request]) -> bool:
    """Whether a running request's next step fills frames with an image that this request needs.

    One that comes to the image later is not waited for: this request fills frames of its own.
    """
    kv = request.image_kv
    if kv is None:
        return False
    needed = kv.needed(len(request.rows) * request.trie.block_tokens)
    for other in running:
        holds = other.image_holds
        if holds is not None and holds.kv.namespace is kv.namespace and holds.keeping:
            reached = other.run.computed_tokens + other.kv.step_tokens
            if not holds.filling(reached).isdisjoint(needed):
                return True
    return False


def _same_prefix(request: Request, other: Request, block: int) -> bool:
    return (
        request.namespace is other.namespace
        and request.chain.block(block) == other.chain.block(block)  # cheaper than the keys, which have to be hashed
        and request.chain.key(block) == other.chain.key(block)
    )
