"""Namespaces: what must be equal for KV to be reusable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import xxhash

from prefixd.cache.groups import MAX_GROUPS, GroupRule
from prefixd.cache.rule_specs import RuleSpec, VisionEmbeddingSpec, rule_of, words_of
from prefixd.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError

_MAX_BLOCK_TOKENS = 65_536
_MAX_PARTS = 1_024
_MAX_PART_BYTES = 1 << 40
_MAX_NAME_BYTES = 1_024
_MAX_LABEL_BYTES = 256


class PartSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bytes of a block that belong to one (KV group, tensor-parallel rank).

    `rule`: which part of a prefix the group's layers need; None for full attention.
    """

    group: str
    rank: int
    nbytes: int
    rule: RuleSpec | None = None


class NamespaceSpec(msgspec.Struct, frozen=True):
    """Identity (`name`, `salt`) and geometry (the rest) of a namespace."""

    name: str
    block_tokens: int
    parts: tuple[PartSpec, ...]
    salt: bytes = b""
    dtype: str = ""
    layout: str = ""

    @property
    def geometry(self) -> tuple[object, ...]:
        """What has to agree between everyone who uses the name."""
        return (self.block_tokens, self.parts, self.dtype, self.layout)

    @property
    def named_by_geometry(self) -> NamespaceSpec:
        """The same under a name that ends in a digest of the geometry: whoever has another one gets another namespace.

        Example: "5f1e...-a81c09e2d4b7f630".
        """
        digest = xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self.geometry))
        return msgspec.structs.replace(self, name=f"{self.name}-{digest}")

    def group_rules(self) -> list[GroupRule]:
        """The rule of each part, counted in blocks."""
        return [rule_of(part.rule, self.block_tokens) for part in self.parts]

    def check(self) -> None:
        """Raises InvalidArgumentError unless the spec can be stored."""
        if not self.name:
            raise InvalidArgumentError("namespace name is empty; pass the model's fingerprint")
        _check_length("namespace name", self.name, _MAX_NAME_BYTES)
        for what in ("salt", "dtype", "layout"):
            _check_length(what, getattr(self, what), _MAX_LABEL_BYTES)
        if not 1 <= self.block_tokens <= _MAX_BLOCK_TOKENS:
            raise InvalidArgumentError(
                f"block_tokens is {self.block_tokens}; it must be between 1 and {_MAX_BLOCK_TOKENS}"
            )
        if not 1 <= len(self.parts) <= _MAX_PARTS:
            raise InvalidArgumentError(f"namespace has {len(self.parts)} parts; it needs between 1 and {_MAX_PARTS}")
        if len({(part.group, part.rank) for part in self.parts}) != len(self.parts):
            raise InvalidArgumentError("two parts of the namespace have the same group and rank; name each once")
        for part in self.parts:
            _check_length("part's group", part.group, _MAX_LABEL_BYTES)
            if not 1 <= part.nbytes <= _MAX_PART_BYTES:
                raise InvalidArgumentError(
                    f"part {part.group!r}/{part.rank} has {part.nbytes} bytes; it needs at least 1 and at most "
                    f"{_MAX_PART_BYTES}"
                )
            if part.rule is not None:
                part.rule.check(f"part {part.group!r}/{part.rank}", self.block_tokens)
        embeddings = [part for part in self.parts if isinstance(part.rule, VisionEmbeddingSpec)]
        if 0 < len(embeddings) < len(self.parts):
            raise InvalidArgumentError(
                f"part {embeddings[0].group!r}/{embeddings[0].rank} is a vision embedding and others are not; "
                "images are prompts of their own, give them a namespace of their own"
            )
        if len(rules := set(self.group_rules())) > MAX_GROUPS:
            raise InvalidArgumentError(
                f"the namespace's parts have {len(rules)} different rules; at most {MAX_GROUPS} are possible"
            )


@dataclass(frozen=True, slots=True)
class Namespace:
    """A registered namespace.

    `id` is 8 bytes, the same in every daemon; `seed` seeds its block keys; `ordinal` is its place in this process and
    `-1 - ordinal` stands as the parent of its first blocks in the trie.
    """

    id: bytes
    seed: int
    ordinal: int
    spec: NamespaceSpec

    @property
    def root(self) -> int:
        """The parent of first blocks."""
        return -1 - self.ordinal

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all parts."""
        return sum(part.nbytes for part in self.spec.parts)


class NamespaceRegistry:
    """All namespaces this daemon knows."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Namespace] = {}
        self._by_ordinal: list[Namespace] = []

    def register(self, spec: NamespaceSpec) -> tuple[Namespace, bool]:
        """The namespace for `spec`, and whether it is new.

        Raises:
            InvalidArgumentError: the spec itself is wrong.
            AlreadyExistsError: (name, salt) is registered with another geometry.
        """
        known = self._by_id.get(namespace_id(spec))
        if known is None:
            spec.check()
            identity = namespace_id(spec)
            namespace = Namespace(identity, int.from_bytes(identity, "little"), len(self._by_ordinal), spec)
            self._by_id[identity] = namespace
            self._by_ordinal.append(namespace)
            return namespace, True
        if (known.spec.name, known.spec.salt) != (spec.name, spec.salt):
            raise AlreadyExistsError(
                f"namespace id of {spec.name!r} collides with {known.spec.name!r}; choose another name"
            )
        for field in ("block_tokens", "parts", "dtype", "layout"):
            ours, theirs = getattr(known.spec, field), getattr(spec, field)
            if ours != theirs:
                raise AlreadyExistsError(
                    f"namespace {spec.name!r} is registered with {field} {_short(ours)}, not {_short(theirs)}; "
                    "use the registered geometry or another name"
                )
        return known, False

    def get(self, identity: bytes) -> Namespace:
        """The namespace with this id; NotFoundError when it was never registered."""
        try:
            return self._by_id[identity]
        except KeyError:
            raise NotFoundError(
                f"namespace {identity.hex() or '(empty)'} is not registered; call RegisterNamespace first"
            ) from None

    def at(self, ordinal: int) -> Namespace:
        """The namespace with this ordinal."""
        return self._by_ordinal[ordinal]

    def __contains__(self, spec: NamespaceSpec) -> bool:
        return namespace_id(spec) in self._by_id

    def __len__(self) -> int:
        return len(self._by_ordinal)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_ordinal)


def namespace_id(spec: NamespaceSpec) -> bytes:
    """8 bytes over (name, salt), length-prefixed so that no two pairs read the same."""
    name = spec.name.encode()
    return xxhash.xxh3_64_digest(len(name).to_bytes(8, "little") + name + spec.salt)


def _check_length(what: str, value: str | bytes, limit: int) -> None:
    length = len(value.encode() if isinstance(value, str) else value)
    if length > limit:
        raise InvalidArgumentError(f"the {what} has {length} bytes; use at most {limit}, a digest of it for example")


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_short_part(part) for part in value if isinstance(part, PartSpec)) + "]"
    return repr(value)


def _short_part(part: PartSpec) -> str:
    rule = "" if part.rule is None else f", {words_of(part.rule)}"
    return f"{part.group}/{part.rank}: {part.nbytes} B{rule}"
