"""Namespaces: what tells them apart, how long they live, and no block shared between two of them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixd.base.errors import (
    AlreadyExistsError,
    ExhaustedError,
    InvalidArgumentError,
    NotFoundError,
    PreconditionError,
)
from prefixd.base.rules import rules
from prefixd.base.tenancy.tenants import Quota, Tenants
from prefixd.cache import (
    BlockChain,
    NamespaceSpec,
    PartSpec,
    TieredCache,
    Trie,
)
from prefixd.cache.namespaces import NamespaceRegistry, namespace_digest
from prefixd.cache.options import CacheOptions
from prefixd.cache.rules import (
    ChunkedWindow,
    CrossAttention,
    FullAttention,
    GroupRule,
    RecurrentState,
    SlidingWindow,
    VisionEmbedding,
)
from prefixd_swap import NewBlock, Span
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.padded_rows import PaddedRows
from tests.rig import OpenCache, Rig
from tests.tries import forget_blocks

SPEC = NamespaceSpec("llama", 16, (PartSpec("kv", 0, 4096), PartSpec("kv", 1, 4096)), b"salt", "bfloat16", "token")


SHAPE = PartShape("bfloat16", 2, 16, 4, 8, ("layer", "kv", "token", "head", "channel"))
OTHER_ORDER = PartShape("bfloat16", 2, 16, 4, 8, ("token", "layer", "kv", "head", "channel"))


def changed(**fields: Any) -> NamespaceSpec:
    return msgspec.structs.replace(SPEC, **fields)


def test_registering_again_gives_the_same_namespace() -> None:
    registry = NamespaceRegistry()
    first = registry.register(SPEC)
    assert registry.find(changed()) is first
    assert registry.get(first.id) is registry.at(first.ordinal) is first
    assert [first] == list(registry)
    assert (first.root, first.block_bytes) == (-1, 8192)


OTHERS = [
    {"name": "mistral"},
    {"salt": b"another"},
    {"block_tokens": 32},
    {"dtype": "float16"},
    {"layout": "layer"},
    {"parts": (PartSpec("kv", 0, 512),)},
    {"parts": (PartSpec("kv", 0, 4096, rows=PaddedRows(512, 256, 8192)),)},
    {"parts": (PartSpec("kv", 0, 4096, rules.SlidingWindow(32)), PartSpec("kv", 1, 4096))},
    {"tenant": "another"},
    {"worker": True},
    {"parts": (PartSpec("kv", 0, 4096, shape=SHAPE), PartSpec("kv", 1, 4096))},
    {"parts": (PartSpec("kv", 0, 4096, shape=OTHER_ORDER), PartSpec("kv", 1, 4096))},
    {"codec": "exact"},
    {"codec": "lossless"},
]


@pytest.mark.parametrize("fields", OTHERS, ids=lambda fields: next(iter(fields)))
def test_who_differs_in_anything_has_another_namespace(fields: dict[str, object]) -> None:
    """A name that is taken, by whatever geometry, shuts nobody out; and nobody can name what another fills."""
    registry = NamespaceRegistry()
    first = registry.register(SPEC)
    assert registry.find(changed(**fields)) is None
    other = registry.register(changed(**fields))
    assert other.id != first.id and other.ordinal != first.ordinal and other.seed != first.seed
    assert registry.find(SPEC) is first and registry.find(changed(**fields)) is other


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "name is empty"),
        ({"name": "\u00e9" * 513}, "name has 1026 bytes; use at most 1024"),
        ({"name": "model\x1b[2J"}, "name 'model.x1b.2J' has characters that cannot be printed"),
        ({"dtype": "a\nb"}, "dtype 'a.nb' has characters that cannot be printed"),
        ({"layout": "\u202e"}, "layout '.u202e' has characters that cannot be printed"),
        ({"parts": (PartSpec("\0", 0, 1),)}, "group '.x00' has characters that cannot be printed"),
        (
            {"parts": tuple(PartSpec("group of a part", rank, 1) for rank in range(1024))},
            r"takes 2\d+ bytes with its 1024 parts, and at most 16384",
        ),
        ({"salt": bytes(257)}, "salt has 257 bytes"),
        ({"dtype": "d" * 257}, "dtype has 257 bytes"),
        ({"layout": "l" * 257}, "layout has 257 bytes"),
        ({"parts": (PartSpec("g" * 65, 0, 1),)}, "group has 65 bytes"),
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


def test_as_many_parts_as_may_be_fit() -> None:
    changed(parts=tuple(PartSpec("kv", rank, 1 << 20) for rank in range(1024))).check()


def test_salt_and_name_are_told_apart() -> None:
    specs = [
        changed(name="ab", salt=b"c"),
        changed(name="a", salt=b"bc"),
        changed(name="abc", salt=b""),
        changed(name="a", salt=b"", tenant="defaultb"),
        changed(dtype="bfloat16token", layout=""),
    ]
    assert len({namespace_digest(spec) for spec in specs}) == 5


def test_an_id_collision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.cache.namespaces.namespace_digest", lambda spec: b"\0" * 8)
    registry = NamespaceRegistry()
    registry.register(SPEC)
    assert registry.find(changed(name="other")) is None
    with pytest.raises(AlreadyExistsError, match=r"'other' collides with that of 'llama'"):
        registry.register(changed(name="other"))


def forget(registry: NamespaceRegistry, *with_blocks: int, most: int = 100) -> list[int]:
    forgotten = registry.forget_unused(lambda namespace: namespace.ordinal in with_blocks, most)
    return [ordinal for ordinal, _ in forgotten]


def test_a_namespace_is_forgotten_when_nobody_uses_it_and_no_block_of_it_is_left() -> None:
    registry = NamespaceRegistry()
    held = registry.register(SPEC)
    for name in ("with blocks", "unused"):
        registry.register(changed(name=name, tenant="t"))
    assert forget(registry, 1) == [2]
    assert (len(registry), registry.count("t"), registry.count(SPEC.tenant)) == (2, 1, 1)
    assert registry.find(SPEC) is held and registry.get(held.id) is registry.at(0) is held
    assert registry.find(changed(name="unused", tenant="t")) is None
    again = registry.register(changed(name="third"))
    assert again.ordinal == 2, "its ordinal is given to another one"
    assert forget(registry) == [1] and registry.find_at(1) is None
    del held
    assert forget(registry) == [0] and list(registry) == [again]


def test_only_some_are_looked_at_at_a_time_and_each_in_its_turn() -> None:
    registry = NamespaceRegistry()
    for number in range(10):
        registry.register(changed(name=f"{number}"))
    assert forget(registry, 0, 1, 2, most=4) == [3]
    assert forget(registry, *range(4, 8), most=4) == []
    assert forget(registry, most=4) == [8, 9, 0, 1]


def test_an_unlisted_namespace_is_found_by_nobody_and_keeps_its_ordinal_while_it_is_used() -> None:
    registry = NamespaceRegistry()
    unlisted = registry.unlisted(SPEC)
    assert registry.find(SPEC) is None and unlisted.id not in registry and not list(registry)
    listed = registry.register(SPEC)
    assert listed.ordinal != unlisted.ordinal
    assert forget(registry) == [] and registry.at(unlisted.ordinal) is unlisted and registry.find(SPEC) is listed
    ordinal = unlisted.ordinal
    del unlisted
    assert forget(registry) == [ordinal] and registry.find(SPEC) is listed


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


async def test_a_namespace_is_on_disk_while_a_block_of_it_is(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(disk=8)
    rig.register("empty")
    kept, gone = rig.register("kept", parts=2), rig.register("gone")
    assert rig.store is not None and not rig.store.namespaces(), "nothing is stored before a first block"
    await rig.put([1, 2], namespace=kept, durable=True)
    await rig.put([1, 2], namespace=gone, durable=True)
    assert rig.store.namespaces().keys() == {kept.id, gone.id}
    await forget_blocks(rig.cache.mover, rig.cache.trie(gone), rig.rows([1, 2], gone)[::-1])
    rig.cache.registration.forget_unused()
    await rig.cache.mover.quiesce()
    assert rig.store.namespaces().keys() == {kept.id, gone.id}, "it is in use"
    identity = gone.id
    del gone
    rig.cache.registration.forget_unused()
    await rig.cache.mover.quiesce()
    assert rig.store.namespaces().keys() == {kept.id} and identity not in rig.cache.namespaces
    await rig.restart()
    assert [namespace.id for namespace in rig.cache.namespaces] == [kept.id, rig.namespace.id]
    assert rig.register("kept", parts=2).id == kept.id and await rig.get([1, 2], namespace=rig.register("kept", 2)) == 2
    again = rig.register("gone")
    assert await rig.put([1, 2], namespace=again, durable=True) == (2, 0)
    assert rig.store.namespaces().keys() == {kept.id, identity}


async def test_namespaces_without_blocks_leave_the_disk_at_a_restart(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(disk=8)
    assert rig.store is not None
    rig.store.put_namespace(b"no block", msgspec.msgpack.encode(changed()))
    rig.store.put_namespace(b"no sense", b"?")
    await rig.put([1], durable=True)
    await rig.restart()
    assert rig.store.namespaces().keys() == {rig.namespace.id} and rig.restored == 1


async def test_a_namespace_keeps_the_id_under_which_an_earlier_version_stored_it(make_rig: Callable[..., Rig]) -> None:
    """Who registers it finds its blocks, though its id would be another one now."""
    rig = make_rig(disk=8, cpu=8)
    assert rig.store is not None
    spec = {**msgspec.to_builtins(rig.namespace.spec, builtin_types=(bytes,)), "name": "old"}
    del spec["tenant"], spec["worker"]
    rig.store.put_namespace(b"old hash", msgspec.msgpack.encode(spec))
    chain = BlockChain(np.repeat(np.array([1], "<u4"), 2).tobytes(), 2, int.from_bytes(b"old hash", "little"))
    data = np.zeros(rig.part_bytes, np.uint8)
    block = NewBlock(b"old hash", chain.key(0), b"", chain.block(0), 0, [Span(data.ctypes.data, data.nbytes)])
    assert rig.store.write([block])
    await rig.restart()
    old = rig.register("old")
    assert (rig.restored, old.id, old.digest) == (1, b"old hash", namespace_digest(old.spec))
    assert len(rig.rows([1], old)) == 1


async def test_nothing_of_a_namespace_that_was_forgotten_is_found_under_its_ordinal(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(cpu=16)
    for turn in range(5):
        home = rig.register(f"{turn}")
        assert home.ordinal == 1, "the one before was forgotten"
        assert rig.rows([1, 2], home) == []
        assert await rig.put([1, 2], namespace=home) == (2, 0)
        rig.check()
        await forget_blocks(rig.cache.mover, rig.cache.trie(home), rig.rows([1, 2], home)[::-1])
        del home
        rig.cache.registration.forget_unused()


async def test_a_trie_that_no_namespace_uses_gets_another_geometry(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=16, disk=16)
    for turn in range(6):
        home = rig.register("m", parts=1 + turn % 3, nbytes=4096 << turn % 2)
        trie = rig.cache.trie(home)
        assert await rig.put([turn, 2], namespace=home, durable=turn % 2 == 0) == (2, 0)
        assert await rig.get([turn, 2], namespace=home) == 2
        rig.check()
        rows = rig.rows([turn, 2], home)
        generations = trie.generation[rows].tolist()
        await forget_blocks(rig.cache.mover, trie, rows[::-1])
        assert trie.generation[rows].tolist() == [each + 1 for each in generations]
        await rig.check_disk()
        del home
        rig.cache.registration.forget_unused()
    assert len(rig.cache.tries) <= 2 + 1, "those of the rig, of a new one, and of one that is forgotten then"


def test_a_trie_with_blocks_keeps_its_geometry() -> None:
    trie = Trie(1, (1,))
    trie.insert_path(-1, 0, np.zeros((1, 16), np.uint8), np.zeros((1, 1), np.uint32), 0.0)
    with pytest.raises(RuntimeError, match="trie 0 cannot get another geometry: it has 1 blocks"):
        trie.reshape(2, (1,), [FullAttention()])


def limited(most: int, quota: int | None = None) -> TieredCache:
    """A cache that has room for as many namespaces as `changed(name="0")`."""
    tenants = Tenants({"t": Quota(namespaces=quota)})
    options = CacheOptions(namespace_bytes=most * changed(name="0").nbytes + 100)
    return OpenCache(cpu_bytes=1 << 16, options=options, tenants=tenants).cache


def test_the_limits_count_namespaces_in_use_and_say_whose_they_are() -> None:
    cache = limited(5, quota=3)
    for number in range(100):
        cache.register(changed(name=f"unused {number}", tenant="t"))
    held = [cache.register(changed(name=f"{number}", tenant="t")) for number in range(3)]
    with pytest.raises(ExhaustedError, match=r"tenant t: 3 of 3 namespaces .*tenants\.t\.namespaces"):
        cache.register(changed(name="one more", tenant="t"))
    assert cache.register(changed(name="1", tenant="t")) is held[1], "those that it has it may register again"
    held += [cache.register(changed(name=f"{number}")) for number in range(2)]
    with pytest.raises(ExhaustedError, match=r"tenant default: 5 namespaces .*server\.namespace_bytes"):
        cache.register(changed(name="one more"))
    assert cache.tenants.known("t").refused == {"namespaces": 1}
    del held[0]
    assert cache.register(changed(name="one more", tenant="t")).spec.name == "one more"


def test_no_tenant_has_all_namespaces() -> None:
    cache = limited(12)
    held = [cache.register(changed(name=f"{number}", tenant="t")) for number in range(9)]
    with pytest.raises(ExhaustedError, match="tenant t: 9 namespaces"):
        cache.register(changed(name="one more", tenant="t"))
    held += [cache.register(changed(name=f"{number}")) for number in range(3)]
    assert len(held) == 12


def decode_spec(stored: bytes) -> NamespaceSpec:
    return msgspec.msgpack.decode(stored, type=NamespaceSpec, dec_hook=rules.from_fields)


@pytest.mark.parametrize(
    ("spec", "words", "rule"),
    [
        (None, "full attention", FullAttention()),
        (rules.SlidingWindow(33), "sliding window of 33 tokens", SlidingWindow(2)),
        (rules.ChunkedWindow(64), "chunks of 64 tokens", ChunkedWindow(64, 16)),
        (rules.RecurrentState(), "recurrent state", RecurrentState()),
        (rules.RecurrentState(32), "recurrent state, a checkpoint every 32 tokens", RecurrentState(2)),
        (rules.CrossAttention(), "cross-attention to images in the first block", CrossAttention(1)),
        (rules.CrossAttention(3), "cross-attention to images in the first 3 blocks", CrossAttention(3)),
        (rules.VisionEmbedding(), "vision embedding", VisionEmbedding()),
    ],
    ids=str,
)
def test_every_rule_comes_back_from_disk(spec: rules.Rule | None, words: str, rule: GroupRule) -> None:
    namespace = changed(parts=(PartSpec("kv", 0, 4096, spec),))
    namespace.check()
    again = decode_spec(msgspec.msgpack.encode(namespace, enc_hook=rules.to_fields))
    assert again == namespace and again.group_rules() == [rule] and str(spec or rules.FULL_ATTENTION) == words


def test_padding_comes_back_from_disk() -> None:
    namespace = changed(parts=(PartSpec("kv", 0, 4096, None, PaddedRows(512, 256, 8192, 64)),))
    assert decode_spec(msgspec.msgpack.encode(namespace, enc_hook=rules.to_fields)) == namespace


def test_shapes_and_a_codec_come_back_from_disk() -> None:
    window = PartSpec("window", 0, 4096, rules.SlidingWindow(32), PaddedRows(512, 256, 8192), OTHER_ORDER)
    namespace = changed(parts=(PartSpec("kv", 0, 4096, shape=SHAPE), window, PartSpec("kv", 1, 64)), codec="int8")
    namespace.check()
    assert decode_spec(msgspec.msgpack.encode(namespace, enc_hook=rules.to_fields)) == namespace


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
    parts = (PartSpec("kv", 0, 64), PartSpec("w", 1, 64, rules.SlidingWindow(9)))
    read = decode_spec(msgspec.msgpack.encode(stored))
    assert read == NamespaceSpec("old", 4, parts, b"s", "", "token")
    assert msgspec.to_builtins(read, enc_hook=rules.to_fields)["parts"][1] == window


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (rules.SlidingWindow(0), "a sliding window of 0 tokens; it must be between 1 and 2147483648"),
        (rules.ChunkedWindow(0), "chunks of 0 tokens; it must be between 1 and 2147483648"),
        (rules.ChunkedWindow(1 << 32), "chunks of 4294967296 tokens"),
        (rules.RecurrentState(24), "a checkpoint every 24 tokens; it must be a multiple of block_tokens (16)"),
        (rules.RecurrentState(-16), "a checkpoint every -16 tokens"),
        (rules.CrossAttention(0), "images in the first 0 blocks; it must be between 1 and 65536"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_is_refused(rule: rules.Rule, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        changed(parts=(PartSpec("kv", 1, 4096, rule),)).check()
    assert f"part 'kv'/1 has {message}" in str(error.value)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            PartSpec("kv", 1, 4098, shape=SHAPE),
            "'kv'/1 has 4098 bytes, and its shape 4096 (2 layers, keys and values, ",
        ),
        (PartSpec("s", 0, 4096, rules.RecurrentState(), shape=SHAPE), "'s'/0 is a recurrent state and has a shape"),
        (PartSpec("v", 0, 4096, rules.VisionEmbedding(), shape=SHAPE), "'v'/0 is a vision embedding and has a shape"),
    ],
    ids=lambda each: each.group if isinstance(each, PartSpec) else "",
)
def test_a_shape_that_a_part_cannot_have_is_refused(part: PartSpec, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        changed(parts=(part,)).check()
    assert message in str(error.value)


@pytest.mark.parametrize("rule", [None, rules.CrossAttention()], ids=str)
def test_a_part_may_have_keys_and_values_of_other_tokens_than_the_blocks(
    rule: rules.Rule | None,
) -> None:
    shape = dataclasses.replace(SHAPE, tokens=32, layers=1)
    changed(parts=(PartSpec("kv", 0, 4096, rule, shape=shape),), codec="k8v4").check()


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("zip", "'zip' is no codec that this daemon knows; use one of exact, lossless, int8, k8v4"),
        ("int8", "the codec int8 has to know how keys and values lie in the bytes, and no part has a shape"),
        ("k8v4", "the codec k8v4 has to know"),
    ],
)
def test_a_codec_that_no_part_can_have_is_refused(codec: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        changed(codec=codec).check()
    assert message in str(error.value)


def test_one_part_with_a_shape_is_enough_for_a_lossy_codec() -> None:
    state = PartSpec("state", 0, 512, rules.RecurrentState())
    changed(parts=(PartSpec("kv", 0, 4096, shape=SHAPE), state), codec="int8").check()


def test_a_codec_counts_only_where_its_packages_are_installed(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    spec = changed(parts=(PartSpec("kv", 0, 4096, shape=SHAPE),), codec="int8")
    assert rig.cache.register(spec).spec.codec == "int8"
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for wanted in (spec, msgspec.structs.replace(spec, name="another", codec="lossless")):
        with pytest.raises(PreconditionError, match=r"codec \w+ of namespace '\w+': .*pip install 'prefixd\[codecs\]'"):
            rig.cache.register(wanted)
    for codec in ("", "exact"):
        assert rig.cache.register(msgspec.structs.replace(spec, codec=codec)).spec.codec == codec


def test_images_do_not_share_a_namespace_with_text() -> None:
    parts = (PartSpec("kv", 0, 4096), PartSpec("vision", 0, 4096, rules.VisionEmbedding()))
    with pytest.raises(InvalidArgumentError, match="part 'vision'/0 is a vision embedding and others are not"):
        changed(parts=parts).check()
