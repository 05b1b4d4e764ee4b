"""Blocks on disk in fewer bytes: exact again, or as close as they say; never made smaller twice; counted as stored."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.base.codec_names import CodecName
from prefixd.base.tenancy.tenants import Quota, TierQuota
from prefixd.cache import check_integrity
from prefixd.cache.coding.namespace_codings import TierCodec
from prefixd.cache.disk import part_coder
from prefixd.cache.index.trie import CPU, DISK, NO_SLOT
from prefixd_swap import OutOfMemoryError
from prefixd_swap.codecs.lossless import LosslessCodec
from prefixd_swap.errors import EncodingError
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys
from tests.cache.disk.coded_rig import SHAPE, CodedRig
from tests.waiting import WAIT_S

PROMPT = [1, 2, 3]
MakeCoded = Callable[..., CodedRig]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[MakeCoded]:
    made: list[CodedRig] = []

    def one(codec: CodecName, most_error: float | None = None, **options: Any) -> CodedRig:
        given = {"cpu": 8, "disk": 16, "mixed": False, **options}
        made.append(CodedRig(tmp_path, disk_codec=TierCodec(codec, most_error), **given))
        return made[-1]

    yield one
    for rig in made:
        await rig.check_disk()
        await rig.close()


async def test_lossless_blocks_take_fewer_bytes_and_come_back_equal(make: MakeCoded) -> None:
    rig = make("lossless")
    rows = await rig.to_disk_alone(PROMPT)
    assert 0 < rig.stored(rows) < 0.9 * 3 * SHAPE.nbytes
    assert await rig.get(PROMPT) == 3 and not rig.served_altered
    await rig.restart()
    assert await rig.get(PROMPT) == 3 and not rig.served_altered
    assert not rig.trie.decoded[rig.rows(PROMPT)].any() and not rig.trie.errors[rig.rows(PROMPT)].any()


@pytest.mark.parametrize(("codec", "ratio"), [("int8", 0.8), ("k8v4", 0.7)])
async def test_lossy_blocks_say_how_close_they_are(make: MakeCoded, codec: str, ratio: float) -> None:
    rig = make(codec)
    rows = await rig.to_disk_alone(PROMPT)
    assert rig.stored(rows) < ratio * 3 * SHAPE.nbytes
    errors = rig.trie.errors[rows].copy()
    assert (errors > 0).all()
    await rig.restart()
    assert (rig.trie.errors[rig.rows(PROMPT)] == errors).all(), "the index has them"
    assert await rig.get(PROMPT) == 3 and rig.served_altered == 3
    assert rig.cache.mover.disk.writes.saved_bytes == 0, "nothing was written since the restart"


async def test_what_a_lossy_codec_has_altered_is_never_altered_again(make: MakeCoded) -> None:
    rig = make("int8")
    rows = await rig.to_disk_alone(PROMPT)
    errors = rig.trie.errors[rows].copy()
    assert await rig.get(PROMPT) == 3
    decoded = [rig.read(rig.cache.tiers.arena.span(int(rig.trie.slots[row, CPU, 0]), SHAPE.nbytes)) for row in rows]
    await drop_from_disk(rig, rows)
    assert await rig.cache.write_back.flush() == 3
    rig.forget_memory(PROMPT)
    assert (rig.trie.errors[rows] == errors).all()
    await rig.restart()
    rows = rig.rows(PROMPT)
    assert (rig.trie.errors[rows] == errors).all()
    assert await rig.get(PROMPT) == 3
    again = [rig.read(rig.cache.tiers.arena.span(int(rig.trie.slots[row, CPU, 0]), SHAPE.nbytes)) for row in rows]
    assert again == decoded, "the same bytes as after the first time"
    assert rig.trie.decoded[rows].all(), "and that is known after a restart, too"


async def test_an_exact_copy_in_memory_is_coded_anew(make: MakeCoded) -> None:
    """The disk loses its lossy copy while memory has the exact bytes: nothing of the old copy is left to be said."""
    rig = make("int8")
    await rig.put(PROMPT)
    await rig.cache.write_back.flush()
    rows = rig.rows(PROMPT)
    await drop_from_disk(rig, rows)
    assert not rig.trie.errors[rows].any() and not rig.trie.coded_bytes[rows].any()
    assert await rig.cache.write_back.flush() == 3
    assert (rig.trie.errors[rows] > 0).all() and rig.stored(rows) < 0.8 * 3 * SHAPE.nbytes
    assert await rig.get(PROMPT) == 3 and not rig.served_altered, "memory still has the exact bytes"


async def test_a_namespace_decides_before_the_tier(make: MakeCoded) -> None:
    rig = make("int8")
    exact, lossless = rig.register("exact", codec="exact"), rig.register("lossless", codec="lossless")
    assert rig.stored(await rig.to_disk_alone(PROMPT, exact), exact) == 3 * SHAPE.nbytes
    rows = await rig.to_disk_alone(PROMPT, lossless)
    assert 0.6 * 3 * SHAPE.nbytes < rig.stored(rows, lossless) < 0.9 * 3 * SHAPE.nbytes
    await rig.to_disk_alone(PROMPT)
    for namespace in (exact, lossless):
        assert await rig.get(PROMPT, namespace=namespace) == 3
    assert not rig.served_altered
    assert await rig.get(PROMPT) == 3 and rig.served_altered == 3


async def test_without_a_shape_nothing_is_altered(make: MakeCoded) -> None:
    rig = make("int8", shaped=False)
    rows = await rig.to_disk_alone(PROMPT)
    assert rig.stored(rows) < 0.9 * 3 * SHAPE.nbytes
    assert await rig.get(PROMPT) == 3 and not rig.served_altered and not rig.trie.errors[rows].any()


@pytest.mark.parametrize("encrypted", [False, True])
async def test_above_the_bound_a_block_is_stored_without_loss(make: MakeCoded, encrypted: bool) -> None:
    keys = {"keys": RestKeys((RestKey.derive(b"1" * 16),))} if encrypted else {}
    rig = make("int8", most_error=1e-6, **keys)
    rows = await rig.to_disk_alone(PROMPT)
    assert rig.stored(rows) < 0.9 * 3 * SHAPE.nbytes and not rig.trie.errors[rows].any()
    assert rig.cache.mover.coder.refused == {"above_bound": 3}
    assert await rig.get(PROMPT) == 3 and not rig.served_altered
    await rig.restart()
    assert await rig.get(PROMPT) == 3 and not rig.served_altered


async def test_parts_of_a_page_are_left_alone(make: MakeCoded) -> None:
    """A slot is a page at least: fewer bytes would save nothing."""
    rig = make("lossless")
    small = rig.register("small", nbytes=4096)
    assert rig.stored(await rig.to_disk_alone(PROMPT, small), small) == 3 * 4096
    assert not rig.cache.mover.coder.refused


async def test_without_a_smaller_slot_a_block_stays_exact(make: MakeCoded) -> None:
    rig = make("lossless")
    small = rig.register("small", nbytes=4096 + 512)
    rows = await rig.to_disk_alone(PROMPT, small)
    assert rig.stored(rows, small) < 3 * 4096, "a page instead of two"
    other = rig.register("other", nbytes=2 * 4096)
    assert rig.stored(await rig.to_disk_alone(PROMPT, other), other) == 3 * 8192
    assert rig.cache.mover.coder.refused.total() == 3


async def test_what_was_altered_in_memory_is_stored_as_it_is_and_found(make: MakeCoded) -> None:
    rig = make("lossless")
    await rig.put(PROMPT)
    row = rig.rows(PROMPT)[1]
    rig.cache.tiers.arena.array(int(rig.trie.slots[row, CPU, 0]), SHAPE.nbytes)[99] ^= 1
    assert await rig.cache.write_back.flush() == 3
    assert rig.cache.mover.coder.refused == {"altered_in_memory": 1}
    await rig.restart()
    assert await rig.get(PROMPT) == 1
    assert rig.cache.mover.lost == {"checksum mismatch on disk": 1}


@pytest.mark.parametrize("codec", ["lossless", "int8"])
async def test_a_flipped_byte_costs_its_block(make: MakeCoded, codec: str) -> None:
    rig = make(codec)
    rows = await rig.to_disk_alone(PROMPT)
    rig.damage(rows[2])
    assert await rig.get(PROMPT) == 2
    assert rig.cache.mover.lost == {"checksum mismatch on disk": 1}


@pytest.mark.parametrize(("share", "written"), [(0.9, 1), (0.4, 0)])
async def test_a_tenant_may_have_less_than_an_exact_block(make: MakeCoded, share: float, written: int) -> None:
    rig = make("int8")
    rig.cache.tenants.default.quota = Quota(tiers=(TierQuota(), TierQuota(), TierQuota(0, int(share * SHAPE.nbytes))))
    await rig.put(PROMPT)
    assert await rig.cache.write_back.flush() == written
    assert rig.durable.used_bytes <= share * SHAPE.nbytes


async def test_quotas_count_what_is_stored(make: MakeCoded) -> None:
    rig = make("int8", cpu=16, disk=16)
    tenant = rig.cache.tenants.default
    tenant.quota = Quota(tiers=(TierQuota(), TierQuota(), TierQuota(0, 8 * SHAPE.nbytes)))
    rows = await rig.to_disk_alone(list(range(12)))
    assert len(rows) == 12, "more than eight exact blocks"
    used = rig.cache.mover.use.cached_bytes(tenant, rig.durable)
    assert used == rig.durable.used_bytes < 8 * SHAPE.nbytes


@pytest.mark.parametrize(
    ("error", "reason"), [(MemoryError(), "no_memory"), (EncodingError("a defect"), "encoding_failed")]
)
async def test_blocks_stay_exact_if_a_codec_fails(
    make: MakeCoded, error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make("lossless")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(LosslessCodec, "encode", fail)
    rows = await rig.to_disk_alone(PROMPT)
    assert not rig.trie.coded_bytes[rows].any() and rig.cache.mover.coder.refused == {reason: len(PROMPT)}
    assert await rig.get(PROMPT) == len(PROMPT)


async def test_a_block_that_memory_lacks_to_decode_is_not_lost(
    make: MakeCoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make("lossless")
    await rig.to_disk_alone(PROMPT)
    with monkeypatch.context() as patched:
        patched.setattr(LosslessCodec, "decode", no_memory)
        assert await rig.get(PROMPT) == 0
        assert "no memory" in rig.cache.tiers.troubles.of_tier(rig.durable)
    assert await rig.cache.mover.disk.health.revive()
    assert await rig.get(PROMPT) == len(PROMPT)


async def test_after_an_error_no_thread_reads_memory_any_more(make: MakeCoded, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make("lossless")
    ended, begun = list[bool](), threading.Barrier(2)

    def code(jobs: Sequence[Any]) -> None:
        begun.wait(WAIT_S)
        if jobs[0].row % 2:
            raise OutOfMemoryError("no more")
        time.sleep(0.2)
        ended.append(True)

    monkeypatch.setattr(part_coder, "_code_all", code)
    await rig.put(PROMPT[:2])
    with pytest.raises(OutOfMemoryError):
        await rig.cache.write_back.flush()
    assert ended == [True]


def no_memory(*_: object) -> None:
    raise MemoryError("no more")


async def test_a_full_disk_makes_room_for_what_is_stored(make: MakeCoded) -> None:
    rig = make("int8", cpu=16, disk=64)
    for first in range(0, 180, 6):
        await rig.to_disk_alone(list(range(first, first + 6)))
        check_integrity(rig.cache)
    on_disk = int(np.count_nonzero((rig.trie.slots[: rig.trie.rows, DISK] != NO_SLOT).any(axis=1)))
    assert on_disk > 75, "64 exact blocks would fit"
    assert rig.durable.capacity_bytes * 0.8 < rig.durable.used_bytes <= rig.durable.capacity_bytes


async def drop_from_disk(rig: CodedRig, rows: list[int]) -> None:
    """Evicts blocks from the disk that memory has, too."""
    trie = rig.trie
    await rig.cache.mover.disk.removals.evict([(trie, np.array(rows[::-1]))], False, movement())
    assert (trie.slots[rows, DISK] == NO_SLOT).all()


def movement() -> Any:
    from prefixd.cache.placement.movement import Movement
    from prefixd_swap.transfers import Urgency

    return Movement(Urgency.DEMAND)
