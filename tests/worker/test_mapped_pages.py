"""Pages of several frames: where they lie, who has them, and what goes when memory is short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from prefixd.worker.mapped_pages import NO_PAGE, MappedPages
from prefixd_swap.errors import MemoryMisuseError, OutOfMemoryError
from prefixd_swap.vmem import FramePool, VirtualMemory, create_memory

FRAMES = 12
PAGE = 4096


@pytest.fixture
def pool() -> Iterator[FramePool]:
    with create_memory("cpu", PAGE) as memory:
        pool = FramePool(memory, PAGE, FRAMES)
        for frame in range(FRAMES):
            pool._window.tensor((PAGE,), torch.uint8, offset=frame * PAGE).fill_(frame)
        yield pool
        pool.close()


def pages_of(pool: FramePool, page_frames: int) -> MappedPages:
    return MappedPages(pool.memory, pool.table, page_frames=page_frames, page_bytes=page_frames * PAGE, frames=FRAMES)


def held(pages: MappedPages, page: int) -> list[int]:
    """The frames that a page's bytes come from."""
    view = pages.tensor(
        (FRAMES // pages.page_frames, pages.page_frames, PAGE), torch.uint8, (pages.page_bytes, PAGE, 1)
    )
    return [int(number) for number in view[page, :, 0]]


def test_a_page_holds_its_frames_in_order_wherever_they_are(pool: FramePool) -> None:
    pages = pages_of(pool, 3)
    numbers = pages.add([7, 2, 11, -1, -1, -1, 0, 5, 3])
    assert numbers[1] == NO_PAGE and len(set(numbers)) == 3
    assert [held(pages, page) for page in (numbers[0], numbers[2])] == [[7, 2, 11], [0, 5, 3]]
    assert pages.add([7, 2, 11]) == numbers[:1] and pages.shared == 1
    pages.remove(numbers[:1])
    assert pages.shared == 0
    with pytest.raises(MemoryMisuseError, match="a request has"):
        pages.add([1, 4, 6, 2, 8, 9])
    with pytest.raises(MemoryMisuseError, match="end it first"):
        pages.forget([5])
    pages.remove(numbers)
    assert not pages.users, "what could not be had as a whole is not kept in parts"
    again = pages.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 10, 11])
    assert [held(pages, page) for page in again] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 10, 11]]
    pages.remove(again)
    pages.forget(range(FRAMES))
    assert not pages.mapped
    pages.end()


def test_without_a_mapping_left_the_pages_that_nobody_has_go_in_all_groups(
    pool: FramePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [pages_of(pool, 2), pages_of(pool, 1)]
    for pages in both:
        pages.neighbours = both
    used, unused = both[0].add([0, 1]), both[0].add([2, 3])
    both[0].remove(unused)
    both[1].remove(both[1].add([4, 5]))
    limit = sum(len(pages.mapped) for pages in both)

    own = type(pool.memory)._map

    def counted(memory: VirtualMemory, *arguments: object) -> object:
        if sum(len(pages.mapped) for pages in both) >= limit:
            raise OutOfMemoryError("no mapping left")
        return own(memory, *arguments)

    monkeypatch.setattr(type(pool.memory), "_map", counted)
    fresh = both[1].add([9])
    assert list(both[0].mapped) == used and list(both[1].mapped) == fresh == [9]
    assert held(both[0], used[0]) == [0, 1]
    for pages in both:
        pages.end()
