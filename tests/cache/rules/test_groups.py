"""KV groups and their rules: against the definition, and in a cache with a window group beside full attention."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st

from prefixd.base.errors import InvalidArgumentError
from prefixd.base.rules import rules as in_tokens
from prefixd.cache import (
    Namespace,
    NamespaceSpec,
    PartSpec,
    Reservation,
    check_integrity,
)
from prefixd.cache.index.trie import CPU, DISK
from prefixd.cache.moving.page_victims import has_other_sizes
from prefixd.cache.rules import FullAttention, SlidingWindow
from prefixd.cache.sessions.reservations import ToFill
from tests.rig import BLOCK_TOKENS, PART_BYTES, MakeRig, Rig
from tests.tries import match_rows

FULL, WINDOW = 0, 1  # parts of the namespace `hybrid`
blocks_there = st.lists(st.booleans(), max_size=12).map(lambda found: np.array(found, np.bool_))
rules = st.one_of(st.just(FullAttention()), st.integers(1, 5).map(SlidingWindow))


def hybrid(rig: Rig, window_blocks: int = 2, name: str = "hybrid") -> NamespaceSpec:
    """A part of full attention, and one that needs the last `window_blocks` blocks."""
    window = in_tokens.SlidingWindow(window_blocks * BLOCK_TOKENS + 1)
    parts = (PartSpec("full", 0, PART_BYTES), PartSpec("window", 0, PART_BYTES, window))
    return NamespaceSpec(name, BLOCK_TOKENS, parts)


def window_there(rig: Rig, home: object, prompt: Sequence[int]) -> list[bool]:
    trie = rig.cache.trie(home)  # type: ignore[arg-type]
    rows = trie.nodes(home.root, rig.chain(prompt, home))  # type: ignore[attr-defined]
    return (trie.slots[rows, CPU, WINDOW] >= 0).tolist()


async def test_window_bytes_that_only_shorter_prefixes_need_go_first(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=12)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    await rig.put([1, 2, 3, 4, 5], namespace=home)  # ten slots of twelve
    assert window_there(rig, home, [1, 2, 3, 4, 5]) == [True] * 5
    await rig.put([7, 8], namespace=home)  # four slots: two too many
    assert window_there(rig, home, [1, 2, 3, 4, 5]).count(True) == 3
    assert window_there(rig, home, [1, 2, 3, 4, 5])[3:] == [True, True]
    lease = await rig.lease([1, 2, 3, 4, 5, 6], namespace=home)
    assert lease is not None and len(lease.rows) == 5
    offsets = rig.cache.offsets(lease, (FULL, WINDOW)).astype(np.int64)
    assert (offsets[:, FULL] >= 0).all() and (offsets[:, WINDOW] >= 0).tolist() == [False] * 3 + [True] * 2
    check_integrity(rig.cache)


async def test_a_match_is_the_longest_length_that_every_group_allows(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=20)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    await rig.put([1, 2, 3, 4, 5], namespace=home)
    trie = rig.cache.trie(home)
    rows = trie.nodes(home.root, rig.chain([1, 2, 3, 4, 5], home))
    rig.cache.placement.drop(trie, rows[2:3], rig.cache.tiers.shared, np.array([1 << WINDOW], np.uint8))
    for prompt, expected in (([1, 2, 3, 4, 5], 5), ([1, 2, 3, 4], 2), ([1, 2, 3], 2), ([1, 2], 2), ([1], 1)):
        assert len(await rig.cache.match(home, rig.chain(prompt, home))) == expected
    check_integrity(rig.cache)


async def test_where_prompts_branch_the_window_stays(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=40)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    await rig.put([1, 2, 3, 4, 5, 6, 7], namespace=home)
    trie = rig.cache.trie(home)
    rows = trie.nodes(home.root, rig.chain([1, 2, 3, 4, 5, 6, 7], home))
    assert (trie.expired[rows] != 0).tolist() == [True] * 5 + [False] * 2
    await rig.put([1, 2, 3, 9, 9, 9, 9], namespace=home)  # branches behind block 3
    assert (trie.expired[rows] != 0).tolist() == [True, False, False, True, True, False, False]
    await rig.put([1, 2, 3, 4, 5, 6, 7, 8, 8, 8], namespace=home)
    rows = trie.nodes(home.root, rig.chain([1, 2, 3, 4, 5, 6, 7, 8, 8, 8], home))
    assert (trie.expired[rows] != 0).tolist() == [True, False, False, *[True] * 5, False, False]


async def test_a_lease_holds_what_the_rules_need(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=20)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    await rig.put([1, 2, 3, 4], namespace=home)
    lease = await rig.lease([1, 2, 3, 4], namespace=home)
    assert lease is not None
    trie = lease.trie
    assert trie.holds[lease.rows, CPU].tolist() == [[1, 0], [1, 0], [1, 1], [1, 1]]
    check_integrity(rig.cache)
    rig.cache.release(rig.session, lease.id)
    assert not trie.holds[: trie.rows].any()


async def test_a_registered_rule_is_part_of_the_geometry(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    home, other = rig.cache.register(hybrid(rig)), rig.cache.register(hybrid(rig, window_blocks=3))
    assert home is not other and rig.cache.trie(home) is not rig.cache.trie(other)
    with pytest.raises(InvalidArgumentError, match="sliding window of 0 tokens"):
        rig.cache.register(NamespaceSpec("none", 2, (PartSpec("w", 0, 4096, in_tokens.SlidingWindow(0)),)))
    many = tuple(PartSpec(f"g{n}", 0, 4096, in_tokens.SlidingWindow(2 + 2 * n)) for n in range(9))
    with pytest.raises(InvalidArgumentError, match="9 different rules"):
        rig.cache.register(NamespaceSpec("many", 2, many))


async def test_a_writer_begins_behind_window_bytes_that_it_does_not_have(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=20)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    assert await rig.put([1, 2, 3], namespace=home, parts=[FULL]) == (3, 0)
    chain = rig.chain([1, 2, 3, 4, 5], home)
    whole = await rig.cache.reserve(rig.session, home, chain)
    assert isinstance(whole, Reservation) and (whole.first_block, len(whole.slots)) == (0, 5)
    rig.cache.release(rig.session, whole.id)
    behind = await rig.cache.reserve(rig.session, home, chain, ToFill(first_block=3))
    assert isinstance(behind, Reservation) and (behind.first_block, len(behind.slots)) == (3, 2)
    rig.fill(behind)
    assert await rig.cache.commit(behind, 2) == (2, 0)
    assert await rig.get([1, 2, 3, 4, 5], namespace=home) == 5
    assert await rig.get([1, 2, 3, 4], namespace=home) == 0, "the window before its end is not there"
    check_integrity(rig.cache)


async def test_a_writer_does_not_begin_behind_bytes_that_every_prefix_needs(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=20)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    await rig.put([1], namespace=home)
    await rig.put([1, 2], namespace=home, parts=[WINDOW])
    chain = rig.chain([1, 2, 3], home)
    reservation = await rig.cache.reserve(rig.session, home, chain, ToFill(first_block=2))
    assert isinstance(reservation, Reservation) and reservation.first_block == 1
    assert len(reservation.slots) == 1, "no other block leaves for slots that nobody can fill"
    with pytest.raises(InvalidArgumentError, match="first_block is 4, but token_ids has 3 full blocks"):
        await rig.cache.reserve(rig.session, home, chain, ToFill(first_block=4))


async def test_what_waits_for_the_disk_is_counted_right_where_prompts_branch(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=64, disk=64)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    await rig.put([1, 2, 3, 4, 5, 6, 7], namespace=home)
    await rig.put([1, 2, 3, 9, 9], namespace=home)
    await rig.get([1, 2, 3, 4], namespace=home)
    trie = rig.cache.trie(home)
    waiting = rig.cache.placement.to_write(trie, np.arange(trie.rows))
    assert rig.cache.mover.queued == (np.count_nonzero(waiting), trie.group_bytes[waiting].sum())


async def test_the_disk_has_what_prefixes_need_and_a_restart_finds_it(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=64, disk=64)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    await rig.put([1, 2, 3, 4, 5], namespace=home, durable=True)
    await rig.put([1, 2, 3, 4, 5, 6, 7], namespace=home, durable=True)
    await rig.check_disk()
    await rig.restart()
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    for prompt, expected in (([1, 2, 3, 4, 5, 6, 7], 7), ([1, 2, 3, 4, 5], 5), ([1, 2, 3], 0)):
        assert await rig.get(prompt, namespace=home) == expected
    check_integrity(rig.cache)


async def test_a_model_of_windows_alone_leaves_records_without_bytes_on_disk(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=64, disk=64)
    window = in_tokens.SlidingWindow(2 * BLOCK_TOKENS + 1)
    spec = NamespaceSpec("windows", BLOCK_TOKENS, (PartSpec("window", 0, PART_BYTES, window),))
    home = rig.cache.register(spec)
    rig.session.namespaces[home.id] = home
    await rig.put([1, 2, 3, 4, 5], namespace=home, durable=True)
    assert rig.store is not None and rig.store.used_bytes == 2 * PART_BYTES
    await rig.check_disk()
    await rig.restart()
    home = rig.cache.register(spec)
    rig.session.namespaces[home.id] = home
    assert await rig.get([1, 2, 3, 4, 5], namespace=home) == 5
    check_integrity(rig.cache)


async def test_blocks_without_window_bytes_go_down_before_they_are_dropped(make_rig: MakeRig) -> None:
    """Their records on disk may stand there already, without bytes, for those that continue them."""
    rig = make_rig(cpu=12, disk=64)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    prompt = [1, 2, 3, 4, 5]
    await rig.put(prompt, namespace=home)
    for other in ([7, 8], [9, 10, 11], [12, 13, 14, 15]):
        await rig.put(other, namespace=home)
        assert await rig.get(prompt, namespace=home) == 5
    assert not rig.cache.mover.lost
    check_integrity(rig.cache)


async def test_a_record_without_bytes_does_not_stand_for_a_pinned_block(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=12, disk=4)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    await rig.put([1, 2, 3, 4, 5], namespace=home)
    trie = rig.cache.trie(home)
    rows = trie.nodes(home.root, rig.chain([1, 2, 3, 4, 5], home))
    trie.pinned[rows] = True
    await rig.cache.mover.write(
        trie, rows[3:], rig.cache.tiers.shared
    )  # the disk is full of the last two, and knows of the others
    assert (trie.any_part[rows] & (1 << DISK)).all() and not trie.there[rows[:3], DISK].any()
    rig.cache.tiers.shared.free(await rig.cache.mover.slots.allocate(rig.cache.tiers.shared, (PART_BYTES,), 12))
    assert len(match_rows(trie, home.root, rig.chain([1, 2, 3, 4, 5], home))) == 5
    check_integrity(rig.cache)


async def test_who_needs_more_of_a_block_than_others_bring_gets_it(make_rig: MakeRig) -> None:
    """Another lease brings up the full attention of blocks whose window bytes a shorter prefix needs, too."""
    rig = make_rig(cpu=64, disk=64)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    await rig.put([1, 2, 3], namespace=home, durable=True)
    await rig.put([1, 2, 3, 4, 5, 6, 7], namespace=home, durable=True)
    trie = rig.cache.trie(home)
    rig.cache.placement.drop(trie, trie.copies(CPU)[::-1], rig.cache.tiers.shared)
    rig.cache.placement.drop(trie, np.arange(trie.rows), rig.cache.tiers.shared, np.full(trie.rows, 3, np.uint8))
    assert await asyncio.gather(rig.get([1, 2, 3, 4, 5, 6, 7], namespace=home), rig.get([1, 2, 3], namespace=home)) == [
        7,
        3,
    ]
    check_integrity(rig.cache)


async def test_sizes_are_told_apart_whatever_lies_on_other_tiers(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=64)
    await rig.put([1, 2], durable=True)
    await rig.put([3, 4])
    rig.cache.placement.drop(rig.trie, rig.rows([1, 2])[::-1], rig.cache.tiers.shared)
    assert has_other_sizes(rig.cache.tries, CPU, [3 * PART_BYTES])
    assert not has_other_sizes(rig.cache.tries, CPU, [PART_BYTES])


async def test_a_restart_finds_blocks_of_which_the_disk_has_different_parts(make_rig: MakeRig) -> None:
    """A block and the one before it are of different kinds, either way round, and branches are among them."""
    rig = make_rig(cpu=64, disk=128)
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    for prompt in ([1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8], [5, 5, 5, 5]):
        await rig.put(prompt, namespace=home, durable=True)
    await rig.restart()
    home = rig.cache.register(hybrid(rig))
    rig.session.namespaces[home.id] = home
    check_integrity(rig.cache)
    assert await rig.get([1, 2, 3, 4, 5, 6, 7, 8], namespace=home) == 8
    assert await rig.get([1, 2, 7, 8, 9], namespace=home) == 5


async def test_a_restart_tells_apart_namespaces_that_differ_in_their_rules_alone(make_rig: MakeRig) -> None:
    """Their blocks have the same sizes, so on disk they look alike."""
    rig = make_rig(cpu=64, disk=128)
    window = in_tokens.SlidingWindow(2 * BLOCK_TOKENS + 1)
    rules = {"full": None, "window": window, "state": in_tokens.RecurrentState()}
    specs = [NamespaceSpec(name, BLOCK_TOKENS, (PartSpec("kv", 0, PART_BYTES, rule),)) for name, rule in rules.items()]

    def homes() -> list[Namespace]:
        made = [rig.cache.register(spec) for spec in specs]
        rig.session.namespaces.update({home.id: home for home in made})
        return made

    for home in homes():
        await rig.put([1, 2, 3, 4], namespace=home, durable=True)
    await rig.restart()
    check_integrity(rig.cache)
    for home in homes():
        assert await rig.get([1, 2, 3, 4, 5], namespace=home) == 4
