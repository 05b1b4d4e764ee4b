"""Pages of several frames side by side: where they lie, who has them, and what may go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from prefixd.worker.memory.frame_window import NO_PAGE, FrameWindow
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import FramePool, create_memory
from prefixd_swap.vmem.fence import HostFence, Work

FRAMES, MOST = 12, 16
FRAME = 4096


@pytest.fixture
def pool() -> Iterator[FramePool]:
    with create_memory("cpu", FRAME) as memory:
        pool = FramePool(memory, FRAME, FRAMES, MOST)
        for frame in range(FRAMES):
            mark(pool, frame)
        yield pool
        pool.close()


def mark(pool: FramePool, frame: int) -> None:
    pool._window.tensor((FRAME,), torch.uint8, offset=frame * FRAME).fill_(frame)


def window_of(pool: FramePool) -> FrameWindow:
    return FrameWindow(pool.memory, pool.table, FRAME, MOST)


def test_pages_of_groups_begin_at_any_frame_and_share_the_window(pool: FramePool) -> None:
    window = window_of(pool)
    narrow, wide = window.pages(2), window.pages(3)
    for pages, starts in ((narrow, (0, 1, 10)), (wide, (2, 5, 9))):
        view = window.tensor((pages.count, pages.width, FRAME), torch.uint8, (FRAME, FRAME, 1))
        for first in starts:
            assert view[first, :, 7].tolist() == list(range(first, first + pages.width))
    assert (narrow.count, wide.count) == (MOST - 1, MOST - 2)
    window.end()
    window.end()


def test_a_sequence_is_closed_when_the_device_has_done_what_was_queued(pool: FramePool) -> None:
    """A pass that was queued ahead may still write into its pages, which others get then."""

    class Device(HostFence):
        def __init__(self) -> None:
            self.waiting: list[Work] = []

        def retire(self, streams: Iterable[int], work: Work) -> None:
            self.waiting.append(work)

        def poll(self, wait: bool = False) -> int:
            for work in self.waiting if wait else ():
                work()
            return 0

    window = window_of(pool)
    window._fence = Device()
    kv = PagedKv(window, KvGeometry(1, 1, 128, "float32", FRAME // 1024), max_tokens=64)
    closed: list[str] = []
    kv.close(kv.open([3, 4]), lambda: closed.append("closed"))
    kv.poll()
    assert not closed and not kv.pages.users
    kv.poll(wait=True)
    assert closed == ["closed"]
    window.end()


def test_pages_that_a_sequence_has_do_not_go(pool: FramePool) -> None:
    window = window_of(pool)
    narrow, wide = window.pages(2), window.pages(3)
    narrow.add([0, 4, NO_PAGE])
    narrow.add([4])
    wide.add([6])
    assert narrow.shared == 1 and narrow.users == {0: 1, 4: 2} and wide.shared == 0
    with pytest.raises(MemoryMisuseError, match="frames 4 to 5 are to go, but a request has them"):
        window.forget([5, 9])
    with pytest.raises(MemoryMisuseError, match="frames 6 to 8 are to go"):
        window.forget([8, 9])
    assert window.has(9, 1), "nothing goes when one may not"
    with pytest.raises(MemoryMisuseError, match="a page of 3 frames from frame 10 on does not exist"):
        wide.add([3, 10])
    assert wide.users == {6: 1}, "what could not be had as a whole is not kept in parts"
    narrow.remove([0, 4, NO_PAGE])
    assert narrow.shared == 0 and narrow.users == {4: 1}
    window.forget([0, 1])
    assert not window._mapped[:2].any() and window._mapped[2:FRAMES].all()
    window.end()


def test_frames_that_come_later_are_mapped_when_they_are_used(pool: FramePool) -> None:
    window = window_of(pool)
    pages = window.pages(2)
    with pytest.raises(MemoryMisuseError, match="does not exist"):
        pages.add([12])
    with pytest.raises(MemoryMisuseError, match="does not exist"):
        pages.add([MOST - 1])
    pool.admit(pool.create(3))
    for frame in range(FRAMES, FRAMES + 3):
        mark(pool, frame)
    pages.add([13, 11])
    view = window.tensor((pages.count, 2, FRAME), torch.uint8, (FRAME, FRAME, 1))
    assert view[13, :, 0].tolist() == [13, 14] and view[11, :, 0].tolist() == [11, 12]
    window.end()
