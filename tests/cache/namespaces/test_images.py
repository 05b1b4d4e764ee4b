"""Embeddings of images in a namespace of their own: whole or of no use, and evicted image by image."""

from __future__ import annotations

import numpy as np

from prefixd.base.rules.rules import VisionEmbedding
from prefixd.cache import Namespace, NamespaceSpec, PartSpec, check_integrity
from tests.rig import BLOCK_TOKENS, PART_BYTES, MakeRig, Rig

BLOCKS = 4  # of an image


def image(number: int) -> list[int]:
    """The prompt that stands for an image: the hash of its content, and the number of each piece."""
    return [1000 * number + piece for piece in range(BLOCKS)]


def open_images(rig: Rig) -> Namespace:
    parts = (PartSpec("vision", 0, PART_BYTES, VisionEmbedding()),)
    home = rig.cache.register(NamespaceSpec("images", BLOCK_TOKENS, parts))
    rig.session.namespaces[home.id] = home
    return home


async def found(rig: Rig, home: Namespace, number: int) -> int:
    """Blocks of the image that are matched."""
    return len(rig.rows(image(number), home))


async def test_eviction_takes_one_image_before_it_begins_another(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=5 * BLOCKS)
    home = open_images(rig)
    for number in range(5):
        await rig.put(image(number), namespace=home)
    await rig.get(image(0), namespace=home)  # image 1 is the oldest now
    for slots in range(1, 3 * BLOCKS):
        rig.cache.tiers.shared.free(await rig.cache.mover.slots.allocate(rig.cache.tiers.shared, (PART_BYTES,), slots))
        there = [await found(rig, home, number) for number in range(5)]
        in_part = [blocks for blocks in there if 0 < blocks < BLOCKS]
        assert len(in_part) <= 1 and there[0] == BLOCKS and there[1] <= there[2] <= there[3], there
    check_integrity(rig.cache)


async def test_an_image_with_a_hole_is_not_there(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2 * BLOCKS)
    home = open_images(rig)
    await rig.put(image(1), namespace=home)
    trie = rig.cache.trie(home)
    rows = trie.nodes(home.root, rig.chain(image(1), home))
    rig.cache.placement.drop(trie, rows[1:2], rig.cache.tiers.shared, np.array([1], np.uint8))
    assert await found(rig, home, 1) == 0
    assert await rig.put(image(1), namespace=home) == (1, 3), "what is missing is filled in"
    assert await rig.get(image(1), namespace=home) == BLOCKS
    check_integrity(rig.cache)


async def test_an_image_is_found_whatever_else_is_stored(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4 * BLOCKS)
    home = open_images(rig)
    await rig.put([7, 7, 7])
    await rig.put(image(1), namespace=home)
    await rig.put(image(2), namespace=home)
    assert [await rig.get(image(number), namespace=home) for number in (1, 2, 3)] == [BLOCKS, BLOCKS, 0]
