"""The keys that encrypt blocks at rest: those of one key file, and those of all tenants.

A key file has a key on each line. The first one encrypts what is written, all of them decrypt. So a key is replaced by
a new first line; its own line goes when no block is left under it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from prefixd_swap.errors import KeyFileError, MissingKeyError
from prefixd_swap.sealing.derived_keys import LEAST_SECRET_BYTES, derive_key

KEY_ID_BITS = 30
"""A key's id is below 2 ** KEY_ID_BITS, so that it fits beside the bytes of a part in the index."""


@dataclass(frozen=True, slots=True)
class RestKey:
    """One line of a key file.

    Attributes:
        id: from 1 on; a hash that does not reveal the key.
        objects: 32 bytes; the keys of objects are derived from it.
        records: 32 bytes; encrypts records of the index.
    """

    id: int
    objects: bytes = field(repr=False)
    records: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes) -> RestKey:
        """The key that a line of a key file stands for."""
        digest = derive_key(secret, b"prefixd disk key id")
        return cls(
            1 + int.from_bytes(digest[:8], "little") % ((1 << KEY_ID_BITS) - 1),
            derive_key(secret, b"prefixd disk objects"),
            derive_key(secret, b"prefixd disk records"),
        )

    @property
    def name(self) -> str:
        """The id in messages: "1f3a09bc"."""
        return key_name(self.id)


class RestKeys:
    """The keys of all tenants. Any thread may call it.

    All keys open what any tenant has: one that gets a key file of its own has blocks under the shared key.

    Args:
        shared: the keys of tenants without a key file, the one that encrypts first.
        tenants: the keys of those with one, likewise.

    Raises:
        KeyFileError: two keys have one id.
    """

    def __init__(
        self, shared: Sequence[RestKey] = (), tenants: Mapping[str, Sequence[RestKey]] = MappingProxyType({})
    ) -> None:
        opening: dict[int, RestKey] = {}
        holders: dict[int, list[str | None]] = {}
        for name, keys in [(None, shared), *tenants.items()]:
            for key in keys:
                if opening.setdefault(key.id, key) != key:
                    raise KeyFileError(f"two different keys have the id {key.name}; replace the newer one by another")
                holders.setdefault(key.id, []).append(name)
        firsts = {name: keys[0] for name, keys in tenants.items() if keys}
        self._keys = _Keys(shared[0] if shared else None, firsts, opening, holders)

    @property
    def empty(self) -> bool:
        """Whether there is no key."""
        return not self._keys.opening

    @property
    def shared(self) -> RestKey | None:
        """The key that encrypts what tenants without a key file of their own write; None: that is in clear."""
        return self._keys.shared

    def key_for(self, tenant: str) -> RestKey | None:
        """The key that encrypts what is written of a tenant; None: it is written in clear."""
        keys = self._keys
        return keys.tenants.get(tenant, keys.shared)

    def encrypting(self) -> set[int]:
        """Ids of the keys that encrypt what is written now, of any tenant."""
        keys = self._keys
        return {key.id for key in (keys.shared, *keys.tenants.values()) if key is not None}

    def holders(self, key_id: int) -> Sequence[str | None]:
        """The tenants whose key files have the key with this id; None: the file of those without one of their own."""
        return self._keys.holders.get(key_id, ())

    def find(self, key_id: int) -> RestKey:
        """The key with this id.

        Raises:
            MissingKeyError: there is none.
        """
        key = self._keys.opening.get(key_id)
        if key is None:
            raise MissingKeyError(
                f"the key {key_name(key_id)} is missing; put it back into its key file, as a line after the first"
            )
        return key

    def missing(self, key_ids: Iterable[int]) -> list[int]:
        """Those of `key_ids` for which there is no key, ascending."""
        return sorted(set(key_ids).difference(self._keys.opening))

    def replace(self, others: RestKeys) -> None:
        """Take the keys of `others` instead, for all later calls.

        A key that has encrypted until now still decrypts: a write under way may use it.
        """
        before, after = self._keys, others._keys
        used = {key_id: before.opening[key_id] for key_id in self.encrypting()}
        self._keys = _Keys(after.shared, after.tenants, {**used, **after.opening}, after.holders)


@dataclass(frozen=True, slots=True)
class _Keys:
    """What `RestKeys.replace` replaces at once."""

    shared: RestKey | None
    tenants: Mapping[str, RestKey]
    opening: Mapping[int, RestKey]
    holders: Mapping[int, Sequence[str | None]]


def parse_keys(content: bytes) -> tuple[RestKey, ...]:
    """The keys of a key file; white space around them and empty lines do not count.

    Raises:
        KeyFileError: there is no key, or a line is no key.
    """
    keys: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not (secret := line.strip()):
            continue
        if not (secret.isascii() and secret.decode("ascii").isprintable()):
            raise KeyFileError(f"line {number} is not text; write one with `openssl rand -hex 32`")
        if len(secret) < LEAST_SECRET_BYTES:
            raise KeyFileError(
                f"line {number} has {len(secret)} bytes, and a key needs {LEAST_SECRET_BYTES}; write one with `openssl "
                "rand -hex 32`"
            )
        if secret in keys:
            raise KeyFileError(f"line {number} has the key of line {keys[secret]} again; remove one of them")
        keys[secret] = number
    if not keys:
        raise KeyFileError("it has no key; write one with `openssl rand -hex 32`")
    return tuple(map(RestKey.derive, keys))


def key_name(key_id: int) -> str:
    """A key's id in messages: "1f3a09bc"."""
    return f"{key_id:08x}"
