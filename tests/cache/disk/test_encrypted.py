"""Encrypted blocks: nothing is in clear on disk, they come back, keys rotate, and a missing key loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import check_integrity
from prefixd.cache.coding.namespace_codings import TierCodec
from prefixd.cache.disk.part_coder import CodedBlocks
from prefixd.cache.disk.restore import is_usable
from prefixd.cache.index.trie import CPU, DISK
from prefixd_swap import StorageError
from prefixd_swap.errors import MissingKeyError, OutOfMemoryError
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys
from prefixd_swap.slab.index.block_record import DiskPart, NewBlock
from prefixd_swap.slab.salvage import salvage
from prefixd_swap.spans import Span
from tests.cache.disk.coded_rig import SHAPE, CodedRig
from tests.rig import BLOCK_TOKENS

OLD, NEW, OTHER = (RestKey.derive(each * 16) for each in (b"o", b"n", b"x"))
WITH_KEY = RestKeys((NEW,))
PROMPT = [0x5A11AD, 0x5A11AE, 0x5A11AF]
MakeRig = Callable[..., CodedRig]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[MakeRig]:
    made: list[CodedRig] = []

    def one(keys: RestKeys = WITH_KEY, codec: str = "exact", **options: Any) -> CodedRig:
        disk_codec = TierCodec(codec)  # type: ignore[arg-type]
        given = {"cpu": 8, "disk": 24, "disk_codec": disk_codec, "keys": keys, **options}
        made.append(CodedRig(tmp_path / "store", **given))
        return made[-1]

    yield one
    for rig in made:
        await rig.check_disk()
        await rig.close()


def disk_bytes(rig: CodedRig) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(rig.path.rglob("*")) if path.is_file())


def in_clear(rig: CodedRig, prompt: Iterable[int]) -> list[int]:
    """Which blocks' token ids are somewhere in the files of the tier."""
    files = disk_bytes(rig)
    return [token for token in prompt if np.full(BLOCK_TOKENS, token, "<u4").tobytes() in files]


async def reopen(rig: CodedRig, keys: RestKeys) -> None:
    rig.keys = keys
    await rig.restart()


@pytest.mark.parametrize("codec", ["exact", "lossless", "int8", "k8v4"])
async def test_encrypted_blocks_come_back(make: MakeRig, codec: str) -> None:
    rig = make(codec=codec)
    rows = await rig.to_disk_alone(PROMPT)
    assert await rig.get(PROMPT) == 3
    errors = rig.trie.errors[rows].copy()
    assert bool(errors.any()) is (codec in ("int8", "k8v4"))
    await rig.restart()
    assert rig.restored == 3
    assert await rig.get(PROMPT) == 3
    assert (rig.trie.errors[rig.rows(PROMPT)] == errors).all()
    assert bool(rig.served_altered) is (codec in ("int8", "k8v4"))
    assert not [problem for problem in [check_integrity(rig.cache)] if problem]


async def test_neither_bytes_nor_prompts_nor_salts_are_on_disk(make: MakeRig) -> None:
    rig = make()
    secret = rig.register("model", salt=b"a salt that only one knows")
    for namespace in (rig.namespace, secret):
        await rig.put(PROMPT, namespace=namespace)
    await rig.cache.write_back.flush()
    files = disk_bytes(rig)
    assert not in_clear(rig, PROMPT)
    assert b"a salt that only one knows" not in files
    for namespace in (rig.namespace, secret):
        content = rig.content(namespace, rig.chain(PROMPT, namespace), 1)
        assert content[:64] not in files and content[-64:] not in files


async def test_without_a_key_they_are_in_clear(make: MakeRig) -> None:
    """The test above would see what it looks for."""
    rig = make(RestKeys())
    secret = rig.register("model", salt=b"a salt that only one knows")
    await rig.to_disk_alone(PROMPT, secret)
    assert in_clear(rig, PROMPT) == PROMPT
    assert b"a salt that only one knows" in disk_bytes(rig)


async def test_keys_rotate(make: MakeRig) -> None:
    rig = make(RestKeys((OLD,)))
    await rig.to_disk_alone(PROMPT)
    await reopen(rig, RestKeys((NEW, OLD)))
    assert await rig.get(PROMPT) == 3
    await rig.to_disk_alone([7, 8])
    usage = rig.store.encryption()
    assert usage.records == {OLD.id: 3, NEW.id: 2} and usage.bytes.keys() == usage.records.keys()
    rig.cache.mover.disk.damaged.drop(rig.trie, np.array(rig.rows(PROMPT)), StorageError("no more wanted"))
    await rig.cache.mover.quiesce()
    assert rig.store.encryption().records == {NEW.id: 2}
    await reopen(rig, RestKeys((NEW,)))
    assert rig.restored == 2 and await rig.get([7, 8]) == 2


async def test_a_missing_key_is_an_error_and_loses_nothing(make: MakeRig) -> None:
    rig = make(RestKeys((OLD,)))
    await rig.to_disk_alone(PROMPT)
    await rig.close()
    before = disk_bytes(rig)
    for wrong in (RestKeys(), RestKeys((OTHER,)), RestKeys((), {"acme": (NEW,)})):
        rig.keys = wrong
        with pytest.raises(MissingKeyError, match=rf"{OLD.name}.*put each of these keys back"):
            rig._open()
    for name in ("slabs", "index"):
        assert any((rig.path / name).iterdir())
    assert disk_bytes(rig) == before
    rig.keys = RestKeys((OTHER, OLD))
    rig._open()
    assert await rig.get(PROMPT) == 3


async def test_encryption_is_turned_on_over_blocks_in_clear_and_off_again(make: MakeRig) -> None:
    rig = make(RestKeys())
    await rig.to_disk_alone([1, 2])
    await reopen(rig, RestKeys((NEW,)))
    await rig.to_disk_alone([1, 2, 3])
    assert await rig.get([1, 2, 3]) == 3
    assert rig.store.encryption().records == {0: 2, NEW.id: 1}
    assert in_clear(rig, [1, 2, 3]) == [1, 2]
    await reopen(rig, RestKeys((), {"acme": (NEW,)}))
    await rig.to_disk_alone([1, 2, 3, 4])
    assert rig.store.encryption().records == {0: 3, NEW.id: 1}
    assert await rig.get([1, 2, 3, 4]) == 4


async def test_a_namespace_in_clear_is_encrypted_at_the_next_start(make: MakeRig) -> None:
    rig = make(RestKeys())
    secret = rig.register("model", salt=b"a salt that only one knows")
    await rig.to_disk_alone(PROMPT, secret)
    await reopen(rig, RestKeys((NEW,)))
    assert rig.store.namespaces().keys() == {secret.id}
    assert all(b"a salt" not in spec for spec in rig.store._index.namespaces().values())


async def test_tenants_have_keys_of_their_own(make: MakeRig) -> None:
    tenants = Tenants()
    rig = make(RestKeys((OLD,), {tenants.default.name: (NEW,)}), tenants=tenants)
    await rig.to_disk_alone(PROMPT)
    assert rig.store.encryption().records == {NEW.id: 3}
    assert rig.store.namespaces()


async def test_a_block_in_the_slot_of_another_one_does_not_open(make: MakeRig) -> None:
    """Whoever writes to the disk exchanges two blocks, with the checksums of what is stored."""
    rig = make()
    rows = await rig.to_disk_alone(PROMPT)
    trie = rig.trie
    for column in (trie.coded_checksums, trie.slots[:, DISK]):
        column[rows[0]], column[rows[1]] = column[rows[1]].copy(), column[rows[0]].copy()
    assert await rig.get(PROMPT) == 0
    assert rig.cache.mover.placement.lost


async def test_bytes_that_were_altered_in_memory_are_found(make: MakeRig) -> None:
    rig = make()
    await rig.put(PROMPT)
    row = rig.rows(PROMPT)[2]
    await rig.cache.mover.checksums.wait(rig.trie, np.array(rig.rows(PROMPT)))
    span = rig.cache.tiers.arena.span(int(rig.trie.slots[row, CPU, 0]), SHAPE.nbytes)
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 1).from_address(span.address))[0] ^= 1
    await rig.cache.write_back.flush()
    rig.forget_memory(PROMPT)
    assert await rig.get(PROMPT) == 2
    assert not in_clear(rig, PROMPT)


async def test_without_threads_blocks_are_encrypted_all_the_same(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OutOfMemoryError("no threads")

    monkeypatch.setattr("prefixd.cache.disk.part_coder.started_threads", refuse)
    rig = make(codec="lossless")
    await rig.to_disk_alone(PROMPT)
    assert rig.store.encryption().bytes.keys() == {NEW.id}
    assert await rig.get(PROMPT) == 3


async def test_a_part_in_clear_of_a_block_with_a_key_is_refused(make: MakeRig) -> None:
    rig = make()
    span = Span(rig.cache.tiers.arena.span(0, 64).address, 64)
    block = NewBlock(b"n" * 8, b"k" * 16, b"", b"toke", 0, [span], encryption=NEW)
    with pytest.raises(StorageError, match="part in clear"):
        rig.store.write([block])
    assert isinstance(block.parts[0], Span) and not isinstance(block.parts[0], DiskPart)


async def test_the_scrubber_and_the_audit_agree(make: MakeRig) -> None:
    rig = make(codec="int8")
    await rig.to_disk_alone(PROMPT)
    await reopen(rig, RestKeys((OTHER, NEW)))
    for row in rig.rows(PROMPT):
        assert await rig.cache.mover.disk.reads.recheck(rig.trie, row, int(rig.trie.generation[row])) is None
    await asyncio.to_thread(rig.store.check_integrity)


@pytest.mark.parametrize("before", [RestKeys(), RestKeys((OLD,))])
async def test_a_key_that_comes_while_parts_are_coded_encrypts_them(
    make: MakeRig, before: RestKeys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(before, codec="lossless", mixed=False)
    coder = rig.cache.mover.coder
    code, after = coder.code, RestKeys((NEW, OLD))

    async def rotate(*args: Any) -> CodedBlocks:
        coded = await code(*args)
        rig.store.keys.replace(after)
        return coded

    monkeypatch.setattr(coder, "code", rotate)
    await rig.to_disk_alone(PROMPT)
    assert "has a part in clear" not in caplog.text
    usage = rig.store.encryption()
    assert usage.records == {NEW.id: 3} and usage.bytes.keys() == {NEW.id} and not in_clear(rig, PROMPT)
    await reopen(rig, RestKeys((NEW,)))
    assert rig.restored == 3 and await rig.get(PROMPT) == 3


@pytest.mark.parametrize("anew", [False, True])
async def test_encrypted_blocks_of_an_index_that_was_set_aside_are_brought_back(make: MakeRig, anew: bool) -> None:
    """`anew`: into an index that never had a block."""
    rig = make(codec="lossless")
    rows = await rig.to_disk_alone(PROMPT)
    rig.store._index.set_copy_aside("a test", 3)
    if anew:
        await rig.close()
        (rig.path / "index" / "data.mdb").unlink()
        rig._open()
    else:
        rig.cache.mover.disk.damaged.drop(rig.trie, np.array(rows), StorageError("no more wanted"))
        await rig.cache.mover.quiesce()
        await rig.restart()
    assert rig.restored == 0
    (found,) = rig.store.set_aside()
    result = salvage(found, rig.store, usable=is_usable)
    assert result.blocks == 3 and not result.lost
    rig.store.adopt(result.rows, result.namespaces, result.pins, result.used_keys, result.used_codecs)
    await rig.restart()
    assert rig.restored == 3 and await rig.get(PROMPT) == 3
    assert rig.store.used_codecs() == [1] and rig.store._index.used_keys() == [NEW.id]
