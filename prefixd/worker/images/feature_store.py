"""Keeps embeddings of images, by the digests of their content."""

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
    """Keeps the most recently used embeddings of each tenant, as many as fit.

    An embedding depends only on its image, so it serves every prompt of its tenant, whatever stands before the image.
    When room is short, the tenant with most bytes loses its least recently used embedding: a tenant with no more than
    an even share loses nothing to others.

    most_bytes: of all embeddings together. A larger one is not kept.
    hits, misses: of `get`. nbytes: of the kept embeddings.
    """

    def __init__(self, most_bytes: int) -> None:
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._kept: dict[str, OrderedDict[bytes, Features]] = {}
        self._bytes: dict[str, int] = {}  # by tenant

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def get(self, tenant: str, digest: bytes) -> Features | None:
        """The embedding of a tenant's image with this digest, if it is kept."""
        kept = self._kept.get(tenant)
        features = None if kept is None else kept.get(digest)
        if kept is None or features is None:
            self.misses += 1
            return None
        self.hits += 1
        kept.move_to_end(digest)
        return features

    def put(self, tenant: str, digest: bytes, features: Features) -> None:
        """Keep an embedding that is not kept yet."""
        if features.rows.nbytes > self._most_bytes:
            return
        self._kept.setdefault(tenant, OrderedDict())[digest] = features
        self._count(tenant, features.rows.nbytes)
        while self.nbytes > self._most_bytes:
            largest = max(self._bytes, key=lambda name: (self._bytes[name], name == tenant))
            _, dropped = self._kept[largest].popitem(last=False)
            self._count(largest, -dropped.rows.nbytes)

    def _count(self, tenant: str, nbytes: int) -> None:
        self.nbytes += nbytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + nbytes
        if not self._kept[tenant]:
            del self._kept[tenant], self._bytes[tenant]
