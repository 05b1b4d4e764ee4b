"""What several models share below their dispatchers: the size of frames, the tier's making, the line for frames."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tests.hello
from prefixd.base.errors import ConfigError, UnavailableError
from prefixd.base.rules.rules import RecurrentState, SlidingWindow
from prefixd.cache import TieredCache
from prefixd.serving.dispatch.capacity.tier_share import TierShare
from prefixd.serving.models import gpu_memory as gpu_memory_module
from prefixd.serving.models.gpu_memory import GpuMemory, common_frame_bytes
from prefixd.serving.models.models import Models
from prefixd.settings import Settings
from prefixd.worker_protocol.errors import ProtocolError
from prefixd.worker_protocol.protocol import GroupShape, Hello
from prefixd_swap import FramePool, VirtualMemory, create_memory
from prefixd_swap.vmem import HostMemory
from tests.waiting import WAIT_S, until


def hello(frame_bytes: int, *groups: GroupShape, chunk_bytes: int = 4096) -> Hello:
    some = {"groups": groups} if groups else {}
    return tests.hello.hello(frame_bytes=frame_bytes, chunk_bytes=chunk_bytes, **some)


HYBRID = hello(
    8192, GroupShape("window-8", SlidingWindow(8), 2, 2), GroupShape("state", RecurrentState(), 1, 3), chunk_bytes=8192
)


def test_a_frame_is_the_largest_that_divides_those_of_all_models() -> None:
    assert common_frame_bytes([hello(12288)]) == 12288
    assert common_frame_bytes([hello(12288), HYBRID]) == 4096
    assert common_frame_bytes([hello(46 << 20), hello(18 << 20)]) == 2 << 20, "2 MiB chunks stay whole"


def test_a_model_in_smaller_frames_takes_more_of_them() -> None:
    scaled = HYBRID.in_frames(4096)
    assert [group.frames for group in scaled.groups] == [4, 6]
    assert (scaled.frame_bytes, scaled.block_frames, scaled.state_frames) == (4096, 4, 6)
    assert HYBRID.in_frames(8192) == HYBRID
    with pytest.raises(ProtocolError, match="frames of 12288 bytes do not fill one of 8192"):
        HYBRID.in_frames(12288)


def gpu_memory(cache: TieredCache, tmp_path: Path, nbytes: int | str = 1 << 20, **elastic: int) -> GpuMemory:
    settings = Settings.model_validate(
        {"data_dir": tmp_path, "gpu": {"device": "cpu", **(elastic or {"bytes": nbytes})}, "worker": {"embedded": True}}
    )
    return GpuMemory(settings, "cpu", cache, ["a", "b"])


@pytest.fixture
async def gpu(cache: TieredCache, tmp_path: Path) -> AsyncIterator[GpuMemory]:
    made = gpu_memory(cache, tmp_path)
    yield made
    made.stop_making()
    await made.close()


async def test_the_tier_is_made_when_all_models_are_known(gpu: GpuMemory, cache: TieredCache) -> None:
    waiting = asyncio.create_task(gpu.frames_for("a", hello(12288)))
    await asyncio.sleep(0.01)
    assert not waiting.done() and not cache.tiers.compute.capacity_bytes
    async with asyncio.timeout(WAIT_S):
        pool = await gpu.frames_for("b", HYBRID)
        assert await waiting is pool is cache.tiers.frames
    assert (pool.frame_bytes, pool.memory.chunk_bytes, pool.capacity) == (4096, 4096, 256)
    assert await gpu.frames_for("a", hello(12288)) is pool, "a successor gets the same"
    pool.check_integrity()


async def test_a_model_that_is_given_up_is_not_waited_for(gpu: GpuMemory) -> None:
    waiting = asyncio.create_task(gpu.frames_for("a", hello(12288)))
    await asyncio.sleep(0.01)
    gpu.leave_out("b")
    gpu.leave_out("b")
    assert (await asyncio.wait_for(waiting, WAIT_S)).frame_bytes == 12288


async def test_nobody_waits_when_the_daemon_ends(gpu: GpuMemory) -> None:
    waiting = asyncio.create_task(gpu.frames_for("a", hello(12288)))
    await asyncio.sleep(0.01)
    gpu.stop_making()
    with pytest.raises(UnavailableError, match="ending"):
        await asyncio.wait_for(waiting, WAIT_S)


async def ended(waiting: asyncio.Task[FramePool]) -> None:
    """What the supervisor of a worker that dies does."""
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_successor_of_a_worker_that_died_waiting_is_waited_for(gpu: GpuMemory) -> None:
    first = asyncio.create_task(gpu.frames_for("a", hello(12288)))
    await asyncio.sleep(0.01)
    await ended(first)
    other = asyncio.create_task(gpu.frames_for("b", HYBRID))
    await asyncio.sleep(0.01)
    assert not other.done(), "nobody speaks for a"
    async with asyncio.timeout(WAIT_S):
        pool = await gpu.frames_for("a", hello(20480))
        assert await other is pool and pool.frame_bytes == 4096
    with pytest.raises(ConfigError, match="the model changed while the daemon ran; restart the daemon"):
        await gpu.frames_for("a", hello(12288))


async def test_a_model_that_died_waiting_and_is_given_up_has_no_say_in_the_tier(gpu: GpuMemory) -> None:
    first = asyncio.create_task(gpu.frames_for("a", hello(12288)))
    await asyncio.sleep(0.01)
    await ended(first)
    gpu.leave_out("a")
    pool = await asyncio.wait_for(gpu.frames_for("b", HYBRID), WAIT_S)
    assert pool.frame_bytes == HYBRID.frame_bytes, "not the 4096 that it would share with a"


async def test_a_worker_that_dies_while_the_tier_is_made_takes_it_from_nobody(
    gpu: GpuMemory, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def create(*arguments: Any) -> VirtualMemory:
        begun.set()
        assert go_on.wait(WAIT_S)
        return create_memory(*arguments)

    monkeypatch.setattr(gpu_memory_module, "create_memory", create)
    first = asyncio.create_task(gpu.frames_for("a", hello(12288)))
    other = asyncio.create_task(gpu.frames_for("b", HYBRID))
    async with asyncio.timeout(WAIT_S):
        await until(begun.is_set)
        await ended(first)
        go_on.set()
        pool = await other
        assert await gpu.frames_for("a", hello(12288)) is pool, "its successor"
    pool.check_integrity()


async def test_the_smallest_request_has_to_fit(cache: TieredCache, tmp_path: Path) -> None:
    gpu = gpu_memory(cache, tmp_path, 64 << 10)
    gpu.leave_out("b")
    why = (
        r"holds 8 frames of 8192 bytes, and a request of a needs at least 10, 81920 bytes; raise gpu.bytes to 81920 or"
    )
    with pytest.raises(ConfigError, match=why):
        await asyncio.wait_for(gpu.frames_for("a", HYBRID), WAIT_S)
    await gpu.close()


async def test_only_the_model_that_does_not_fit_is_refused(cache: TieredCache, tmp_path: Path) -> None:
    gpu = gpu_memory(cache, tmp_path, 64 << 10)
    refused = asyncio.create_task(gpu.frames_for("a", HYBRID))
    async with asyncio.timeout(WAIT_S):
        pool = await gpu.frames_for("b", hello(12288))
        assert (pool.frame_bytes, pool.capacity) == (12288, 5), "frames of its own"
        for _ in range(2):
            with pytest.raises(
                ConfigError, match=r"gpu.bytes = 65536 holds 16 frames of 4096 bytes, and a request of a "
            ):
                await refused
            refused = asyncio.create_task(gpu.frames_for("a", HYBRID))  # a successor is refused too
        with pytest.raises(ConfigError):
            await refused
    await gpu.close()


async def test_a_model_whose_weights_leave_no_memory_leaves_it_to_the_other(
    cache: TieredCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostMemory, "available_bytes", lambda _: 8 << 20)
    gpu = gpu_memory(cache, tmp_path, "auto")
    large = msgspec.structs.replace(hello(12288), weights_bytes=1 << 30)
    refused = asyncio.create_task(gpu.frames_for("a", large))
    async with asyncio.timeout(WAIT_S):
        pool = await gpu.frames_for("b", HYBRID)
        why = (
            r"gpu.bytes = auto, -\d+ bytes, holds 0 frames .* a request of a .*; free memory on cpu, where its weights "
        )
        with pytest.raises(ConfigError, match=why + "take 1073741824 bytes, or lower worker.block_tokens"):
            await refused
    left = (8 << 20) - cache.tiers.arena.untouched_bytes()
    assert pool.capacity == int(0.9 * left) // HYBRID.frame_bytes, "with nothing set aside for a's weights"
    await gpu.close()


async def test_each_model_that_does_not_fit_hears_of_its_own_need(cache: TieredCache, tmp_path: Path) -> None:
    gpu = gpu_memory(cache, tmp_path, 16 << 10)
    answers = await asyncio.wait_for(
        asyncio.gather(gpu.frames_for("a", HYBRID), gpu.frames_for("b", hello(12288)), return_exceptions=True),
        WAIT_S,
    )
    assert [str(answer).partition(" a request of ")[2].partition(";")[0] for answer in answers] == [
        "a needs at least 20, 81920 bytes",
        "b needs at least 2, 24576 bytes",
    ]
    assert not cache.tiers.compute.capacity_bytes
    await gpu.close()


@pytest.mark.parametrize(
    ("elastic", "why"),
    [
        ({"most_bytes": 1 << 30}, r"gpu.most_bytes = 1073741824, and cpu has 134217728 bytes in all; lower it, or set"),
        ({"least_bytes": 100 << 20}, r"gpu.least_bytes = 104857600 is above .* now, \d+ \(gpu.most_bytes = auto\)"),
        (
            {"least_bytes": 1 << 20, "reserve_bytes": 128 << 20},
            r"gpu.reserve_bytes = 134217728 is to stay free, and .* has 1044480 bytes at least, but cpu has 134217728 ",
        ),
        (
            {"reserve_bytes": 1 << 40, "least_bytes": 0},
            r"gpu.reserve_bytes = 1099511627776 .* has 24576 bytes at least",
        ),
    ],
)
async def test_a_tier_that_grows_has_to_fit_the_device(
    cache: TieredCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elastic: dict[str, int], why: str
) -> None:
    monkeypatch.setattr(HostMemory, "total_bytes", lambda _: 128 << 20)
    monkeypatch.setattr(HostMemory, "available_bytes", lambda _: 64 << 20)
    gpu = gpu_memory(cache, tmp_path, **elastic)
    gpu.leave_out("b")
    with pytest.raises(ConfigError, match=why):
        await asyncio.wait_for(gpu.frames_for("a", hello(12288)), WAIT_S)
    await gpu.close()


class Member:
    """A dispatcher that notes what it is told."""

    def __init__(self) -> None:
        self.running: dict[int, Any] = {}
        self.moving = False
        self.taken_frames = 3
        self.told: list[str] = []

    def take_back(self, request: Any) -> None:
        self.told.append(f"take back {request}")

    def run_ended(self) -> None:
        self.told.append("run ended")

    async def unstage_all(self) -> None:
        self.told.append("unstage")

    def wake(self) -> None:
        self.told.append("wake")


async def test_models_that_lack_frames_take_turns() -> None:
    share, a, b = TierShare(), Member(), Member()
    share.join(a)
    share.join(b)
    assert share.shared and share.taken_frames == 6
    assert share.may_hand_over(a) and share.may_hand_over(b)
    share.wait(a)
    share.wait(b)
    share.wait(a)
    assert share.may_hand_over(a) and not share.may_hand_over(b)
    await share.clear(b)
    assert a.told == [], "who is not first takes nothing from others"
    await share.clear(a)
    assert b.told == ["unstage"]
    share.leave(a)
    assert share.may_hand_over(b) and not share.may_hand_over(a) and b.told == ["unstage", "wake"]
    share.wait(a)
    assert not share.may_hand_over(a), "a busy model goes behind the other"
    share.leave(b)
    assert share.may_hand_over(a)
    share.leave(a)
    assert share.may_hand_over(a) and share.may_hand_over(b)


def models(tmp_path: Path, cache: TieredCache, first: Path, *more: Path) -> Models:
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path,
            "gpu": {"device": "cpu"},
            "worker": {"model": first, "more_models": ",".join(str(path) for path in more)},
        }
    )
    return Models(settings, "cpu", cache, lambda: 0.0)


def test_models_that_cannot_be_told_apart_are_refused(tmp_path: Path, cache: TieredCache) -> None:
    one, two, twin = tmp_path / "one", tmp_path / "two", tmp_path / "deeper" / "one"
    for path in (one, two, twin):
        path.mkdir(parents=True)
    (tmp_path / "link").symlink_to(one)
    with pytest.raises(ConfigError, match=r"worker.more_models = .*/missing is no directory"):
        models(tmp_path, cache, one, tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"more_models = .*/link is the model .*/one once more"):
        models(tmp_path, cache, one, two, tmp_path / "link")
    with pytest.raises(ConfigError, match=r"deeper/one has the name of .*/one"):
        models(tmp_path, cache, one, twin)


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        ({"more_models": "/a"}, "worker.more_models needs worker.model too"),
        ({"model": "/a", "more_models": "/b", "layout": "layer"}, "worker.layout = layer is for a single model"),
    ],
)
def test_settings_that_several_models_cannot_have(worker: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Settings.load(None, {"worker": worker}, {})
