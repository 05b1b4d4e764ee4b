"""What lies on disk under one format version has the same bytes in every version of prefixd that reads it.

A change here makes caches of users unreadable or unfindable: raise `VERSION` in `slab/data_directory.py`
(docs/upgrades.md).
"""

from __future__ import annotations

import msgspec

from prefixd.base.rules.rules import SlidingWindow
from prefixd.cache import BlockChain, NamespaceSpec, PartSpec
from prefixd.cache.namespaces import namespace_digest
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.padded_rows import PaddedRows
from prefixd_swap.slab.data_directory import RAW_VERSION, VERSION
from prefixd_swap.slab.index.block_record import (
    BlockRecord,
    DiskPart,
    NewBlock,
    decode_record,
    encode_record,
    index_key,
)

RECORD = bytes.fromhex(
    "03000000"
    "0200"
    "0100"
    "101112131415161718191a1b1c1d1e1f"  # depth, parts, has a parent, parent
    "0500000000000000"
    "0010000000000000"
    "8877665544332211"  # slot, bytes, checksum
    "0000000000000000"
    "0000000000000000"
    "0000000000000000"  # a part that is not on disk
    "07000000"
    "09000000"  # token ids
)


def test_the_version_that_these_bytes_belong_to() -> None:
    assert (RAW_VERSION, VERSION) == (2, 3)


def test_a_record() -> None:
    namespace, key, parent = b"namespac", bytes(range(16)), bytes(range(16, 32))
    tokens = (7).to_bytes(4, "little") + (9).to_bytes(4, "little")
    parts = (DiskPart(5, 4096, 0x1122334455667788), None)
    assert encode_record(NewBlock(namespace, key, parent, tokens, 3, [None, None]), parts) == RECORD
    assert decode_record(index_key(namespace, key), RECORD) == BlockRecord(namespace, key, parent, tokens, parts, 3)


def test_a_record_of_coded_parts() -> None:
    namespace, key, parent = b"namespac", bytes(range(16)), bytes(range(16, 32))
    parts = (DiskPart(5, 4096, 0x1122334455667788), DiskPart(9, 0x1234, 0x99, coded=True))
    written = bytes.fromhex(
        "03000000"
        "0200"
        "0300"
        "101112131415161718191a1b1c1d1e1f"  # depth, parts, has a parent and errors, parent
        "0500000000000000"
        "0010000000000000"
        "8877665544332211"  # slot, bytes, checksum
        "0900000000000000"
        "3412000000000040"
        "9900000000000000"  # slot, stored bytes of a coded part, checksum of these
        "0000803e"
        "0000003e"  # largest and RMS error: 0.25, 0.125
        "07000000"  # token id
    )
    tokens = (7).to_bytes(4, "little")
    block = NewBlock(namespace, key, parent, tokens, 3, [None, None], errors=(0.25, 0.125))
    assert encode_record(block, parts) == written
    record = BlockRecord(namespace, key, parent, tokens, parts, 3, (0.25, 0.125))
    assert decode_record(index_key(namespace, key), written) == record


def test_block_keys() -> None:
    chain = BlockChain(bytes(range(32)), 4, 7)
    assert chain.key(0).hex() == "dcc59ef29d2ad371d5a8d2000d3cbb72"
    assert chain.key(1).hex() == "8e69e7abacc3df5f2a5a2fdf48727c7e"


def test_a_namespaces_id() -> None:
    parts = (PartSpec("full", 0, 64), PartSpec("window", 1, 32, SlidingWindow(9)))
    spec = NamespaceSpec("model", 4, parts, b"salt", "bfloat16", "token")
    assert namespace_digest(spec).hex() == "ed289abfc73ddfdb"


def test_ids_of_namespaces_with_shapes_and_a_codec() -> None:
    shape = PartShape("bfloat16", 1, 4, 2, 2, ("layer", "kv", "token", "head", "channel"))
    padded = PaddedRows(64, 32, 128)
    parts = (PartSpec("full", 0, 64, shape=shape), PartSpec("window", 1, 64, SlidingWindow(9), padded, shape))
    spec = NamespaceSpec("model", 4, parts, b"salt", "bfloat16", "token")
    assert namespace_digest(spec).hex() == "bfc81f0532819845"
    assert namespace_digest(msgspec.structs.replace(spec, codec="int8")).hex() == "45d1607161716a4c"


def test_a_namespace_without_a_codec_is_encoded_as_before_there_were_codecs() -> None:
    spec = NamespaceSpec("model", 4, (PartSpec("full", 0, 64),), b"salt", "bfloat16", "token")
    assert msgspec.msgpack.decode(spec.encoded()) == [
        "default",
        False,
        "model",
        b"salt",
        4,
        "bfloat16",
        "token",
        [["full", 0, 64, None]],
    ]
