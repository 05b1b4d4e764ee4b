"""Hosts that share blocks in fewer bytes: exact again, or as close as they say; never a lossy byte as an exact one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.background.forgetting import find_subtree, forget
from prefixd.cache.coding.namespace_codings import TierCodec
from prefixd.cache.index.trie import CPU, DISK, NO_SLOT
from prefixd_swap import OutOfMemoryError
from prefixd_swap.codecs.coding import Coded, Coding, code
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.stores.sealed import HEAD_BYTES, Seal
from prefixd_swap.tiers.remote import part_objects, remote_tier
from tests.cache.disk.coded_rig import SHAPE, CodedRig
from tests.cache.remote.coded_hosts import (
    CODINGS,
    SEAL,
    block_of,
    host,
    hosts,
    judge,
    name_of,
    remote_of,
    share,
)
from tests.rig import BLOCK_TOKENS

PROMPT = [0, 1, 1]
EXACT_BYTES = len(PROMPT) * SHAPE.nbytes
RAW, LOSSLESS, INT8, K8V4 = CODINGS


def in_memory(rig: CodedRig, prompt: Sequence[int] = PROMPT) -> list[bytes]:
    rows = rig.rows(prompt)
    return [rig.read(rig.cache.tiers.arena.span(int(rig.trie.slots[row, CPU, 0]), SHAPE.nbytes)) for row in rows]


async def test_lossless_blocks_take_fewer_bytes_and_come_equal(tmp_path: Path) -> None:
    async with hosts(tmp_path, "lossless", "lossless") as ((a, b), objects):
        await a.put(PROMPT)
        await share(a)
        stored = sum(len(data) - HEAD_BYTES for data in objects.values())
        assert 0.6 * EXACT_BYTES < stored < 0.9 * EXACT_BYTES
        assert remote_of(a).tier.written_bytes == stored
        assert remote_of(a).tier.saved_bytes == EXACT_BYTES - stored
        assert await b.get([*PROMPT, 7]) == 3 and not b.served_altered
        assert remote_of(b).tier.read_bytes == stored
        rows = b.rows(PROMPT)
        assert not b.trie.decoded[rows].any() and not b.trie.errors[rows].any()
        assert b.trie.checksums[rows].tolist() == a.trie.checksums[a.rows(PROMPT)].tolist()
        assert judge(a, objects) == {"exact": 3, "lossy": 0}


@pytest.mark.parametrize(("codec", "ratio"), [("int8", 0.8), ("k8v4", 0.7)])
async def test_lossy_blocks_say_how_close_they_are(tmp_path: Path, codec: str, ratio: float) -> None:
    async with hosts(tmp_path, codec, codec) as ((a, b), objects):
        await a.put(PROMPT)
        await share(a)
        assert sum(map(len, objects.values())) < ratio * EXACT_BYTES
        assert await b.get(PROMPT) == 3 and b.served_altered == 3
        rows = b.rows(PROMPT)
        assert b.trie.decoded[rows].all() and (b.trie.errors[rows] > 0).all()
        assert await a.get(PROMPT) == 3 and not a.served_altered, "its own copy is exact"
        assert judge(a, objects) == {"exact": 0, "lossy": 3}


async def test_what_no_codec_makes_smaller_is_shared_as_it_is(tmp_path: Path) -> None:
    async with hosts(tmp_path, "int8", "int8", mixed=True) as ((a, b), objects):
        prompt = list(range(12))
        await a.put(prompt)
        await share(a)
        noise = remote_of(a).tier.refused.total()
        assert 0 < noise < 12 and len(objects) == 12
        assert await b.get(prompt) == 12 and b.served_altered == 12 - noise
        assert np.count_nonzero(b.trie.decoded[b.rows(prompt)]) == 12 - noise


async def test_every_coding_has_names_of_its_own(tmp_path: Path) -> None:
    """Hosts with other codecs find nothing of each other; one that knows no codecs nothing that it cannot use."""
    bounded = TierCodec("int8", 0.5)
    async with hosts(tmp_path, "exact", "lossless", "int8", "k8v4", bounded) as (rigs, objects):
        for number, rig in enumerate(rigs):
            assert await rig.get(PROMPT) == 0
            await rig.put(PROMPT)
            await share(rig)
            assert len(objects) == 3 * (number + 1)
        for coding in CODINGS:
            assert name_of(rigs[0], PROMPT, coding) in objects
    for number, codec in enumerate(("exact", "lossless", "int8", "k8v4", bounded)):
        late = host(tmp_path / f"late {number}", objects, codec)
        assert await late.get(PROMPT) == 3 and late.served_altered == (3 if number > 1 else 0)
        await late.close()


async def test_exact_objects_are_as_they_always_were(tmp_path: Path) -> None:
    """Names and format of blocks without a codec: hosts with an older prefixd go on sharing them."""
    async with hosts(tmp_path, "exact") as ((a,), objects):
        await a.put([1])
        await share(a)
        ((name, data),) = objects.items()
        assert name == block_of(a, [1]).digest + bytes(2)
        assert data[:12] == b"prefixd\0\1\0\0\0" and len(data) == HEAD_BYTES + SHAPE.nbytes


async def test_a_namespace_decides_before_the_tier_and_parts_without_a_shape_stay_exact(tmp_path: Path) -> None:
    async with hosts(tmp_path, "int8", "int8") as ((a, b), objects):
        parts = (PartSpec("kv", 0, SHAPE.nbytes, shape=SHAPE), PartSpec("kv", 1, SHAPE.nbytes))
        for name, codec, altered in (("own", "exact", 0), ("less", "lossless", 0), ("tiers", "", 3)):
            spec = NamespaceSpec(name, BLOCK_TOKENS, parts, codec=codec)
            objects.clear()
            await a.put(PROMPT, namespace=a.cache.register(spec))
            await share(a)
            assert len(objects) == 6
            b.served_altered = 0
            assert await b.get(PROMPT, namespace=b.cache.register(spec)) == 3 and b.served_altered == altered
            full = [len(data) == HEAD_BYTES + SHAPE.nbytes for data in objects.values()]
            assert all(full) is (codec == "exact") and any(full) is (codec == "exact")


async def test_above_the_bound_a_block_is_shared_without_loss(tmp_path: Path) -> None:
    async with hosts(tmp_path, TierCodec("int8", 1e-6), TierCodec("int8", 1e-6)) as ((a, b), objects):
        await a.put(PROMPT)
        await share(a)
        assert remote_of(a).tier.refused == {"above_bound": 3} and remote_of(a).tier.saved_bytes
        assert all(len(data) < 0.9 * SHAPE.nbytes for data in objects.values())
        assert await b.get(PROMPT) == 3 and not b.served_altered


@pytest.mark.parametrize("remote", ["exact", "lossless", "int8", "k8v4"])
@pytest.mark.parametrize("disk", ["int8", "k8v4"])
async def test_what_a_host_has_only_from_a_lossy_disk_copy_is_not_shared(
    tmp_path: Path, disk: str, remote: str
) -> None:
    async with hosts(tmp_path, remote, remote, disk_codec=disk, disk=32) as ((a, b), objects):
        remote_of(a).tier.writable = False
        await a.to_disk_alone(PROMPT)
        assert await a.get(PROMPT) == 3 and a.served_altered == 3
        remote_of(a).tier.writable = True
        await share(a)
        assert not objects, "and what cannot be shared is not tried for ever"
        await a.put([*PROMPT, 0])
        await share(a)
        assert len(objects) == 1, "the block that was computed exactly"
        await a.restart()
        assert await a.get(PROMPT) == 3 and a.served_altered > 3
        await share(a)
        assert len(objects) == 1 and await b.get(PROMPT) == 0


async def test_computed_again_a_block_is_exact_and_is_shared(tmp_path: Path) -> None:
    async with hosts(tmp_path, "exact", "exact", disk_codec="int8", disk=32) as ((a, b), objects):
        remote_of(a).tier.writable = False
        await a.to_disk_alone(PROMPT)
        assert await a.get(PROMPT) == 3
        a.forget_memory(PROMPT)
        trie, rows = a.trie, a.rows(PROMPT)
        assert not trie.decoded[rows].any() and trie.errors[rows].all()
        await drop_from_disk(a, rows)
        await a.put(PROMPT)
        remote_of(a).tier.writable = True
        await share(a)
        assert judge(a, objects) == {"exact": 3, "lossy": 0}
        assert await b.get(PROMPT) == 3 and not b.served_altered


async def test_what_came_lossy_from_the_store_is_kept_without_further_loss_and_not_shared_again(tmp_path: Path) -> None:
    async with hosts(tmp_path, "int8", "int8", disk_codec="k8v4", disk=32) as ((a, b), objects):
        await a.put(PROMPT)
        await share(a)
        assert await b.get(PROMPT) == 3
        came, errors = in_memory(b), b.trie.errors[b.rows(PROMPT)].copy()
        assert await b.cache.write_back.flush() == 3
        objects.clear()
        await remote_of(b).known.forget_all()
        await share(b)
        assert not objects
        b.forget_memory(PROMPT)
        await b.restart()
        assert await b.get(PROMPT) == 3 and in_memory(b) == came, "the same bytes, twice lossless"
        rows = b.rows(PROMPT)
        assert (b.trie.errors[rows] == errors).all() and b.trie.decoded[rows].all()
        await share(b)
        assert not objects


def torn(value: bytearray) -> None:
    del value[-1]


def torn_head(value: bytearray) -> None:
    del value[50:]


def longer(value: bytearray) -> None:
    value += b"\0"


def altered(value: bytearray) -> None:
    value[-7] ^= 1


def altered_coded_header(value: bytearray) -> None:
    value[HEAD_BYTES + 9] ^= 1


def altered_length(value: bytearray) -> None:
    value[28] ^= 1


def altered_tag(value: bytearray) -> None:
    value[HEAD_BYTES - 9] ^= 1


def says_raw(value: bytearray) -> None:
    value[10] &= ~2


def foreign(value: bytearray) -> None:
    value[:8] = b"somebody"


def newer(value: bytearray) -> None:
    value[8] += 1


DAMAGES: dict[Callable[[bytearray], None], str | None] = {
    torn: None,
    torn_head: None,
    longer: None,
    altered: "altered",
    altered_coded_header: "altered",
    altered_length: None,
    altered_tag: "altered",
    says_raw: "altered",
    foreign: None,
    newer: "old",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("codec", ["lossless", "int8"])
@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
async def test_a_coded_object_that_is_not_what_was_sealed_is_a_miss(
    tmp_path: Path, damage: Callable[[bytearray], None], codec: str, encrypt: bool
) -> None:
    seal = Seal(b"a secret of tests", b"a key of tests!!" if encrypt else None)
    async with hosts(tmp_path, codec, codec, seal=seal) as ((a, b), objects):
        await a.put(PROMPT)
        await share(a)
        names = list(objects)
        value = bytearray(objects[names[1]])
        damage(value)
        objects[names[1]] = bytes(value)
        assert await b.get(PROMPT) == 1
        kind = DAMAGES[damage]
        assert dict(remote_of(b).tier.bad_objects) == ({} if kind is None else {kind: 1})
        assert b.cache.mover.lost["not served: missing or wrong in the shared store"] == 1
        await b.put(PROMPT)
        await share(b)
        b.check()
    cold = host(tmp_path / "cold", objects, codec, seal=seal)  # type: ignore[arg-type]
    assert await cold.get(PROMPT) == 3, "it was written anew"
    await cold.close()


def coded_by(codec: str, exact: bytes) -> bytes:
    shape = SHAPE if len(exact) == SHAPE.nbytes else None
    made = code(np.frombuffer(exact, np.uint8), Coding(find_codec(codec), shape, 1.0))
    assert isinstance(made, Coded)
    return made.data.tobytes()


SEALED: dict[str, tuple[Callable[[bytes], bytes], bool, str | None]] = {
    "another lossy codec": (lambda exact: coded_by("k8v4", exact), True, "old"),
    "no coded object": (lambda exact: exact[: SHAPE.nbytes // 2], True, "altered"),
    "a part of another length": (lambda exact: coded_by("lossless", exact[: SHAPE.nbytes // 2]), True, "altered"),
    "bytes of another length, not coded": (lambda exact: exact[:-2], False, "altered"),
    "half of a coded object": (lambda exact: coded_by("int8", exact)[: SHAPE.nbytes // 4], True, "altered"),
    "lossless": (lambda exact: coded_by("lossless", exact), True, None),
    "the exact bytes": (lambda exact: exact, False, None),
}


@pytest.mark.parametrize("kind", SEALED)
async def test_what_a_host_with_the_secret_puts_under_a_lossy_name(tmp_path: Path, kind: str) -> None:
    """Whatever it is, it is used only if the reader's codec, or one without loss, has made it."""
    make, coded, expected = SEALED[kind]
    async with hosts(tmp_path, "int8") as ((b,), objects):
        exact, block = b.content(b.namespace, b.chain([1]), 0), block_of(b, [1])
        label = part_objects.coding_label(INT8)
        head, payload = SEAL.close(block, 0, memoryview(make(exact)), None, label=label, coded=coded)
        objects[name_of(b, [1], INT8)] = head + bytes(payload)
        assert await b.get([1]) == (expected is None) and not b.served_altered
        assert dict(remote_of(b).tier.bad_objects) == ({} if expected is None else {expected: 1})


async def test_an_object_beyond_the_bound_is_not_used(tmp_path: Path) -> None:
    """It cannot have this name: the bound is part of it. But a host with the secret may lie."""
    async with hosts(tmp_path, "int8", TierCodec("int8", 1e-6)) as ((a, b), objects):
        await a.put([1])
        await share(a)
        ((_, data),) = objects.items()
        strict = Coding(find_codec("int8"), SHAPE, 1e-6)
        payload = memoryview(data)[HEAD_BYTES:]
        label = part_objects.coding_label(strict)
        head, payload = SEAL.close(block_of(b, [1]), 0, payload, None, label=label, coded=True)
        objects[name_of(b, [1], strict)] = head + bytes(payload)
        assert await b.get([1]) == 0 and remote_of(b).tier.bad_objects == {"old": 1}


@pytest.mark.parametrize("source", [LOSSLESS, INT8, K8V4], ids=["lossless", "int8", "k8v4"])
async def test_an_object_under_the_name_of_another_coding_is_a_miss(tmp_path: Path, source: Coding) -> None:
    """Somebody who writes to the store, without the secret, moves coded objects to the names of exact ones."""
    async with hosts(tmp_path, source.codec.name, "exact", "lossless", "int8") as ((a, *others), objects):
        await a.put(PROMPT)
        await share(a)
        moved = {prompt: objects[name_of(a, prompt, source)] for prompt in (tuple(PROMPT[:n]) for n in (1, 2, 3))}
        for victim, coding in zip(others, (RAW, LOSSLESS, INT8), strict=True):
            if coding == source:
                continue
            for prompt, data in moved.items():
                objects[name_of(a, prompt, coding)] = data + bytes(SHAPE.nbytes + HEAD_BYTES - len(data))
            assert await victim.get(PROMPT) == 0
            for prompt, data in moved.items():
                objects[name_of(a, prompt, coding)] = data
            victim.clock.now += 100
            assert await victim.get(PROMPT) == 0 and not victim.served_altered


def test_coded_bytes_need_a_label() -> None:
    block = None
    with pytest.raises(ValueError, match="label"):
        SEAL.close(block, 0, memoryview(b"abc"), None, coded=True)  # type: ignore[arg-type]


async def test_codecs_work_beside_the_loop_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def noting(work: Callable[..., object]) -> Callable[..., object]:
        def run(*given: object, **named: object) -> object:
            threads.add(threading.current_thread().name)
            return work(*given, **named)

        return run

    for name in ("code_or_lossless", "decode_object"):
        monkeypatch.setattr(part_objects, name, noting(getattr(part_objects, name)))
    async with hosts(tmp_path, "int8", "int8") as ((a, b), _):
        await a.put(PROMPT)
        await share(a)
        assert await b.get(PROMPT) == 3
    assert threads and all(name.startswith("prefixd-remote-codecs") for name in threads)


async def test_without_threads_codecs_work_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OutOfMemoryError("no threads, as the test says")

    async with hosts(tmp_path, "int8", "int8") as ((a, b), objects):
        monkeypatch.setattr(remote_tier, "started_threads", none_left)
        await a.put(PROMPT)
        await share(a)
        assert judge(a, objects) == {"exact": 0, "lossy": 3}
        assert await b.get(PROMPT) == 3


async def test_bytes_that_change_in_memory_are_shared_as_they_are_and_found(tmp_path: Path) -> None:
    async with hosts(tmp_path, "int8", "int8") as ((a, b), _):
        await a.put(PROMPT)
        row = a.rows(PROMPT)[1]
        a.cache.tiers.arena.array(int(a.trie.slots[row, CPU, 0]), SHAPE.nbytes)[99] ^= 1
        await share(a)
        assert remote_of(a).tier.refused == {"altered_in_memory": 1}
        assert await b.get(PROMPT) == 1 and remote_of(b).tier.bad_objects == {"altered": 1}


async def test_a_tenant_gets_another_codec_while_the_daemon_runs(tmp_path: Path) -> None:
    tenants = Tenants()
    async with hosts(tmp_path, "exact", "exact", tenants=tenants) as ((a, b), objects):
        tenants.default.codec = "int8"
        await a.put(PROMPT)
        await share(a)
        assert await b.get([0, 1]) == 2 and b.served_altered == 2
        tenants.default.codec = None
        assert await b.get(PROMPT) == 2, "the third block is known to be there, by a name that is not asked for now"
        b.check()
        await b.put(PROMPT)
        await share(b)
        assert judge(a, objects)["exact"] == 1, "the block that it computed, and nothing that was decoded"


async def test_eviction_from_the_store_too(tmp_path: Path) -> None:
    async with hosts(tmp_path, "int8", "exact") as ((a, b), objects):
        for rig in (a, b):
            await rig.put(PROMPT)
            await share(rig)
        assert len(objects) == 6
        async for _ in forget(a.cache.mover, await find_subtree(a.trie, a.rows(PROMPT)[0]), shared=True):
            pass
        assert not objects, "its own and the exact ones"


async def drop_from_disk(rig: CodedRig, rows: list[int]) -> None:
    from prefixd.cache.placement.movement import Movement
    from prefixd_swap.transfers import Urgency

    trie = rig.trie
    await rig.cache.mover.disk.removals.evict([(trie, np.array(rows[::-1]))], False, Movement(Urgency.DEMAND))
    assert (trie.slots[rows, DISK] == NO_SLOT).all()
