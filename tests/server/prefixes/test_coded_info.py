"""What operators are told of a prefix on disk: what is stored of it, and how far it is from the exact bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.cache import Namespace
from prefixd.cache.coding.namespace_codings import TierCodec
from prefixd.cache.index.trie import DISK
from prefixd.observability.request_record import RequestRecord
from prefixd.server.prefixes import coded_info
from prefixd.server.prefixes.prefix_info import inspect_prefix
from prefixd.server.prefixes.prefix_pages import list_prefixes
from prefixd.server.services.call_records import Lookup
from prefixd.v1 import admin_pb2 as pb
from tests.cache.disk.coded_rig import SHAPE, CodedRig

PROMPT = [1, 2, 3]
MakeCoded = Callable[..., CodedRig]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[MakeCoded]:
    made: list[CodedRig] = []

    def one(codec: TierCodec, **options: Any) -> CodedRig:
        made.append(CodedRig(tmp_path, disk_codec=codec, **{"cpu": 8, "disk": 16, "mixed": False, **options}))
        return made[-1]

    yield one
    for rig in made:
        await rig.check_disk()
        await rig.close()


async def inspected(rig: CodedRig, namespace: Namespace | None = None, *, layers: bool = False) -> pb.InspectResponse:
    home = namespace or rig.namespace
    key = f"{home.id.hex()}/{rig.cache.trie(home).key(rig.rows(PROMPT, home)[-1]).hex()}"
    return await inspect_prefix(rig.cache, pb.InspectRequest(key=key, layers=layers))


async def test_an_altered_prefix_says_so(make: MakeCoded) -> None:
    rig = make(TierCodec("int8"))
    rows = await rig.to_disk_alone(PROMPT)
    largest, rms = rig.trie.errors[rows].max(axis=0).tolist()
    answer = await inspected(rig)
    assert answer.prefix.storage == pb.PrefixStorage(
        stored_bytes=rig.stored(rows),
        exact_bytes=3 * SHAPE.nbytes,
        altered_blocks=3,
        largest_error=largest,
        rms_error=rms,
    )
    for row, block in zip(rows, answer.blocks, strict=True):
        assert block.storage.form == "altered" and not block.storage.altered_in_memory and not block.storage.parts
        assert [block.storage.largest_error, block.storage.rms_error] == rig.trie.errors[row].tolist()
        assert block.storage.stored_bytes == rig.stored([row])
    assert await rig.get(PROMPT) == 3
    assert all(block.storage.altered_in_memory for block in (await inspected(rig)).blocks)
    (listed,) = (await list_prefixes(rig.cache, pb.ListPrefixesRequest())).prefixes
    assert listed.storage == answer.prefix.storage


async def test_the_errors_of_layers_are_those_that_were_measured(make: MakeCoded) -> None:
    rig = make(TierCodec("k8v4"))
    rows = await rig.to_disk_alone(PROMPT)
    answer = await inspected(rig, layers=True)
    for row, block in zip(rows, answer.blocks, strict=True):
        (part,) = block.storage.parts
        assert (part.part, part.codec) == (0, "k8v4") and not block.storage.unread
        assert len(part.largest_errors) == len(part.rms_errors) == SHAPE.layers
        worst = [max(part.largest_errors), max(part.rms_errors)]
        assert worst == rig.trie.errors[row].tolist(), "the index has those of the worst layer"


async def test_only_so_many_blocks_are_read(make: MakeCoded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_info, "LAYERS_BLOCKS", 2)
    rig = make(TierCodec("int8"))
    await rig.to_disk_alone(PROMPT)
    assert [len(block.storage.parts) for block in (await inspected(rig, layers=True)).blocks] == [1, 1, 0]


async def test_a_block_that_cannot_be_read_says_why(make: MakeCoded) -> None:
    rig = make(TierCodec("int8"))
    rows = await rig.to_disk_alone(PROMPT)
    rig.trie.coded_checksums[rows[1], 0] ^= np.uint64(1)
    blocks = (await inspected(rig, layers=True)).blocks
    rig.trie.coded_checksums[rows[1], 0] ^= np.uint64(1)
    assert [len(block.storage.parts) for block in blocks] == [1, 0, 1]
    assert "have checksum" in blocks[1].storage.unread
    assert rig.trie.any_part[rows[1]] & (1 << DISK), "it is not dropped: that is for readers and the scrubber"


async def test_exact_blocks_have_nothing_to_say(make: MakeCoded) -> None:
    rig = make(TierCodec("lossless"))
    exact = rig.register("exact", codec="exact")
    await rig.to_disk_alone(PROMPT, exact)
    answer = await inspected(rig, exact, layers=True)
    assert answer.prefix.storage == pb.PrefixStorage(stored_bytes=3 * SHAPE.nbytes, exact_bytes=3 * SHAPE.nbytes)
    assert not any(block.HasField("storage") for block in answer.blocks)
    rows = await rig.to_disk_alone(PROMPT)
    answer = await inspected(rig, layers=True)
    assert answer.prefix.storage == pb.PrefixStorage(
        stored_bytes=rig.stored(rows), exact_bytes=3 * SHAPE.nbytes, coded_blocks=3
    )
    assert [block.storage.form for block in answer.blocks] == ["coded"] * 3
    assert not any(block.storage.parts for block in answer.blocks)


async def test_a_verification_counts_altered_blocks(make: MakeCoded) -> None:
    rig = make(TierCodec("int8"))
    lossless = rig.register("lossless", codec="lossless")
    await rig.to_disk_alone(PROMPT, lossless)
    await rig.to_disk_alone(PROMPT)
    async for progress in rig.cache.scrubber.verify():
        last = progress
    assert (last.checked_blocks, last.altered_blocks, last.damaged_blocks) == (6, 3, 0)


async def test_what_a_reader_gets_of_lossy_copies_is_counted(make: MakeCoded) -> None:
    rig = make(TierCodec("int8"))
    rows = await rig.to_disk_alone(PROMPT)
    trie, on_disk = rig.trie, np.array(rows)
    assert trie.count_decoded(on_disk) == 0, "nothing was loaded"
    assert await rig.get(PROMPT) == 3
    assert trie.count_decoded(on_disk) == 3
    assert trie.count_decoded(on_disk, np.zeros(3, np.uint8)) == 0, "of no group"

    for prompt, altered in ((PROMPT, 3), ([7, 8], 0)):
        await rig.put(prompt)
        record = RequestRecord()
        lookup = Lookup(record, rig.namespace, rig.chain(prompt), rig.clock)
        lease = await rig.lease(prompt, matched=lookup.matched)
        lookup.leased(lease)
        assert lease is not None and (record.blocks, record.altered_blocks) == (len(prompt), altered)
        rig.cache.release(rig.session, lease.id)
