"""Hosts with codecs of their own that share one store, and a judge who looks at every object there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from prefixd.base.codec_names import CodecName
from prefixd.cache.coding.namespace_codings import EXACT, TierCodec
from prefixd.cache.remote import Remote, RemoteOptions
from prefixd.cache.remote.digests import geometry_digest, root_digest
from prefixd_swap import Span
from prefixd_swap.codecs.coding import Coding
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import StorageError
from prefixd_swap.stores import BlockIdentity
from prefixd_swap.stores.sealed import Seal
from prefixd_swap.tiers import PartRead, RemotePart, part_object_name
from prefixd_swap.tiers.remote.part_objects import open_object, read_of_part
from tests.cache.disk.coded_rig import SHAPE, CodedRig, difference
from tests.cache.remote.memory_store import MemoryStore
from tests.rig import WAIT_S

SEAL = Seal(b"a secret of tests")
CODINGS: tuple[Coding | None, ...] = (
    None,
    Coding(find_codec("lossless"), SHAPE),
    Coding(find_codec("int8"), SHAPE),
    Coding(find_codec("k8v4"), SHAPE),
)


def host(
    path: Path,
    objects: dict[bytes, bytes],
    codec: CodecName | TierCodec,
    *,
    disk_codec: CodecName = "exact",
    **options: Any,
) -> CodedRig:
    """A host whose store has `objects`."""
    tier = codec if isinstance(codec, TierCodec) else TierCodec(codec)
    given = {"cpu": 16, "mixed": False, "seal": SEAL, **options}
    return CodedRig(
        path,
        remote=MemoryStore(objects),
        options=RemoteOptions(lookup_s=WAIT_S, codec=tier),
        disk_codec=TierCodec(disk_codec) if disk_codec != "exact" else EXACT,
        **given,
    )


@asynccontextmanager
async def hosts(path: Path, *codecs: CodecName | TierCodec, **options: Any) -> Any:
    """Hosts of one store, a list, and the store's objects."""
    objects: dict[bytes, bytes] = {}
    made = [host(path / str(at), objects, codec, **options) for at, codec in enumerate(codecs)]
    try:
        yield made, objects
    finally:
        for rig in made:
            await rig.close()


def remote_of(rig: CodedRig) -> Remote:
    assert rig.cache.mover.remote is not None
    return rig.cache.mover.remote


async def share(rig: CodedRig) -> None:
    assert await remote_of(rig).sharing.write_all()


def block_of(rig: CodedRig, prompt: Sequence[int]) -> BlockIdentity:
    """The last block of a prompt, as objects name it."""
    spec, chain = rig.namespace.spec, rig.chain(prompt)
    keys, depth = SEAL.keys(spec.salt), len(prompt) - 1
    digest = keys.chain(root_digest(keys, spec), map(chain.block, range(len(prompt))))[-1]
    tokens = np.asarray(chain.block(depth)).tobytes()
    return BlockIdentity(keys, digest, rig.namespace.digest, geometry_digest(spec), depth, tokens)


def name_of(rig: CodedRig, prompt: Sequence[int], coding: Coding | None) -> bytes:
    return part_object_name(block_of(rig, prompt).digest, 0, coding)


def open_at(
    rig: CodedRig, objects: dict[bytes, bytes], prompt: Sequence[int], coding: Coding | None
) -> tuple[PartRead, bytes] | None:
    """What is in the store of the last block of a prompt, under the name of `coding`; None: nothing that opens."""
    block, memory = block_of(rig, prompt), np.empty(SHAPE.nbytes, np.uint8)
    part = RemotePart(0, Span(memory.ctypes.data, memory.nbytes), coding)
    read = read_of_part(SEAL, block, part)
    data = objects.get(read.name)
    if data is None or len(data) > read.nbytes:
        return None
    read.into[0][:] = data[: SEAL.head_bytes].ljust(SEAL.head_bytes, b"\0")
    read.into[1][: max(len(data) - SEAL.head_bytes, 0)] = data[SEAL.head_bytes :]
    try:
        return open_object(SEAL, block, part, read, len(data)), memory.tobytes()
    except StorageError:
        return None


def judge(rig: CodedRig, objects: dict[bytes, bytes], longest: int = 5) -> dict[str, int]:
    """Looks at every object of prompts of 0 and 1: under the name of exact bytes there are exact bytes, and under that
    of a lossy codec what is as close to the exact ones as it says. Counts objects by what they are."""
    found = {"exact": 0, "lossy": 0}
    for prompt, coding in product(prompts(longest), CODINGS):
        opened = open_at(rig, objects, prompt, coding)
        if opened is None:
            continue
        (part, data), exact = opened, rig.content(rig.namespace, rig.chain(prompt), len(prompt) - 1)
        if part.errors is None:
            assert data == exact, f"{prompt} under the name of {coding}"
        else:
            assert coding is not None and coding.codec.lossy, f"{prompt} under the name of {coding}"
            assert difference(data, exact) <= part.errors[0] * 1.2
        found["exact" if part.errors is None else "lossy"] += 1
    return found


def prompts(longest: int) -> Iterator[list[int]]:
    for length in range(1, longest + 1):
        for prompt in product((0, 1), repeat=length):
            yield list(prompt)
