"""The encoded specs of namespaces in the index: in clear, or encrypted with the key of their tenant."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from prefixd_swap.errors import StorageError
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys
from prefixd_swap.sealing.sealed_objects import SEAL_BYTES, is_sealed, open_sealed, seal, sealed_key

if TYPE_CHECKING:
    from prefixd_swap.slab.index.index import SlabIndex

log = logging.getLogger(__name__)


class NamespaceSpecs:
    """Reads the specs of an index; `keys` decrypt them."""

    def __init__(self, index: SlabIndex, keys: RestKeys) -> None:
        self._index = index
        self._keys = keys

    def read(self) -> dict[bytes, bytes]:
        """The specs of all namespaces, by id. Without those that cannot be decrypted."""
        opened = {each: self.open(each, stored) for each, stored in self._index.namespaces().items()}
        return {each: spec for each, spec in opened.items() if spec is not None}

    def open(self, namespace: bytes, stored: bytes) -> bytes | None:
        """A spec as the index has it, decrypted; None if it cannot be, which is logged."""
        if not is_sealed(stored):
            return stored
        try:
            spec = np.empty(max(0, len(stored) - SEAL_BYTES), np.uint8)
            open_sealed(np.frombuffer(stored, np.uint8), self._keys, namespace, spec)
        except StorageError as error:
            log.error("namespace %s on disk is of no use: %s", namespace.hex(), error)
            return None
        return spec.tobytes()

    def changed(self, encryption: Mapping[bytes, RestKey | None]) -> dict[bytes, bytes]:
        """What the index should have where it has a spec otherwise than `encryption` says: None, in clear."""
        changed = {}
        for namespace, stored in self._index.namespaces().items():
            key = encryption.get(namespace)
            spec = self.open(namespace, stored) if namespace in encryption else None
            if spec is not None and sealed_key(stored) != (0 if key is None else key.id):
                changed[namespace] = stored_spec(namespace, spec, key)
        return changed


def stored_spec(namespace: bytes, spec: bytes, encryption: RestKey | None) -> bytes:
    """A spec as the index keeps it, encrypted if there is a key."""
    return spec if encryption is None else seal(np.frombuffer(spec, np.uint8), encryption, namespace).tobytes()
