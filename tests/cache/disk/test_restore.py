"""A restart gives back what was durable, as it was, and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.disk import restore
from prefixd.cache.index.trie import CPU, DISK
from prefixd_swap import NewBlock, SlabStore, Span, StorageError, discard, salvage
from prefixd_swap.codecs.part_shape import AXES, PartShape
from prefixd_swap.slab.index.block_record import index_key
from tests.rig import BLOCK_TOKENS, PART_BYTES, MakeRig, Rig


async def test_durable_blocks_come_back_whole_and_others_do_not(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=16)
    await rig.put([1, 2, 3], durable=True)
    await rig.put([1, 2, 4, 5])
    await rig.restart()
    assert rig.restored == 3
    assert [len(rig.rows(p)) for p in ([1, 2, 3], [1, 2, 4, 5])] == [3, 2]
    assert rig.trie.nearest[rig.rows([1, 2, 3])].tolist() == [DISK] * 3
    assert await rig.get([1, 2, 3]) == 3


async def test_a_durable_commit_covers_the_prefix_before_it(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=8, disk=16)
    rig.unhold(await rig.put_gpu([1]), rig.cache.tiers.compute)
    await rig.put([1, 2])
    await rig.put([1, 2, 3], durable=True)
    await rig.restart()
    assert await rig.get([1, 2, 3]) == 3


@pytest.mark.parametrize("nbytes", [100, 4096, 10_000])
async def test_all_namespaces_and_parts_come_back(make_rig: MakeRig, nbytes: int) -> None:
    rig = make_rig(cpu=64, disk=64)
    homes = [rig.register("a", 1, nbytes), rig.register("b", 2, nbytes), rig.register("a", 1, nbytes, salt=b"x")]
    for number, home in enumerate(homes):
        await rig.put([number, 1, 2], namespace=home, durable=True)
        await rig.put([7, 8], namespace=home, durable=True)
    await rig.restart()
    assert rig.restored == 15
    homes = [rig.register("a", 1, nbytes), rig.register("b", 2, nbytes), rig.register("a", 1, nbytes, salt=b"x")]
    for number, home in enumerate(homes):
        assert await rig.get([number, 1, 2], namespace=home) == 3
        assert await rig.get([7, 8], namespace=home) == 2


async def test_restarts_change_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2, 3], durable=True)
    for _ in range(3):
        await rig.restart()
        assert rig.restored == 3
        await rig.check_disk()
    assert await rig.get([1, 2, 3]) == 3


async def test_restored_blocks_are_written_no_second_time(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2], durable=True)
    await rig.restart()
    assert await rig.get([1, 2]) == 2
    assert await rig.cache.write_back.flush() == 0
    assert rig.store is not None and rig.store.commits == 0


@pytest.fixture(params=["at once", "in small chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are entered all at once, and as if there were many of them."""
    if request.param == "in small chunks":
        monkeypatch.setattr("prefixd.cache.disk.restore._CHUNK", 3)
        monkeypatch.setattr("prefixd_swap.slab.store._REMOVED_AT_ONCE", 2)


def write(rig: Rig, key: bytes, *, parent: bytes = b"", depth: int = 0, **other: Any) -> None:
    """Stores a block behind the cache's back."""
    assert rig.store is not None
    data = np.zeros(other.pop("nbytes", PART_BYTES), np.uint8)
    span = Span(data.ctypes.data, data.nbytes)
    parts = [span if there else None for there in other.pop("parts", [True])]
    tokens = bytes(other.pop("tokens", 4 * BLOCK_TOKENS))
    identity = other.pop("namespace", rig.namespace.id)
    if identity in rig.cache.namespaces:
        rig.store.put_namespace(identity, msgspec.msgpack.encode(rig.cache.namespaces.get(identity).spec))
    (record,) = rig.store.write([NewBlock(identity, key, parent, tokens, depth, parts)])
    assert record is not None and not other


K = [bytes([number]) * 16 for number in range(8)]


async def refuses(rig: Rig, reason: str, blocks: int, restored: int) -> None:
    """At the next start, so many blocks are refused for the reason, and leave nothing on disk but a copy of the index,
    from which nothing comes back."""
    await rig.restart()
    assert rig.restored == restored and rig.store is not None and rig.store.used_bytes == restored * PART_BYTES
    aside = rig.store.set_aside()[-1]
    assert f"{blocks} {reason}" in aside.reason and aside.blocks is not None and aside.blocks >= blocks
    await rig.check_disk()
    await rig.restart()
    assert rig.restored == restored and rig.store.set_aside()[-1] == aside, "none was added"
    found = salvage(aside, rig.store, usable=restore.is_usable)
    assert found.blocks + sum(found.lost.values()) == aside.blocks
    for each in rig.store.set_aside():
        discard(each)


@pytest.mark.usefixtures("chunks")
async def test_a_prompt_comes_back_in_neighbouring_rows(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=32, disk=64)
    dice = random.Random(0)
    prompts = [[dice.randrange(3) for _ in range(dice.randrange(1, 7))] for _ in range(12)]
    for prompt in prompts:
        await rig.put(prompt, durable=True)
    await rig.restart()
    trie = rig.trie
    assert (
        trie.rows == rig.restored == len({tuple(prompt[: end + 1]) for prompt in prompts for end in range(len(prompt))})
    )
    for row in range(trie.rows):
        assert trie.parent[row] < row
        assert not trie.children[row] or trie.parent[row + 1] == row
    for prompt in prompts:
        assert await rig.get(prompt) == len(prompt)


@pytest.mark.usefixtures("chunks")
async def test_blocks_of_an_unknown_namespace_leave_the_disk(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2], durable=True)
    for depth, (key, parent) in enumerate([(K[0], b""), (K[1], K[0]), (K[2], K[1])]):
        write(rig, key, parent=parent, depth=depth, namespace=b"whatever")
    await refuses(rig, "of an unknown namespace", 3, restored=2)
    assert await rig.get([1, 2]) == 2


@pytest.mark.parametrize("how", [{"nbytes": 100}, {"tokens": 4}, {"tokens": 0}])
async def test_blocks_of_another_size_go_with_what_continues_them(make_rig: MakeRig, how: dict[str, Any]) -> None:
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2], durable=True)
    write(rig, K[0])
    write(rig, K[1], parent=K[0], depth=1, **how)
    await refuses(rig, "of another size than their namespace's", 1, restored=3)
    write(rig, K[1], parent=K[0], depth=1, **how)
    write(rig, K[2], parent=K[1], depth=2)
    write(rig, K[3], parent=K[2], depth=3)
    write(rig, K[4], parent=K[0], depth=1)
    await refuses(rig, "of a prefix that was dropped", 2, restored=4)


async def test_a_record_with_bytes_behind_its_tokens_is_dropped(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    write(rig, K[0])
    write(rig, K[1])
    name = index_key(rig.namespace.id, K[1])
    await rig.close()
    store = SlabStore.open(rig.path, 16 * PART_BYTES)
    record = store._index.get(name)
    assert record is not None
    store._index.apply([(name, record + b"?")])
    store.close()
    rig._open()
    assert rig.store is not None and rig.restored == rig.store.recovery.kept == 1
    assert rig.store.recovery.lost_slots == 1 and rig.store.used_bytes == PART_BYTES


async def test_blocks_that_lack_parts_are_dropped(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=16)
    home = rig.register("two", 2)
    await rig.put([1], namespace=home, durable=True)
    write(rig, K[0], namespace=home.id, parts=[True, False])
    await rig.restart()
    assert rig.restored == 1 and rig.store is not None
    (aside,) = rig.store.set_aside()
    assert (aside.reason, aside.blocks) == ("1 without some of their parts", 1)
    await rig.check_disk()


async def test_a_block_that_is_not_where_its_parent_says_is_dropped(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    write(rig, K[0])
    write(rig, K[1], parent=K[0], depth=2)
    await refuses(rig, "not where their parents say", 1, restored=1)


@pytest.mark.usefixtures("chunks")
async def test_blocks_of_two_namespaces_with_one_key_come_back(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16, digest=lambda data, seed: bytes([data[-4]]) * 16)
    other = rig.register("other")  # the same geometry, so the same trie
    for home in (rig.namespace, other):
        await rig.put([1, 2], namespace=home, durable=True)
    await rig.restart()
    assert (rig.restored, rig.cache.mover.lost) == (4, {})
    for home in (rig.namespace, rig.register("other")):
        assert await rig.get([1, 2], namespace=home) == 2
    await rig.check_disk()


async def test_a_namespace_that_cannot_be_read_costs_its_blocks_alone(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2], durable=True)
    other = rig.register("other")
    await rig.put([3], namespace=other, durable=True)
    assert rig.store is not None
    rig.store.put_namespace(other.id, b"?")
    await refuses(rig, "of an unknown namespace", 1, restored=2)
    await rig.put([3], namespace=rig.register("other"), durable=True)
    await rig.restart()
    assert rig.restored == 3, "registered again, it is whole again"


@pytest.mark.parametrize("wrong", [(b"other", b"othes"), (b"salt", b"salu")], ids=["value", "field"])
async def test_a_namespace_whose_spec_is_damaged_refuses_nobody(make_rig: MakeRig, wrong: tuple[bytes, bytes]) -> None:
    """Its id is the digest of what it stands for. With one letter changed, its client was refused, by a collision."""
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2], durable=True)
    other = rig.register("other", salt=b"x")
    await rig.put([3], namespace=other, durable=True)
    assert rig.store is not None
    spec = msgspec.msgpack.encode(other.spec)
    assert spec.count(wrong[0]) == 1
    rig.store.put_namespace(other.id, spec.replace(*wrong))
    await refuses(rig, "of an unknown namespace", 1, restored=2)
    again = rig.register("other", salt=b"x")
    assert again.id == other.id and await rig.get([3], namespace=again) == 0
    await rig.put([3], namespace=again, durable=True)
    await rig.restart()
    assert rig.restored == 3


@pytest.mark.parametrize("wrong", [b"", b"othes"], ids=["as it was", "damaged"])
async def test_what_a_version_without_codecs_stored_keeps_its_id(make_rig: MakeRig, wrong: bytes) -> None:
    rig = make_rig(cpu=4, disk=16)
    other = rig.register("other", salt=b"x")
    await rig.put([1, 2], namespace=other, durable=True)
    spec = msgspec.to_builtins(other.spec, builtin_types=(bytes,))
    assert spec.pop("codec") == "" and "shape" not in spec["parts"][0]
    assert rig.store is not None
    encoded = msgspec.msgpack.encode(spec)
    rig.store.put_namespace(other.id, encoded.replace(b"other", wrong or b"other"))
    identity = other.id
    del other
    if wrong:
        await refuses(rig, "of an unknown namespace", 2, restored=0)
    else:
        await rig.restart()
    again = rig.register("other", salt=b"x")
    assert again.id == again.digest == identity
    assert await rig.get([1, 2], namespace=again) == (0 if wrong else 2)


async def test_a_version_without_codecs_reads_what_this_one_stores_of_clients_without_them(make_rig: MakeRig) -> None:
    """It ignores fields that it does not know; the id, which it compares, is made of the fields that it knows."""
    rig = make_rig()
    stored = msgspec.msgpack.encode(rig.namespace.spec)
    fields = [each for each in NamespaceSpec.__struct_fields__ if each != "codec"]
    read = msgspec.msgpack.decode(stored, type=msgspec.defstruct("Old", fields))
    part = msgspec.defstruct("OldPart", ["group", "rank", "nbytes", ("rule", Any, None)], array_like=True)
    parts = [part(**each) for each in read.parts]
    encoded = msgspec.msgpack.encode(
        (read.tenant, read.worker, read.name, read.salt, read.block_tokens, read.dtype, read.layout, parts)
    )
    assert hashlib.blake2b(encoded, digest_size=8).digest() == rig.namespace.id


async def test_shapes_and_a_codec_outlast_a_restart(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    shape = PartShape("bfloat16", 1, BLOCK_TOKENS, 1, PART_BYTES // BLOCK_TOKENS // 4, AXES)
    spec = NamespaceSpec("shaped", BLOCK_TOKENS, (PartSpec("kv", 0, PART_BYTES, shape=shape),), codec="lossless")
    await rig.put([1, 2], namespace=rig.cache.register(spec), durable=True)
    await rig.restart()
    (restored,) = [each for each in rig.cache.namespaces if each.spec.name == "shaped"]
    assert restored.spec == spec and restored is rig.cache.register(spec)
    assert await rig.get([1, 2], namespace=restored) == 2
    for other in (rig.cache.register(msgspec.structs.replace(spec, codec="")), rig.register("shaped")):
        assert await rig.get([1, 2], namespace=other) == 0


async def test_a_stored_shape_that_cannot_be_costs_its_blocks_alone(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    other = rig.register("other")
    await rig.put([1], namespace=other, durable=True)
    spec = msgspec.to_builtins(other.spec, builtin_types=(bytes,))
    spec["parts"][0]["shape"] = {**dataclasses.asdict(PartShape("float16", 1, 1, 1, 1, AXES)), "dtype": "float8"}
    assert rig.store is not None
    rig.store.put_namespace(other.id, msgspec.msgpack.encode(spec))
    await refuses(rig, "of an unknown namespace", 1, restored=0)


@pytest.mark.parametrize("removed", [0, 1])
async def test_what_cannot_be_removed_now_is_removed_at_the_next_start(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, removed: int
) -> None:
    """And each block is lost once: starts that failed left a copy each, which replaced older ones, and counted all."""
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2], durable=True)
    for key in K[:3]:
        write(rig, key, namespace=b"whatever")
    remove, left = SlabStore.remove, removed

    def fail(self: SlabStore, ids: Any) -> None:
        nonlocal left
        if not left:
            raise StorageError("read-only file system")
        left -= 1
        remove(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(SlabStore, "remove", fail)
        patch.setattr("prefixd_swap.slab.store._REMOVED_AT_ONCE", 1)
        for _ in range(2):
            await rig.restart()
    assert rig.restored == 2 and rig.store is not None
    assert "the next start tries again: read-only file system" in caplog.text
    assert [each.blocks for each in rig.store.set_aside()] == [removed] * bool(removed)
    await refuses(rig, "of an unknown namespace", 3 - removed, restored=2)


async def test_a_cache_without_a_disk_restores_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4)
    await rig.put([1, 2])
    assert rig.cache.restore() == 0
    assert rig.tiers([1, 2], CPU) == [True, True]
