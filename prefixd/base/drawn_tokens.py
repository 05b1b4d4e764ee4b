"""Token ids drawn from what a block of tokens stands for, where its own ids do not tell."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def drawn_ids(tokens: npt.ArrayLike, facts: bytes) -> npt.NDArray[np.uint32]:
    """As many ids as there are `tokens`, drawn from them and from `facts` with SHAKE-256.

    Equal tokens and facts give equal ids; with n tokens, others give the same with a probability of 2^-16n at the most
    to somebody who searches for them.
    """
    ids = np.asarray(tokens, "<u4")
    digest = hashlib.shake_256(ids.tobytes())
    digest.update(facts)
    return np.frombuffer(digest.digest(4 * len(ids)), "<u4").astype(np.uint32)
