"""Embeddings of images that were seen, by the digests of their content."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Features:
    """An image's embedding.

    rows: ``[rows, hidden]``.
    """

    rows: torch.Tensor


class FeatureStore:
    """Keeps the embeddings used last, as many as fit.

    An embedding depends on nothing but its image, so it serves every prompt, whatever stands before the image there.

    most_bytes: of all embeddings together. One that is larger alone is not kept.
    hits, misses: of `get`. nbytes: of what is kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, Features] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, digest: bytes) -> Features | None:
        """The embedding of the image with this digest, if it is kept."""
        features = self._kept.get(digest)
        if features is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(digest)
        return features

    def put(self, digest: bytes, features: Features) -> None:
        """Keep an embedding that is not kept yet, in place of those that were not used for the longest time."""
        if features.rows.nbytes > self._most_bytes:
            return
        self._kept[digest] = features
        self.nbytes += features.rows.nbytes
        while self.nbytes > self._most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.rows.nbytes
