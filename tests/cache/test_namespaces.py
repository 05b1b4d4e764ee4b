"""Namespaces: one geometry a name, and no block shared between two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from prefixd.cache import (
    ChunkedWindowSpec,
    CrossAttentionSpec,
    NamespaceSpec,
    PartSpec,
    RecurrentStateSpec,
    RuleSpec,
    SlidingWindowSpec,
    VisionEmbeddingSpec,
)
from prefixd.cache.groups import (
    ChunkedWindow,
    CrossAttention,
    FullAttention,
    GroupRule,
    RecurrentState,
    SlidingWindow,
    VisionEmbedding,
)
from prefixd.cache.namespaces import NamespaceRegistry, namespace_id
from prefixd.cache.rule_specs import words_of
from prefixd.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from tests.cache.conftest import Rig

SPEC = NamespaceSpec("llama", 16, (PartSpec("kv", 0, 4096), PartSpec("kv", 1, 4096)), b"salt", "bfloat16", "token")

GEOMETRY = ("block_tokens", "parts", "dtype", "layout")


def changed(**fields: Any) -> NamespaceSpec:
    return msgspec.structs.replace(SPEC, **fields)


def test_registering_again_gives_the_same_namespace() -> None:
    registry = NamespaceRegistry()
    first, new = registry.register(SPEC)
    assert new
    assert registry.register(changed()) == (first, False)
    assert registry.get(first.id) is registry.at(first.ordinal) is first
    assert [first] == list(registry)
    assert (first.root, first.block_bytes) == (-1, 8192)


@pytest.mark.parametrize(
    ("field", "value", "ours", "theirs"),
    [
        ("block_tokens", 32, "16", "32"),
        ("dtype", "float16", "'bfloat16'", "'float16'"),
        ("layout", "layer", "'token'", "'layer'"),
        ("parts", (PartSpec("kv", 0, 512),), "[kv/0: 4096 B, kv/1: 4096 B]", "[kv/0: 512 B]"),
    ],
)
def test_a_disagreement_names_both_values(field: str, value: object, ours: str, theirs: str) -> None:
    registry = NamespaceRegistry()
    registry.register(SPEC)
    with pytest.raises(AlreadyExistsError) as error:
        registry.register(changed(**{field: value}))
    assert f"{field} {ours}, not {theirs}" in str(error.value)
    assert len(list(registry)) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "name is empty"),
        ({"name": "\u00e9" * 513}, "name has 1026 bytes; use at most 1024"),
        ({"salt": bytes(257)}, "salt has 257 bytes"),
        ({"dtype": "d" * 257}, "dtype has 257 bytes"),
        ({"layout": "l" * 257}, "layout has 257 bytes"),
        ({"parts": (PartSpec("g" * 257, 0, 1),)}, "group has 257 bytes"),
        ({"parts": (PartSpec("kv", 0, (1 << 40) + 1),)}, "at most 1099511627776"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"block_tokens": 65_537}, "65537"),
        ({"parts": ()}, "0 parts"),
        ({"parts": tuple(PartSpec("kv", rank, 1) for rank in range(1025))}, "1025 parts"),
        ({"parts": (PartSpec("kv", 0, 1), PartSpec("kv", 0, 2))}, "same group and rank"),
        ({"parts": (PartSpec("kv", 3, 0),)}, "'kv'/3 has 0 bytes"),
    ],
)
def test_a_spec_that_cannot_be_stored_is_refused(fields: dict[str, object], message: str) -> None:
    registry = NamespaceRegistry()
    with pytest.raises(InvalidArgumentError, match=message):
        registry.register(changed(**fields))
    assert not list(registry)


def test_salt_and_name_are_told_apart() -> None:
    specs = [changed(name="ab", salt=b"c"), changed(name="a", salt=b"bc"), changed(name="abc", salt=b"")]
    assert len({namespace_id(spec) for spec in specs}) == 3


def test_an_id_collision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.cache.namespaces.namespace_id", lambda spec: b"\0" * 8)
    registry = NamespaceRegistry()
    registry.register(SPEC)
    with pytest.raises(AlreadyExistsError, match=r"'other' collides with 'llama'"):
        registry.register(changed(name="other"))


def test_an_unknown_namespace_is_named() -> None:
    with pytest.raises(NotFoundError, match=r"0102030405060708 is not registered"):
        NamespaceRegistry().get(bytes(range(1, 9)))
    with pytest.raises(NotFoundError, match=r"\(empty\)"):
        NamespaceRegistry().get(b"")


async def test_tenants_with_different_salts_share_no_block(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    ours, theirs = rig.register("m", salt=b"1"), rig.register("m", salt=b"2")
    assert rig.cache.trie(ours) is rig.cache.trie(theirs), "one geometry, one trie"
    await rig.put([1, 2, 3], namespace=ours)
    assert await rig.get([1, 2, 3], namespace=ours) == 3
    assert await rig.get([1, 2, 3], namespace=theirs) == 0


async def test_namespaces_survive_a_restart_and_still_disagree(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(disk=8)
    rig.register("kept", parts=2)
    await rig.restart()
    with pytest.raises(AlreadyExistsError, match="'kept' is registered with parts"):
        rig.register("kept", parts=1)


@pytest.mark.parametrize(
    ("spec", "words", "rule"),
    [
        (None, "full attention", FullAttention()),
        (SlidingWindowSpec(33), "sliding window of 33 tokens", SlidingWindow(2)),
        (ChunkedWindowSpec(64), "chunks of 64 tokens", ChunkedWindow(64, 16)),
        (RecurrentStateSpec(), "recurrent state", RecurrentState()),
        (RecurrentStateSpec(32), "recurrent state, a checkpoint every 32 tokens", RecurrentState(2)),
        (CrossAttentionSpec(), "cross-attention to images in the first block", CrossAttention(1)),
        (CrossAttentionSpec(3), "cross-attention to images in the first 3 blocks", CrossAttention(3)),
        (VisionEmbeddingSpec(), "vision embedding", VisionEmbedding()),
    ],
    ids=str,
)
def test_every_rule_comes_back_from_disk(spec: RuleSpec | None, words: str, rule: GroupRule) -> None:
    namespace = changed(parts=(PartSpec("kv", 0, 4096, spec),))
    namespace.check()
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(namespace), type=NamespaceSpec)
    assert again == namespace and again.group_rules() == [rule] and words_of(spec) == words


def test_namespaces_that_an_earlier_version_wrote_are_read() -> None:
    window = {"group": "w", "rank": 1, "nbytes": 64, "rule": {"type": "sliding_window", "tokens": 9}}
    stored = {
        "name": "old",
        "block_tokens": 4,
        "parts": [{"group": "kv", "rank": 0, "nbytes": 64}, window],
        "salt": b"s",
        "dtype": "",
        "layout": "token",
    }
    parts = (PartSpec("kv", 0, 64), PartSpec("w", 1, 64, SlidingWindowSpec(9)))
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=NamespaceSpec)
    assert read == NamespaceSpec("old", 4, parts, b"s", "", "token")
    assert read.parts[1].rule is not None and msgspec.to_builtins(read)["parts"][1] == window


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (SlidingWindowSpec(0), "a sliding window of 0 tokens; it must be between 1 and 2147483648"),
        (ChunkedWindowSpec(0), "chunks of 0 tokens; it must be between 1 and 2147483648"),
        (ChunkedWindowSpec(1 << 32), "chunks of 4294967296 tokens"),
        (RecurrentStateSpec(24), "a checkpoint every 24 tokens; it must be a multiple of block_tokens (16)"),
        (RecurrentStateSpec(-16), "a checkpoint every -16 tokens"),
        (CrossAttentionSpec(0), "images in the first 0 blocks; it must be between 1 and 65536"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_is_refused(rule: RuleSpec, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        changed(parts=(PartSpec("kv", 1, 4096, rule),)).check()
    assert f"part 'kv'/1 has {message}" in str(error.value)


def test_images_do_not_share_a_namespace_with_text() -> None:
    parts = (PartSpec("kv", 0, 4096), PartSpec("vision", 0, 4096, VisionEmbeddingSpec()))
    with pytest.raises(InvalidArgumentError, match="part 'vision'/0 is a vision embedding and others are not"):
        changed(parts=parts).check()


def test_a_name_with_its_geometry_is_another_one_for_each_geometry() -> None:
    registry = NamespaceRegistry()
    others = [
        changed(block_tokens=32),
        changed(layout="layer"),
        changed(dtype="float32"),
        changed(parts=(PartSpec("kv", 0, 4096),)),
        changed(parts=(PartSpec("kv", 0, 4096, SlidingWindowSpec(32)), PartSpec("kv", 1, 4096))),
    ]
    for spec in (SPEC, *others):
        assert registry.register(spec.named_by_geometry)[1], spec
        assert not registry.register(changed(**{name: getattr(spec, name) for name in GEOMETRY}).named_by_geometry)[1]
    assert changed(salt=b"another").named_by_geometry.name == SPEC.named_by_geometry.name
