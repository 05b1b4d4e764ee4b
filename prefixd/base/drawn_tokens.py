"""Token ids that stand for a block's tokens and for further facts, for blocks that depend on more than their tokens."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def drawn_ids(tokens: npt.ArrayLike, facts: bytes) -> npt.NDArray[np.uint32]:
    """Returns as many ids as there are `tokens`, drawn from them and from `facts` with SHAKE-256.

    Equal tokens and facts give equal ids. With n tokens, an attacker who searches for other tokens or facts with the
    same ids succeeds with a probability of at most 2^-16n.
    """
    ids = np.asarray(tokens, "<u4")
    digest = hashlib.shake_256(ids.tobytes())
    digest.update(facts)
    return np.frombuffer(digest.digest(4 * len(ids)), "<u4").astype(np.uint32)
