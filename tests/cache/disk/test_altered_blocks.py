"""A start with a codec without loss drops what a lossy one has altered, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.cache import Namespace
from prefixd.cache.coding.namespace_codings import EXACT, TierCodec
from prefixd.cache.index.trie import DISK, NO_SLOT
from tests.cache.disk.coded_rig import SHAPE, CodedRig
from tests.cache.disk.test_coded import drop_from_disk, movement

PROMPT = [1, 2, 3]
INT8, LOSSLESS = TierCodec("int8"), TierCodec("lossless")
MakeCoded = Callable[..., CodedRig]
Stored = dict[bytes, tuple[list[int], list[int]]]
"""By key, of blocks with bytes on disk: slots and checksums."""


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[MakeCoded]:
    made: list[CodedRig] = []

    def one(codec: TierCodec = INT8, **options: Any) -> CodedRig:
        made.append(CodedRig(tmp_path, disk_codec=codec, **{"cpu": 32, "disk": 96, "mixed": False, **options}))
        return made[-1]

    yield one
    for rig in made:
        await rig.check_disk()
        assert not list((tmp_path / "index").parent.glob("**/*damaged*")), "nothing was set aside"
        await rig.close()


def stored(rig: CodedRig, *, altered: bool | None = None) -> Stored:
    """What is on disk; only altered blocks, or only exact ones."""
    trie = rig.trie
    rows = np.flatnonzero((trie.slots[: trie.rows, DISK] != NO_SLOT).any(axis=1))
    if altered is not None:
        rows = rows[(trie.errors[rows, 0] > 0) == altered]
    checksums = trie.stored_checksums(rows)
    return {
        trie.key(row): (trie.slots[row, DISK].tolist(), checksums[at].tolist()) for at, row in enumerate(rows.tolist())
    }


def dropped(rig: CodedRig) -> int:
    return rig.cache.mover.disk.dropped_altered


async def verify_all(rig: CodedRig) -> None:
    """Reads all that is on disk as `prefixd verify` does, records without bytes too."""
    trie = rig.trie
    for row in np.flatnonzero(trie.any_part[: trie.rows] & np.uint8(1 << DISK)).tolist():
        assert await rig.cache.mover.disk.reads.recheck(trie, row, int(trie.generation[row])) is None


@pytest.mark.parametrize("codec", [EXACT, LOSSLESS])
async def test_nothing_but_altered_blocks_is_dropped(make: MakeCoded, codec: TierCodec) -> None:
    """A quarter of the blocks is noise, which is stored raw: exact blocks continue altered ones, and the other way."""
    rig = make(mixed=True)
    prompts = [[first, second, third, 4] for first in (1, 2) for second in (1, 2, 3) for third in (1, 2)]
    for prompt in prompts:
        await rig.put(prompt)
    await rig.cache.write_back.flush()
    altered, exact = stored(rig, altered=True), stored(rig, altered=False)
    assert len(altered) > 10 and len(exact) > 5
    inner = [row for row in rig.rows(prompts[0]) if rig.trie.errors[row, 0] > 0 and rig.trie.children[row]]
    assert inner, "some altered blocks are continued"
    used = rig.durable.used_bytes

    await rig.restart_with(codec)
    assert stored(rig) == exact and dropped(rig) == len(altered) and not rig.cache.mover.lost
    assert rig.durable.used_bytes < used and not rig.trie.errors[: rig.trie.rows].any()
    assert not list(rig.cache.tiers.troubles)
    await verify_all(rig)
    for prompt in prompts:
        found = await rig.get(prompt)
        rows = rig.rows(prompt)
        assert found == next((at for at, row in enumerate(rows) if not rig.trie.there[row, DISK]), len(rows))
    assert not rig.served_altered

    await rig.restart()
    assert stored(rig) == exact and not dropped(rig), "once"
    for prompt in prompts:
        await rig.put(prompt)
    await rig.cache.write_back.flush()
    assert len(stored(rig)) == len(exact) + len(altered) and not stored(rig, altered=True)
    assert exact.items() <= stored(rig).items(), "records without bytes get them again, the others stay"
    await verify_all(rig)


async def test_namespaces_that_allow_loss_keep_their_blocks(make: MakeCoded) -> None:
    rig = make()
    own, lossless = rig.register("own", codec="int8"), rig.register("lossless", codec="lossless")
    for namespace in (own, lossless, rig.namespace):
        await rig.to_disk_alone(PROMPT, namespace)
    before = stored(rig)

    def has(namespace: Namespace) -> set[bytes]:
        return {rig.trie.key(row) for row in rig.rows(PROMPT, namespace)}

    tier_alone = has(rig.namespace)
    await rig.restart_with(EXACT)
    assert stored(rig) == {key: place for key, place in before.items() if key not in tier_alone}
    assert dropped(rig) == 3
    assert await rig.get(PROMPT, namespace=rig.register("own", codec="int8")) == 3 and rig.served_altered == 3
    assert await rig.get(PROMPT, namespace=rig.register("lossless", codec="lossless")) == 3 == rig.served_altered
    assert await rig.get(PROMPT) == 0


async def test_a_lower_bound_drops_what_is_above_it(make: MakeCoded) -> None:
    rig = make()
    await rig.to_disk_alone(PROMPT)
    worst = float(rig.trie.errors[rig.rows(PROMPT), 1].max())
    before = stored(rig)
    await rig.restart_with(TierCodec("int8", worst))
    assert stored(rig) == before, "at the bound"
    await rig.restart_with(TierCodec("k8v4", worst * 2))
    assert stored(rig) == before
    await rig.restart_with(TierCodec("int8", worst / 2))
    assert not stored(rig) and dropped(rig) == 3
    assert not rig.durable.used_bytes


async def test_altered_bytes_that_were_written_again_without_loss_are_dropped_too(make: MakeCoded) -> None:
    """What memory had from a lossy copy was stored losslessly: these are no exact bytes either."""
    rig = make()
    rows = await rig.to_disk_alone(PROMPT)
    assert await rig.get(PROMPT) == 3
    await drop_from_disk(rig, rows)
    assert await rig.cache.write_back.flush() == 3
    assert rig.stored(rows) > 0.6 * 3 * SHAPE.nbytes
    await rig.restart_with(EXACT)
    assert not stored(rig) and await rig.get(PROMPT) == 0


async def test_a_pinned_altered_block_is_dropped_with_its_pin(make: MakeCoded) -> None:
    rig = make()
    await rig.to_disk_alone(PROMPT)
    assert await rig.get(PROMPT) == 3
    await rig.cache.pins.pin(rig.trie, np.array(rig.rows(PROMPT)))
    await rig.restart_with(EXACT)
    assert not stored(rig) and not rig.trie.pinned[: rig.trie.rows].any()
    await rig.restart()
    assert rig.restored == 0


async def test_a_bare_record_is_no_damage_while_memory_has_altered_bytes(make: MakeCoded) -> None:
    """The index says no errors of a block without bytes on disk, and nor does the cache."""
    rig = make()
    rows = await rig.to_disk_alone(PROMPT)
    assert await rig.get(PROMPT) == 3
    first, groups = np.array(rows[:1]), np.full(1, rig.trie.all_groups, np.uint8)
    assert await rig.cache.mover.disk.removals.drop_groups([(rig.trie, first, groups)], movement()) == 1
    assert rig.trie.slots[rows[0], DISK, 0] == NO_SLOT and rig.trie.errors[rows[0], 0] > 0
    await verify_all(rig)
    await rig.restart()
    await verify_all(rig)
