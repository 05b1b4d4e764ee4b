"""The figures of what codecs have made of blocks are those of the blocks that are there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.coding.namespace_codings import TierCodec
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.placement.movement import Movement
from prefixd.observability.histogram import MOST_SERIES, OTHERS
from prefixd.server.figures.block_counts import BlockCounts
from prefixd.server.figures.coded_counts import Altered, CodedCounts, stored_stats
from prefixd.v1 import admin_pb2 as pb
from prefixd_swap.transfers import Urgency
from tests.cache.disk.coded_rig import SHAPE, CodedRig

PROMPT = [1, 2, 3]
INT8 = TierCodec("int8")
MakeCoded = Callable[..., CodedRig]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[MakeCoded]:
    made: list[CodedRig] = []

    def one(tier: TierCodec = INT8, **options: Any) -> CodedRig:
        made.append(CodedRig(tmp_path, disk_codec=tier, **{"cpu": 8, "disk": 16, "mixed": False, **options}))
        return made[-1]

    yield one
    for rig in made:
        await rig.check_disk()
        await rig.close()


async def figures(rig: CodedRig) -> pb.StoredStats:
    counts = await BlockCounts.of(rig.cache, [])
    found = stored_stats(rig.cache, counts.blocks[2], counts.coded, {})
    assert found is not None
    return found


def by_who(values: Any, what: str) -> dict[tuple[str, str], float]:
    return {(each.labels["tenant"], each.labels["model"]): getattr(each, what) for each in values}


async def test_each_form_of_a_block_is_counted(make: MakeCoded) -> None:
    rig = make()
    exact, lossless = rig.register("exact", codec="exact"), rig.register("lossless", codec="lossless")
    await rig.to_disk_alone(PROMPT, exact)
    await rig.to_disk_alone(PROMPT[:2], lossless)
    rows = await rig.to_disk_alone(PROMPT)
    found = await figures(rig)
    assert found.codec == "int8" and found.blocks == {"raw": 3, "coded": 2, "altered": 3}
    assert found.exact_bytes == 8 * SHAPE.nbytes
    stored = 3 * SHAPE.nbytes + rig.stored(rig.rows(PROMPT[:2], lossless), lossless) + rig.stored(rows)
    assert found.stored_bytes == stored and found.saved_bytes == 8 * SHAPE.nbytes - stored
    assert (found.encoded_bytes, found.decoded_bytes) == (5 * SHAPE.nbytes, 0) and found.encode_s > 0
    who = ("default", "model")
    largest, rms = rig.trie.errors[rows].max(axis=0).tolist()
    assert by_who(found.altered_blocks, "count") == {who: 3}
    assert by_who(found.largest_error, "value") == {who: largest} and by_who(found.rms_error, "value") == {who: rms}

    assert await rig.get(PROMPT) == 3
    found = await figures(rig)
    assert found.decoded_bytes == 3 * SHAPE.nbytes and found.decode_s > 0


async def test_a_restart_counts_anew_what_is_there(make: MakeCoded) -> None:
    rig = make()
    await rig.to_disk_alone(PROMPT)
    before = await figures(rig)
    await rig.restart()
    after = await figures(rig)
    assert after.saved_bytes == 0 < before.saved_bytes, "since the start"
    for name in ("stored_bytes", "exact_bytes", "blocks", "altered_blocks", "largest_error", "rms_error"):
        assert getattr(after, name) == getattr(before, name)


async def test_what_leaves_is_not_counted_any_more(make: MakeCoded) -> None:
    rig = make()
    rows = await rig.to_disk_alone(PROMPT)
    assert await rig.get(PROMPT) == 3
    movement = Movement(Urgency.DEMAND)
    await rig.cache.mover.disk.removals.evict([(rig.trie, np.array(rows[::-1]))], False, movement)
    found = await figures(rig)
    assert found.exact_bytes == found.stored_bytes == 0 and found.blocks["altered"] == 0
    assert by_who(found.altered_blocks, "count") == {("default", "model"): 3}, "memory has what was decoded"
    rig.forget_memory(PROMPT)
    found = await figures(rig)
    assert not found.altered_blocks and not found.largest_error


async def test_what_a_bound_refuses_is_counted_by_its_reason(make: MakeCoded) -> None:
    rig = make(TierCodec("int8", 1e-6))
    await rig.to_disk_alone(PROMPT)
    found = await figures(rig)
    assert found.refused_parts == {"above_bound": 3} and found.blocks == {"raw": 0, "coded": 3, "altered": 0}
    assert found.stored_bytes < found.exact_bytes == 3 * SHAPE.nbytes
    assert found.saved_bytes == found.exact_bytes - found.stored_bytes


def test_the_labels_are_bounded() -> None:
    counts, namespaces = CodedCounts(), NamespaceRegistry()
    for number in range(MOST_SERIES + 3):
        namespace = namespaces.register(NamespaceSpec(f"model-{number}", 16, (PartSpec("kv", 0, 4096),)))
        counts.by_namespace[namespace.ordinal] = Altered(2 if number >= 3 else 1, 0.1 * number, 0.01)
    counts.by_namespace[10**6] = Altered(5, 9.0, 9.0)  # of a namespace that was forgotten
    found = counts.by_who(namespaces, {})
    assert len(found) == MOST_SERIES + 1
    assert found[OTHERS, OTHERS] == Altered(3, pytest.approx(0.2), 0.01)
