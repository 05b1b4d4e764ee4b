"""Namespaces: the properties that must be equal for KV to be reusable, and its owner.

A namespace exists while it is used (by a session that has it open, a request, or a call) or a block of it is in any
tier. Then it is forgotten, and its ordinal is used again. If memory is short, the least recently used ones are
forgotten with their blocks (`namespace_room.py`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from weakref import ref

import msgspec

from prefixd.base.codec_names import CODEC_NAMES, LOSSY
from prefixd.base.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from prefixd.base.rules.rules import Rule, VisionEmbedding, to_fields
from prefixd.base.tenancy.tenants import COMMON, DEFAULT
from prefixd.cache.part_shapes import check_shape
from prefixd.cache.rules import MAX_GROUPS, GroupRule
from prefixd.cache.rules.in_blocks import in_blocks
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.padded_rows import PaddedRows

ID_BYTES = 8

_MAX_BLOCK_TOKENS = 65_536
_MAX_PARTS = 1_024
_MAX_PART_BYTES = 1 << 40
_MAX_NAME_BYTES = 1_024
_MAX_LABEL_BYTES = 256
_MAX_GROUP_BYTES = 64
_MAX_SPEC_BYTES = 16 << 10
_NAMESPACE_BYTES = 1536
_PART_BYTES = 192
_SHAPE_BYTES = 512
_TEXTS = 2  # the texts of the spec, and their encoding
_OF_IMAGES = "-images"


class PartSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bytes of a block that belong to one (KV group, tensor-parallel rank).

    `rule`: which part of a prefix the group's layers need; None for full attention.
    `rows`: how the `nbytes` bytes lie in the compute tier, if they are padded there.
    `shape`: how keys and values lie in the `nbytes` bytes; None: not known, so only lossless codecs apply.
    """

    group: str
    rank: int
    nbytes: int
    rule: Rule | None = None
    rows: PaddedRows | None = None
    shape: PartShape | None = None

    def fields(self) -> tuple[object, ...]:
        """The part in the namespace's identity. What an earlier version did not have is there only if it is set."""
        named = (self.group, self.rank, self.nbytes, self.rule)
        if (shape := self.shape) is not None:
            sizes = (shape.layers, shape.tokens, shape.heads, shape.channels)
            return (*named, self.rows, (shape.dtype, *sizes, shape.order))
        return named if self.rows is None else (*named, self.rows)


class NamespaceSpec(msgspec.Struct, frozen=True):
    """A namespace's identity: namespaces that differ in any field share no block.

    Attributes:
        name: identifies the computation, such as the model's fingerprint.
        block_tokens: tokens of a block.
        parts: the parts of a block.
        salt: separates users within a tenant; prompts with different salts share no block.
        dtype, layout: of the bytes.
        tenant: the owner.
        worker: the daemon's own workers fill it. A client never gets such a namespace, even with the same name.
        codec: how tiers that are read and written by calls store the blocks; "": as the settings say.
    """

    name: str
    block_tokens: int
    parts: tuple[PartSpec, ...]
    salt: bytes = b""
    dtype: str = ""
    layout: str = ""
    tenant: str = DEFAULT
    worker: bool = False
    codec: str = ""

    @property
    def geometry(self) -> tuple[object, ...]:
        """The format of a block."""
        return (self.block_tokens, self.parts, self.dtype, self.layout)

    @property
    def of_images(self) -> bool:
        """Whether its blocks are of images that prompts for one of the daemon's own models show; see `for_images`."""
        return self.worker and self.name.endswith(_OF_IMAGES)

    @property
    def of_prompts(self) -> str:
        """The name of the namespace of the prompts, itself unless it is for their images: "5f1e..."."""
        return self.name.removesuffix(_OF_IMAGES) if self.worker else self.name

    def for_images(self, block_tokens: int, part: PartSpec) -> NamespaceSpec:
        """The namespace for the images that its prompts show, of the same users. Its name: "5f1e...-images"."""
        return msgspec.structs.replace(self, name=self.name + _OF_IMAGES, block_tokens=block_tokens, parts=(part,))

    def shows(self, other: NamespaceSpec) -> bool:
        """Whether `other` is for the images that its prompts show, whatever the shape of a block there."""
        return other.of_images and other == self.for_images(other.block_tokens, other.parts[0])

    def group_rules(self) -> list[GroupRule]:
        """The rule of each part, counted in blocks."""
        return [in_blocks(part.rule, self.block_tokens) for part in self.parts]

    @property
    def who(self) -> tuple[str, str]:
        """Tenant and name: the labels `tenant` and `model` of measurements."""
        return self.tenant, self.name

    @property
    def may_be_common(self) -> bool:
        """Whether its blocks may become common to all tenants; a salt forbids it."""
        return not self.salt and self.tenant != COMMON

    @property
    def common(self) -> NamespaceSpec:
        """The spec of the common namespace for all tenants."""
        return msgspec.structs.replace(self, tenant=COMMON)

    def encoded(self) -> bytes:
        """All fields, with the length before each text and list, so that different specs have different encodings."""
        parts = [part.fields() for part in self.parts]
        owner = (self.tenant, self.worker)
        fields = (*owner, self.name, self.salt, self.block_tokens, self.dtype, self.layout, parts)
        codec = (self.codec,) if self.codec else ()
        return msgspec.msgpack.encode((*fields, *codec), enc_hook=to_fields)

    @property
    def nbytes(self) -> int:
        """Estimated memory of a namespace of this spec; measured in tests/cache/namespaces/test_namespace_room.py."""
        shapes = sum(part.shape is not None for part in self.parts)
        parts = _PART_BYTES * len(self.parts) + _SHAPE_BYTES * shapes
        return _NAMESPACE_BYTES + parts + _TEXTS * len(self.encoded())

    def check(self) -> None:
        """Raises InvalidArgumentError unless the spec can be stored."""
        if not self.name:
            raise InvalidArgumentError("namespace name is empty; pass the model's fingerprint")
        _check_text("namespace name", self.name, _MAX_NAME_BYTES)
        _check_length("salt", self.salt, _MAX_LABEL_BYTES)
        for what in ("dtype", "layout"):
            _check_text(what, getattr(self, what), _MAX_LABEL_BYTES)
        if not 1 <= self.block_tokens <= _MAX_BLOCK_TOKENS:
            raise InvalidArgumentError(
                f"block_tokens is {self.block_tokens}; it must be between 1 and {_MAX_BLOCK_TOKENS}"
            )
        check_part_count(len(self.parts))
        if len({(part.group, part.rank) for part in self.parts}) != len(self.parts):
            raise InvalidArgumentError("two parts of the namespace have the same group and rank; name each once")
        for part in self.parts:
            _check_text("part's group", part.group, _MAX_GROUP_BYTES)
            if not 1 <= part.nbytes <= _MAX_PART_BYTES:
                raise InvalidArgumentError(
                    f"part {part.group!r}/{part.rank} has {part.nbytes} bytes; it needs at least 1 and at most "
                    f"{_MAX_PART_BYTES}"
                )
            named = f"part {part.group!r}/{part.rank}"
            if part.rule is not None:
                part.rule.check(named, self.block_tokens)
            if part.shape is not None:
                check_shape(named, part.nbytes, part.rule, part.shape)
        self._check_codec()
        embeddings = [part for part in self.parts if isinstance(part.rule, VisionEmbedding)]
        if 0 < len(embeddings) < len(self.parts):
            raise InvalidArgumentError(
                f"part {embeddings[0].group!r}/{embeddings[0].rank} is a vision embedding and others are not; "
                "images are prompts of their own, give them a namespace of their own"
            )
        if len(rules := set(self.group_rules())) > MAX_GROUPS:
            raise InvalidArgumentError(
                f"the namespace's parts have {len(rules)} different rules; at most {MAX_GROUPS} are possible"
            )
        if (nbytes := len(self.encoded())) > _MAX_SPEC_BYTES:
            raise InvalidArgumentError(
                f"the namespace takes {nbytes} bytes with its {len(self.parts)} parts, and at most {_MAX_SPEC_BYTES} "
                "are possible; use shorter names of groups, or fewer parts"
            )

    def _check_codec(self) -> None:
        if self.codec and self.codec not in CODEC_NAMES:
            raise InvalidArgumentError(
                f"{self.codec!r} is no codec that this daemon knows; use one of {', '.join(CODEC_NAMES)}, or none"
            )
        if self.codec in LOSSY and all(part.shape is None for part in self.parts):
            raise InvalidArgumentError(
                f"the codec {self.codec} has to know how keys and values lie in the bytes, and no part has a shape; "
                "state the shape of a part, or use lossless"
            )


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Namespace:
    """A registered namespace. It stays registered while others have a reference to it.

    Attributes:
        id: 8 bytes, its name for clients and in the disk's index; equal to `digest`, unless an earlier version has
            stored it.
        digest: 8 bytes computed from its spec, the same in every daemon.
        ordinal: its number in this process; unique while it is registered.
        spec: its properties.
        common: the namespace of blocks that several tenants have computed (`common_blocks.py`), in the same trie and
            with the same keys; None if its blocks do not become common.
    """

    id: bytes
    digest: bytes
    ordinal: int
    spec: NamespaceSpec
    common: Namespace | None = None
    seed: int = field(init=False)
    """The seed of its block keys, the same as of the common namespace beside it."""
    root: int = field(init=False)
    """The parent of its first blocks in the trie."""

    def __post_init__(self) -> None:
        keyed_by = self.id if self.common is None else self.common.id
        object.__setattr__(self, "seed", int.from_bytes(keyed_by, "little"))
        object.__setattr__(self, "root", -1 - self.ordinal)

    def check_parts(self, parts: Sequence[int]) -> tuple[int, ...]:
        """The part indices in `parts` (empty: all); InvalidArgumentError for unknown or repeated ones."""
        have = len(self.spec.parts)
        if not parts:
            return tuple(range(have))
        if len(parts) > have:
            raise InvalidArgumentError(
                f"parts has {len(parts)} numbers; the namespace has {have} parts, name each once"
            )
        for part in parts:
            if not 0 <= part < have:
                raise InvalidArgumentError(f"part {part} does not exist; the namespace has parts 0 to {have - 1}")
        if len(set(parts)) != len(parts):
            raise InvalidArgumentError(f"parts {list(parts)} name one twice; name each once")
        return tuple(parts)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all parts."""
        return sum(part.nbytes for part in self.spec.parts)


class NamespaceRegistry:
    """All namespaces of this daemon.

    Args:
        with_common: each namespace without a salt has a common one beside it.
    """

    def __init__(self, *, with_common: bool = False) -> None:
        self._with_common = with_common
        self._by_digest: dict[bytes, Namespace] = {}
        self._by_id: dict[bytes, Namespace] = {}
        self._by_ordinal: list[Namespace | None] = []
        self._free: list[int] = []
        self._known: dict[int, None] = {}
        """Their ordinals, in the order in which `forget_unused` examines them."""
        self._of_tenant: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self._used: dict[str, dict[int, int]] = {}
        """Tenant -> ordinal -> estimated bytes of listed namespaces, the least recently used first."""
        self.nbytes = 0
        """Estimated memory of the listed namespaces."""

    def find(self, spec: NamespaceSpec) -> Namespace | None:
        """The registered namespace with this spec, if any."""
        known = self._by_digest.get(namespace_digest(spec))
        return known if known is not None and known.spec == spec else None

    def register(self, spec: NamespaceSpec, identity: bytes | None = None) -> Namespace:
        """Registers a new namespace, with the id under which it was stored, if it was.

        Raises:
            InvalidArgumentError: the spec is invalid.
            AlreadyExistsError: another namespace has the same digest or id.
        """
        spec.check()
        digest = namespace_digest(spec)
        identity = digest if identity is None else identity
        other = self._by_digest.get(digest) or self._by_id.get(identity)
        if other is not None:
            raise AlreadyExistsError(
                f"the id of namespace {spec.name!r} collides with that of {other.spec.name!r}; choose another name"
            )
        common = None
        if (
            self._with_common and spec.may_be_common and identity == digest
        ):  # else it has the keys of an earlier version
            common = self.find(spec.common) or self.register(spec.common)
        namespace = self._new(spec, identity, digest, common)
        self._list(namespace)
        return namespace

    def unlisted(self, spec: NamespaceSpec, identity: bytes | None = None) -> Namespace:
        """A namespace that other callers cannot find, for a request that must leave no blocks in the cache."""
        digest = namespace_digest(spec)
        return self._new(spec, digest if identity is None else identity, digest, None)

    def _new(self, spec: NamespaceSpec, identity: bytes, digest: bytes, common: Namespace | None) -> Namespace:
        if not self._free:
            self._free.append(len(self._by_ordinal))
            self._by_ordinal.append(None)
        namespace = Namespace(identity, digest, self._free.pop(), spec, common)
        self._by_ordinal[namespace.ordinal] = namespace
        self._known[namespace.ordinal] = None
        return namespace

    def forget_unused(self, has_blocks: Callable[[Namespace], bool], most: int) -> list[tuple[int, bytes]]:
        """Forgets namespaces without blocks and without other references; returns their ordinals and ids.

        Their ordinals are used again: no row has one, and no caller can enter such a row. Examines the `most`
        namespaces that were not examined for longest.
        """
        forgotten: list[tuple[int, bytes]] = []
        for ordinal in list(islice(self._known, most)):
            del self._known[ordinal]
            self._known[ordinal] = None
            namespace = self._by_ordinal[ordinal]
            assert namespace is not None, "known ordinals are namespaces'"
            blocks = has_blocks(namespace)
            del namespace
            if not blocks and (identity := self.forget(ordinal)) is not None:
                forgotten.append((ordinal, identity))
        return forgotten

    def forget(self, ordinal: int) -> bytes | None:
        """Forgets a namespace without blocks and returns its id; None if there are other references to it."""
        if self.is_used(ordinal):
            return None
        namespace = self.at(ordinal)
        identity = namespace.id
        if self._by_id.get(identity) is namespace:
            del self._by_digest[namespace.digest], self._by_id[identity]
            tenant = namespace.spec.tenant
            self._count(tenant, -1, -self._used[tenant].pop(ordinal))
        self._by_ordinal[ordinal] = None
        del self._known[ordinal]
        self._free.append(ordinal)
        return identity

    def is_used(self, ordinal: int) -> bool:
        """Whether there are references to the namespace outside of this registry. The caller must have none."""
        namespace = self.at(ordinal)
        identity, digest, spec, common = namespace.id, namespace.digest, namespace.spec, namespace.common
        listed = self._by_id.get(identity) is namespace
        if listed:
            del self._by_digest[digest], self._by_id[identity]
        self._by_ordinal[ordinal], elsewhere = None, ref(namespace)
        del namespace
        used = elsewhere()
        found = used or Namespace(identity, digest, ordinal, spec, common)
        self._by_ordinal[ordinal] = found
        if listed:
            self._by_digest[digest] = self._by_id[identity] = found
        return used is not None

    def touch(self, namespace: Namespace) -> None:
        """Makes it, and the common one beside it, the most recently used ones of their tenants."""
        for each in (namespace, namespace.common):
            if each is not None and each.ordinal in (order := self._used.get(each.spec.tenant, {})):
                order[each.ordinal] = order.pop(each.ordinal)

    def oldest(self, tenant: str, most: int) -> list[tuple[int, bytes]]:
        """Ordinals and ids of a tenant's namespaces, the least recently used first."""
        return [(ordinal, self.at(ordinal).id) for ordinal in islice(self._used.get(tenant, ()), most)]

    def bytes_of(self, tenant: str) -> int:
        """Estimated memory of a tenant's namespaces."""
        return self._bytes_of[tenant]

    def get(self, identity: bytes) -> Namespace:
        """The namespace with this id; NotFoundError when it is not known."""
        try:
            return self._by_id[identity]
        except KeyError:
            raise NotFoundError(
                f"namespace {identity.hex() or '(empty)'} is not registered; call RegisterNamespace first"
            ) from None

    def at(self, ordinal: int) -> Namespace:
        """The namespace with this ordinal, which a row has, so that it exists."""
        namespace = self.find_at(ordinal)
        assert namespace is not None, "a namespace that has blocks is not forgotten"
        return namespace

    def find_at(self, ordinal: int) -> Namespace | None:
        """The namespace with this ordinal, if there is one."""
        return self._by_ordinal[ordinal] if ordinal < len(self._by_ordinal) else None

    def ids(self) -> bytes:
        """All ids by ordinal, 8 bytes each; 0 for free ordinals."""
        return b"".join(bytes(ID_BYTES) if each is None else each.id for each in self._by_ordinal)

    def count(self, tenant: str) -> int:
        """The number of a tenant's namespaces."""
        return self._of_tenant[tenant]

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def counted(self) -> int:
        """The number of namespaces, except common ones beside others."""
        return len(self._by_id) - (self.count(COMMON) if self._with_common else 0)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(list(self._by_id.values()))

    def _list(self, namespace: Namespace) -> None:
        self._by_digest[namespace.digest] = self._by_id[namespace.id] = namespace
        tenant, nbytes = namespace.spec.tenant, namespace.spec.nbytes
        self._used.setdefault(tenant, {})[namespace.ordinal] = nbytes
        self._count(tenant, 1, nbytes)

    def _count(self, tenant: str, change: int, nbytes: int) -> None:
        self._of_tenant[tenant] += change
        self._bytes_of[tenant] += nbytes
        self.nbytes += nbytes


def namespace_digest(spec: NamespaceSpec) -> bytes:
    """8 bytes that identify a namespace in every daemon, by a cryptographic hash of its spec."""
    return hashlib.blake2b(spec.encoded(), digest_size=ID_BYTES).digest()


def _check_text(what: str, text: str, limit: int) -> None:
    _check_length(what, text.encode(), limit)
    if not text.isprintable():  # operators see it
        raise InvalidArgumentError(f"the {what} {text!r} has characters that cannot be printed; leave them out")


def check_part_count(count: int) -> None:
    """Raises InvalidArgumentError unless a namespace can have `count` parts."""
    if not 1 <= count <= _MAX_PARTS:
        raise InvalidArgumentError(f"namespace has {count} parts; it needs between 1 and {_MAX_PARTS}")


def _check_length(what: str, value: bytes, limit: int) -> None:
    if len(value) > limit:
        raise InvalidArgumentError(
            f"the {what} has {len(value)} bytes; use at most {limit}, a digest of it for example"
        )
