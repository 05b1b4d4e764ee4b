"""One rank's loads and saves of parts that are int8 objects, over a real daemon.

The device's copies are a double (`codec_copies.py`); `test_object_copies.py` tests the ones of kernels. In Triton's
interpreter, where it is installed, the last test has both.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prefixd.base.errors import ConfigError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.integrations.engine.copying import cuda_device
from prefixd.integrations.engine.copying.group_pages import NO_BLOCK
from prefixd.integrations.engine.copying.part_copies import PartCopies
from prefixd_swap.codecs.on_device.certified import object_nbytes
from prefixd_swap.codecs.on_device.paged_parts import PagedLayers
from prefixd_swap.codecs.part_shape import AXES, PartShape
from prefixd_swap.copies.copy_engine import HostCopyEngine
from tests.integrations.engine.conftest import LAYERS, LOG, PAGES, MakeRank, Rank
from tests.integrations.engine.copying.codec_copies import CodecCopies
from tests.waiting import wait_until

HEADS, CHANNELS = 2, 32
Ids = npt.NDArray[np.int64]


def shape_of(tokens: int = 16) -> PartShape:
    return PartShape("float16", LAYERS, tokens, HEADS, CHANNELS, AXES)


class Cache:
    """An engine's caches, [layers, pages, kv, tokens of a page, heads, channels] for each group."""

    def __init__(self, groups: int = 1) -> None:
        self.groups = [
            torch.randn(
                (LAYERS, PAGES, 2, tokens, HEADS, CHANNELS), generator=torch.Generator().manual_seed(tokens)
            ).half()
            for tokens in (4, 8)[:groups]
        ]

    @property
    def layers(self) -> list[PagedLayers]:
        return [PagedLayers(shape_of(), tuple((layer[:, 0], layer[:, 1]) for layer in each)) for each in self.groups]


@pytest.fixture
def coded(daemon: DaemonProcess, make_rank: MakeRank) -> Callable[..., tuple[Cache, Rank]]:
    """Makes caches, and a rank whose parts are objects of them."""

    def make(
        groups: int = 1, copies: Callable[[list[PagedLayers]], Any] = CodecCopies, **how: Any
    ) -> tuple[Cache, Rank]:
        cache = Cache(groups)
        page_bytes = 2 * 4 * HEADS * CHANNELS * 2
        rank = make_rank(
            daemon.address,
            groups=groups,
            memory=[each.numpy() for each in cache.groups],
            addresses=[each.data_ptr() for each in cache.groups],
            page_bytes=page_bytes,
            object_copies=copies(cache.layers),
            coded=(shape_of(), object_nbytes(shape_of())),
            **how,
        )
        return cache, rank

    return make


def failed(rank: Rank) -> int:
    return rank.settle().loads["r"][1].failed_blocks


def assert_close(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert not torch.equal(found, exact) and torch.allclose(found, exact, atol=0.05)


def test_a_part_has_the_objects_bytes_and_pages_become_these_numbers_in_8_bits(coded: Any) -> None:
    cache, rank = coded()
    prefix = rank.prefix("objects", 48)
    assert (
        rank.geometry.block_bytes == object_nbytes(shape_of()) < shape_of().nbytes == rank.geometry.groups[0].page_bytes
    )
    assert prefix.spec.parts[0].nbytes == object_nbytes(shape_of()) and prefix.spec.parts[0].shape is None
    assert rank.saved(prefix, range(1, 13)) == {"saved_blocks": 3}
    assert rank.saved_bytes == 3 * object_nbytes(shape_of())
    exact = cache.groups[0].clone()
    cache.groups[0][:, 13:] = 0
    rank.load("r", prefix, [20, 21, NO_BLOCK, *range(23, 32)])
    assert failed(rank) == 0
    assert_close(cache.groups[0][:, [20, 21, *range(23, 32)]], exact[:, [1, 2, *range(4, 13)]])
    assert not cache.groups[0][:, [*range(13, 20), 22]].any()
    again = cache.groups[0][:, 20:].clone()
    rank.load("r", prefix, range(20, 32))
    assert failed(rank) == 0 and torch.equal(cache.groups[0][:, 23:], again[:, 3:]), "the same bytes each time"


def test_groups_with_blocks_of_other_lengths(coded: Any) -> None:
    cache, rank = coded(groups=2)
    prefix = rank.prefix("two groups of objects", 32)
    rank.saved(prefix, range(1, 9), range(1, 5))
    exact = [each.clone() for each in cache.groups]
    for each in cache.groups:
        each[:, 10:] = 0
    rank.load("r", prefix, range(10, 18), [NO_BLOCK, NO_BLOCK, 12, 13])
    assert failed(rank) == 0
    assert_close(cache.groups[0][:, 10:18], exact[0][:, 1:9])
    assert_close(cache.groups[1][:, 12:14], exact[1][:, 3:5])
    assert not cache.groups[1][:, [10, 11, *range(14, 32)]].any()


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_block_that_is_refused_and_those_behind_it_are_not_saved(
    coded: Any, block: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache, rank = coded(groups=2)
    cache.groups[1][1, 1 + 2 * block, 0, 3, 1, 7] = float("inf")
    prefix = rank.prefix(f"refused {block}", 48)
    with caplog.at_level(logging.WARNING, LOG.name):
        counted = rank.saved(prefix, range(1, 13), range(1, 7))
    saved = {"saved_blocks": block} if block else {}
    assert counted == {**saved, "dropped_blocks": 3 - block, "refused_blocks": 1}
    assert rank.saved_bytes == block * rank.geometry.block_bytes
    assert "not saved (not_finite)" in caplog.text
    rank.load("r", prefix, range(20, 32), range(20, 26))
    assert failed(rank) == 3 - block if rank.geometry.by_block else 3
    caplog.clear()
    rank.saved(prefix, range(1, 13), range(1, 7))
    assert not caplog.text, "once a minute"
    cache.groups[1][1, 1 + 2 * block, 0, 3, 1, 7] = 1
    assert rank.saved(prefix, range(1, 13), range(1, 7))["saved_blocks"] == 3 - block


def test_later_blocks_of_a_request_are_not_saved_behind_a_refused_one(coded: Any) -> None:
    cache, rank = coded()
    cache.groups[0][2, 6] = float("inf")
    prefix = rank.prefix("a later job", 64)
    assert rank.saved(rank.prefix("a later job", 32), range(1, 9))["refused_blocks"] == 1
    assert rank.saved(prefix, range(9, 17), first=2) == {"dropped_blocks": 2}
    rank.load("r", prefix, range(16, 32))
    assert failed(rank) == 3


def test_a_block_that_another_rank_refuses_is_no_hit(coded: Any) -> None:
    (_, first), (broken, second) = coded(rank=0, ranks=2), coded(rank=1, ranks=2)
    broken.groups[0][0, 7] = float("nan")
    prefix = first.prefix("two ranks of objects", 48)
    assert first.saved(prefix, range(1, 13))["saved_blocks"] == 3
    assert second.saved(prefix, range(1, 13))["refused_blocks"] == 1
    first.load("r", prefix, range(20, 32))
    assert failed(first) == 2
    assert first.transfers.take_failed_ids() == set(range(24, 32))


def test_a_damaged_object_is_a_failed_load(coded: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, rank = coded()
    prefix = rank.prefix("damaged", 48)
    rank.saved(prefix, range(1, 13))
    arena = rank.link.arena
    assert arena is not None
    memory = arena.bytes_at(0, arena.nbytes)
    before, at = memory.tobytes(), 0
    found = []
    while (at := before.find(b"pfxC", at)) >= 0:
        found.append(at)
        at += 1
    for at in found:
        memory[at + object_nbytes(shape_of()) - 1] ^= 1
    try:
        rank.load("r", prefix, range(20, 32))
        assert failed(rank) == 3
    finally:
        for at in found:
            memory[at + object_nbytes(shape_of()) - 1] ^= 1
    assert "the prefix of request r could not be loaded: the tiles of a coded object are damaged" in caplog.text
    assert rank.transfers.take_failed_ids() == set(range(20, 32))
    assert rank.counted()["load_failed_blocks"] == 3
    rank.load("r", prefix, range(20, 32))
    assert failed(rank) == 0


def test_exact_parts_and_objects_are_never_in_one_namespace(
    coded: Any, daemon: DaemonProcess, make_rank: MakeRank
) -> None:
    _, rank = coded()
    exact = make_rank(daemon.address, page_bytes=rank.page_bytes)
    mine, theirs = (each.prefix("same name", 16).spec for each in (rank, exact))
    assert mine.parts[0].nbytes != theirs.parts[0].nbytes


def test_objects_are_copied_until_the_rank_ends(coded: Any) -> None:
    cache, rank = coded()
    copies = CodecCopies(cache.layers)
    PartCopies(rank.geometry, rank.pages, HostCopyEngine(1), None, copies).close()  # type: ignore[arg-type]
    assert copies.closed


def test_what_is_missing_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [
        each for each in sys.modules if each.startswith("prefixd_swap.codecs.on_device.") and "triton" in each
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "prefixd_swap.codecs.on_device.object_copies", raising=False)
    with pytest.raises(ConfigError, match=r"codec_on_device: a package is missing.*needs Triton"):
        cuda_device.object_copies_of(Cache().layers)


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler"), torch.OutOfMemoryError("no room")])
def test_kernels_that_cannot_be_compiled_or_run_are_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(groups: object) -> None:
        raise error

    name = "prefixd_swap.codecs.on_device.object_copies"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(ObjectCopies=fail))
    with pytest.raises(ConfigError, match=f"codec_on_device: {type(error).__name__}: {error}. Leave the option out"):
        cuda_device.object_copies_of(Cache().layers)


def test_copies_by_kernels(coded: Any) -> None:
    from tests.swap.codecs.test_on_device import triton_kernels

    if triton_kernels()[1].type != "cpu":
        pytest.skip("the caches of this test are in host memory")
    cache, rank = coded(groups=2, copies=cuda_device.object_copies_of)
    prefix = rank.prefix("by kernels", 48)
    assert rank.saved(prefix, range(1, 13), range(1, 7)) == {"saved_blocks": 3}
    other, double = coded(groups=2)
    for each in (*cache.groups, *other.groups):
        each[:, 13:] = 0
    rank.load("r", prefix, range(20, 32), range(20, 26))
    double.load("r", prefix, range(20, 32), range(20, 26))
    assert failed(rank) == failed(double) == 0
    assert all(torch.equal(*both) for both in zip(cache.groups, other.groups, strict=True))
    assert cache.groups[1][:, 20:26].any()
    cache.groups[0][1, 6] = float("inf")
    rank.counted()
    assert rank.saved(rank.prefix("by kernels", 48, 2), range(1, 13), range(1, 7)) == {
        "saved_blocks": 1,
        "dropped_blocks": 2,
        "refused_blocks": 1,
    }
    wait_until(lambda: not rank.transfers._saving)
