"""One rank's loads and saves, over a real daemon and host memory that stands for vLLM's."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, Retention
from prefixd.integrations.engine.copying.block_transfers import computed_already
from prefixd.integrations.engine.copying.group_pages import NO_BLOCK
from prefixd.integrations.engine.jobs import Namespaced, SaveJob
from prefixd_swap.copies.address_columns import Pair
from prefixd_swap.copies.copy_engine import HostCopyEngine
from tests.integrations.engine.conftest import (
    DEADLINE_S,
    LAYERS,
    LOG,
    PAGE_BYTES,
    PATIENT_S,
    GatedEngine,
    MakeRank,
    Rank,
)
from tests.waiting import wait_until


def fill(rank: Rank, seed: int = 1) -> None:
    for array in rank.memory:
        array[:] = np.random.default_rng(seed).integers(1, 256, array.shape, np.uint8)


def pages_of(rank: Rank, ids: Sequence[int], group: int = 0) -> list[bytes]:
    return [rank.memory[group][:, block].tobytes() for block in ids]


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """What the connector has logged; what event loops of other tests have to say does not count."""
    return [record.getMessage() for record in caplog.records if record.levelno >= level and record.name == LOG.name]


# -- there and back -------------------------------------------------------------------------------------------------


def test_saved_and_loaded_into_other_blocks_the_bytes_are_the_same(rank: Rank) -> None:
    fill(rank)
    prefix = rank.prefix("round trip", 48)
    source, target = list(range(1, 13)), list(range(20, 32))
    assert rank.saved(prefix, source) == {"saved_blocks": 3}
    before = pages_of(rank, source)
    rank.memory[0][:, 20:] = 0
    rank.load("r", prefix, target)
    outcome = rank.settle().loads["r"]
    assert outcome[0] == 1 and outcome[1].failed_blocks == 0
    assert outcome[1].nbytes == 3 * rank.geometry.block_bytes
    assert pages_of(rank, target) == before
    assert rank.transfers.take_received() == ({"r"}, {})
    assert rank.transfers.take_received() == (set(), {})
    assert rank.transfers.take_failed_ids() == set()
    counted = rank.counted()
    assert counted["loads"] == 1 and counted["load_bytes"] == outcome[1].nbytes


def test_two_groups_and_places_outside_a_window(daemon: DaemonProcess, make_rank: MakeRank) -> None:
    rank = make_rank(daemon.address, groups=2)
    fill(rank)
    prefix = rank.prefix("two groups", 32)
    rank.saved(prefix, range(1, 9), range(1, 5))
    first, second = pages_of(rank, range(1, 9)), pages_of(rank, range(1, 5), 1)
    for array in rank.memory:
        array[:, 10:] = 0
    rank.load("r", prefix, range(10, 18), [NO_BLOCK, NO_BLOCK, 12, 13])
    assert rank.settle().loads["r"][1].failed_blocks == 0
    assert pages_of(rank, range(10, 18)) == first
    assert pages_of(rank, [12, 13], 1) == second[2:]
    assert not rank.memory[1][:, [10, 11, *range(14, 32)]].any()


def test_a_block_is_there_only_when_every_rank_has_saved_its_part(daemon: DaemonProcess, make_rank: MakeRank) -> None:
    ranks = [make_rank(daemon.address, rank=index, ranks=2) for index in range(2)]
    for index, rank in enumerate(ranks):
        fill(rank, seed=index)
    prefix = ranks[0].prefix("ranks", 32)
    ranks[0].saved(prefix, range(1, 9))
    ranks[0].load("early", prefix, range(20, 28))
    assert ranks[0].settle().loads["early"][1].failed_blocks == 2
    assert ranks[0].transfers.take_failed_ids() == set(range(20, 28))
    ranks[1].saved(prefix, range(1, 9))
    for rank in ranks:
        rank.load("r", prefix, range(20, 28))
        assert rank.settle().loads["r"][1].failed_blocks == 0
        assert pages_of(rank, range(20, 28)) == pages_of(rank, range(1, 9))
    assert pages_of(ranks[0], [20]) != pages_of(ranks[1], [20])


def test_what_all_ranks_have_alike_is_saved_by_one_of_them_and_loaded_by_all(
    daemon: DaemonProcess, make_rank: MakeRank
) -> None:
    ranks = [make_rank(daemon.address, rank=index, ranks=2, replicated=[0]) for index in range(2)]
    for rank in ranks:
        fill(rank)
    prefixes = [ranks[0].prefix("latents", 48, seed) for seed in range(6)]
    counted = [[rank.saved(prefix, range(1, 13)) for rank in ranks] for prefix in prefixes]
    saved = [[each.get("saved_blocks", 0) for each in of_prefix] for of_prefix in counted]
    assert all(sorted(of_prefix) == [0, 3] for of_prefix in saved), "each prompt's once"
    assert [3, 0] in saved and [0, 3] in saved, "the work is shared"
    assert not any(
        "dropped_blocks" in each or "duplicate_blocks" in each for of_prefix in counted for each in of_prefix
    )
    for rank in ranks:
        rank.memory[0][:, 20:] = 0
        for prefix in prefixes:
            rank.load("r", prefix, range(20, 32))
            outcome = rank.settle().loads["r"][1]
            assert (outcome.failed_blocks, outcome.nbytes) == (0, 3 * rank.geometry.block_bytes)
            assert pages_of(rank, range(20, 32)) == pages_of(rank, range(1, 13))


def test_of_groups_that_differ_each_rank_saves_its_own_and_one_the_others(
    daemon: DaemonProcess, make_rank: MakeRank
) -> None:
    ranks = [make_rank(daemon.address, rank=index, ranks=2, groups=2, replicated=[0]) for index in range(2)]
    for index, rank in enumerate(ranks):
        fill(rank)
        rank.memory[1][:] = index + 1
    prefix = ranks[0].prefix("latents and heads", 32)
    for rank in ranks:
        rank.saved(prefix, range(1, 9), range(1, 5))
    assert sum(rank.saved_bytes for rank in ranks) == 2 * ranks[0].geometry.block_bytes
    for index, rank in enumerate(ranks):
        for array in rank.memory:
            array[:, 20:] = 0
        rank.load("r", prefix, range(20, 28), range(20, 24))
        assert rank.settle().loads["r"][1].failed_blocks == 0
        assert pages_of(rank, range(20, 28)) == pages_of(rank, range(1, 9))
        assert (rank.memory[1][:, 20:24] == index + 1).all()


@pytest.mark.slow
def test_what_the_daemon_will_not_retain_is_saved_all_the_same(
    tmp_path: Path, make_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    """Its priorities are left out for a while, then they are sent again."""
    settings = {"cpu.bytes": "64MiB", "disk.bytes": 0, "tenants.default.retained_bytes": 4096}  # three blocks of 1,152
    with DaemonProcess(settings) as daemon:
        rank = make_rank(daemon.address)
        long, short, later = rank.prefix("long", 64), rank.prefix("short", 16), rank.prefix("later", 16)
        keep = (Retention(9),)
        rank.save(long, range(16), retention=keep)
        rank.save(short, range(16, 20), retention=keep)
        rank.settle()
        counted = rank.counted()
        assert (counted["saved_blocks"], counted.get("dropped_blocks", 0)) == (5, 0)
        assert [record.getMessage()[:57] for record in caplog.records if record.levelname == "WARNING"] == [
            "prefixd: for 60 s blocks are saved without the priorities"
        ]
        rank.transfers._retain_again_s = 0.0
        rank.save(later, range(20, 24), retention=keep)
        rank.settle()
        with Client(daemon.address) as client:
            found = {}
            for prefix in client.prefixes().prefixes:
                blocks = client.inspect(prefix.key).blocks
                found[prefix.namespace_name] = [block.priority for block in blocks]
        assert found == {"long": [0] * 4, "short": [0], "later": [9]}


def test_a_save_begins_where_the_cache_ends(rank: Rank) -> None:
    fill(rank)
    prefix = rank.prefix("grows", 64)
    short = rank.prefix("grows", 64)
    short = type(short)(short.spec, short.tokens[: 32 * 4])
    assert rank.saved(short, range(1, 9)) == {"saved_blocks": 2}
    assert rank.saved(prefix, range(1, 17)) == {"saved_blocks": 2, "duplicate_blocks": 2}
    assert rank.saved(prefix, range(1, 17)) == {"duplicate_blocks": 4}
    rank.load("r", prefix, range(16, 32))
    assert rank.settle().loads["r"][1].failed_blocks == 0
    assert pages_of(rank, range(16, 32))[:15] == pages_of(rank, range(1, 16))


def test_a_save_whose_prefix_is_not_cached_is_dropped(rank: Rank) -> None:
    prefix = rank.prefix("gap", 64)
    assert rank.saved(prefix, range(1, 9), first=2) == {"dropped_blocks": 2}


def test_tokens_behind_the_blocks_of_a_job_are_not_saved(rank: Rank) -> None:
    """No bytes are known of them."""
    fill(rank)
    prefix = rank.prefix("longer than its blocks", 64)
    rank.transfers.save([SaveJob(77, prefix, 0, 2, (0,), (tuple(range(1, 9)),))], computed_already)
    assert rank.settle().saves == {77: 1}
    assert rank.counted() == {"saved_blocks": 2}
    rank.load("r", prefix, range(16, 32))
    assert rank.settle().loads["r"][1].failed_blocks == 2


def test_many_small_batches_make_the_same_copy(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.integrations.engine.copying.part_copies._PIECES", 13)
    fill(rank)
    prefix = rank.prefix("batches", 48)
    rank.saved(prefix, range(1, 13))
    rank.load("r", prefix, range(20, 32))
    assert rank.settle().loads["r"][1].failed_blocks == 0
    assert pages_of(rank, range(20, 32)) == pages_of(rank, range(1, 13))


# -- what is not there ----------------------------------------------------------------------------------------------


def test_of_a_prefix_that_is_there_in_part_exactly_the_rest_fails(rank: Rank) -> None:
    fill(rank)
    prefix = rank.prefix("part", 48)
    rank.saved(type(prefix)(prefix.spec, prefix.tokens[: 16 * 4]), range(1, 5))
    rank.load("r", prefix, [*range(10, 18), NO_BLOCK, *range(19, 22)])
    outcome = rank.settle().loads["r"][1]
    assert outcome.failed_blocks == 2 and outcome.nbytes == rank.geometry.block_bytes
    assert rank.transfers.take_failed_ids() == {*range(14, 18), *range(19, 22)}
    assert rank.transfers.take_failed_ids() == set()
    assert rank.transfers.take_received() == ({"r"}, {}), "with one group the blocks fail, not the request"
    assert pages_of(rank, range(10, 14)) == pages_of(rank, range(1, 5))


def test_with_several_groups_the_request_fails(daemon: DaemonProcess, make_rank: MakeRank) -> None:
    rank = make_rank(daemon.address, groups=2)
    prefix = rank.prefix("missing", 32)
    rank.load("r", prefix, range(10, 18), range(10, 14))
    assert rank.settle().loads["r"][1].failed_blocks == 2
    assert rank.transfers.take_received() == ({"r"}, {"r": {*range(10, 18), *range(10, 14)}})
    assert rank.transfers.take_failed_ids() == set(), "ids of several groups would not say whose they are"


def test_beside_a_group_that_is_not_kept_the_request_fails(daemon: DaemonProcess, make_rank: MakeRank) -> None:
    """vLLM ends itself over ids where it has several groups, whether they are kept here or not."""
    rank = make_rank(daemon.address, by_block=False)
    rank.load("r", rank.prefix("nothing", 32), range(10, 18))
    assert rank.settle().loads["r"][1].failed_blocks == 2
    assert (
        rank.transfers.take_received() == ({"r"}, {"r": {*range(10, 18)}}) and rank.transfers.take_failed_ids() == set()
    )


def test_without_a_daemon_everything_ends_at_once(
    tmp_path: Path, make_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank = make_rank(f"unix:{tmp_path}/nobody.sock", waits_until_up=False, timeout_s=1.0)
    rank.link.wait_first()
    prefix = rank.prefix("nobody", 32)
    job = rank.save(prefix, range(1, 9))
    rank.load("r", prefix, range(10, 18))
    outcomes = rank.settle()
    assert outcomes.saves == {job: 1} and outcomes.loads["r"][1].failed_blocks == 2
    assert rank.counted()["dropped_blocks"] == 2
    assert len(lines(caplog)) == 1


# -- the daemon dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["between lease and copy", "between copy and release"])
@pytest.mark.slow
def test_a_daemon_killed_in_a_load_fails_all_its_blocks_and_the_next_one_serves_again(
    own_daemon: DaemonProcess, make_rank: MakeRank, after: bool
) -> None:
    plain, engine = make_rank(own_daemon.address), GatedEngine(after=after)
    rank = make_rank(own_daemon.address, engine=engine)
    fill(plain)
    prefix = plain.prefix("killed in a load", 32)
    plain.saved(prefix, range(1, 9))
    rank.load("r", prefix, range(20, 28))
    assert engine.reached.wait(DEADLINE_S)
    own_daemon.kill()
    engine.go.set()
    assert rank.settle().loads["r"][1].failed_blocks == 2
    assert rank.transfers.take_failed_ids() == set(range(20, 28))
    own_daemon.start()
    wait_until(lambda: rank.link.up and plain.link.up)
    assert plain.saved(prefix, range(1, 9)) == {"saved_blocks": 2}
    rank.load("again", prefix, range(20, 28))
    assert rank.settle().loads["again"][1].failed_blocks == 0
    assert pages_of(rank, range(20, 28)) == pages_of(plain, range(1, 9))


@pytest.mark.parametrize("after", [False, True], ids=["between slots and copy", "between copy and commit"])
@pytest.mark.slow
def test_a_daemon_killed_in_a_save_drops_it_and_those_behind_it_are_acknowledged(
    own_daemon: DaemonProcess, make_rank: MakeRank, after: bool
) -> None:
    engine = GatedEngine(after=after)
    rank = make_rank(own_daemon.address, engine=engine)
    fill(rank)
    jobs = [rank.save(rank.prefix("killed in a save", 32, seed), range(1, 9)) for seed in range(3)]
    assert engine.reached.wait(DEADLINE_S)
    own_daemon.kill()
    engine.go.set()
    assert rank.settle().saves == dict.fromkeys(jobs, 1)
    assert rank.counted() == {"dropped_blocks": 6}
    own_daemon.start()
    wait_until(lambda: rank.link.up)
    assert rank.saved(rank.prefix("killed in a save", 32, 0), range(1, 9)) == {"saved_blocks": 2}


@pytest.mark.slow
def test_a_daemon_that_stops_answering_in_a_save_gets_no_more_of_them(
    own_daemon: DaemonProcess, make_rank: MakeRank
) -> None:
    """Its slots are given back in the background: no acknowledgement waits for that."""
    engine = GatedEngine(after=True)
    rank = make_rank(own_daemon.address, engine=engine)
    fill(rank)
    jobs = [rank.save(rank.prefix("stopped", 32, seed), range(1, 9)) for seed in range(3)]
    assert engine.reached.wait(DEADLINE_S)
    os.kill(own_daemon.pid, signal.SIGSTOP)
    rank.link.timeout_s = 1.0
    try:
        engine.go.set()
        assert rank.settle().saves == dict.fromkeys(jobs, 1)
        assert not rank.link.up
    finally:
        rank.link.timeout_s = PATIENT_S
        os.kill(own_daemon.pid, signal.SIGCONT)
    wait_until(lambda: rank.link.up)
    wait_until(lambda: reservations(own_daemon) == 0)
    rank.counted()
    assert sum(rank.saved(rank.prefix("stopped", 32, 1), range(1, 9)).values()) == 2


@pytest.mark.parametrize("graceful", [True, False], ids=["SIGTERM", "SIGKILL"])
@pytest.mark.slow
def test_an_engine_that_only_saves_finds_a_daemon_that_was_restarted(
    own_daemon: DaemonProcess, make_rank: MakeRank, graceful: bool
) -> None:
    """Nothing but its next save tells it of the new one; that the old one drained is over."""
    rank = make_rank(own_daemon.address)
    assert rank.saved(rank.prefix("restart", 32), range(1, 9)) == {"saved_blocks": 2}
    if graceful:
        own_daemon.stop()
    else:
        own_daemon.kill()
    own_daemon.start()
    wait_until(lambda: rank.saved(rank.prefix("restart", 32), range(1, 9)) == {"saved_blocks": 2})


@pytest.mark.slow
def test_a_daemon_that_drains_gets_no_saves_and_is_not_away(
    own_daemon: DaemonProcess, make_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank = make_rank(own_daemon.address)
    with Client(own_daemon.address) as client:
        client.drain()
    wait_until(lambda: rank.link.draining)
    assert rank.saved(rank.prefix("drain", 32), range(1, 9)) == {"dropped_blocks": 2}
    assert rank.link.up and not lines(caplog)


def reservations(daemon: DaemonProcess) -> int:
    with Client(daemon.address) as client:
        return sum(session.reservations for session in client.stats().sessions)


# -- slots ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_save_goes_on_when_it_gets_slots_for_a_part_only(make_rank: MakeRank) -> None:
    """A reservation that comes back short is filled, and the rest is asked for."""
    block_bytes = 4 * 3 * 64 * 1024
    with DaemonProcess({"cpu.bytes": 5 * block_bytes, "disk.bytes": 0}) as daemon:
        rank = make_rank(daemon.address, page_bytes=64 * 1024)
        assert rank.geometry.block_bytes == block_bytes
        fill(rank)
        rank.saved(rank.prefix("other", 48), range(1, 13))
        prefix = rank.prefix("long", 7 * 16, seed=1)
        counted = rank.saved(prefix, range(1, 29))
        assert sum(counted.values()) == 7 and 1 <= counted["saved_blocks"] <= 5
        kept = int(counted["saved_blocks"])
        source = pages_of(rank, range(1, 1 + 4 * kept))
        fill(rank, seed=2)
        rank.load("r", prefix, range(1, 29))
        assert rank.settle().loads["r"][1].failed_blocks == 7 - kept
        assert pages_of(rank, range(1, 1 + 4 * kept)) == source
        assert rank.transfers.take_failed_ids() == set(range(1 + 4 * kept, 29))
        rank.close()


def test_slots_that_have_to_wait_are_not_waited_for(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the disk's queue is full: dropped, acknowledged, left in peace for a while. The daemon is not away."""
    prefix = rank.prefix("waits", 32)
    rank.saved(prefix, range(1, 9))
    asked = []

    async def reserve(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        raise TimeoutError  # what the limit in time makes of an answer that does not come

    monkeypatch.setattr("prefixd.client.AsyncCache.reserve", reserve)
    monkeypatch.setattr("prefixd.integrations.engine.copying.block_transfers._SAVE_PAUSE_S", 3600.0)
    assert rank.saved(rank.prefix("waits", 32, 1), range(1, 9)) == {"dropped_blocks": 2}
    assert rank.saved(rank.prefix("waits", 32, 2), range(1, 9)) == {"dropped_blocks": 2}
    assert len(asked) == 1
    assert rank.link.up and not lines(caplog)


# -- order ----------------------------------------------------------------------------------------------------------


def test_saves_are_made_one_after_the_other_each_after_its_fence(rank: Rank) -> None:
    """What the fence waits for is in what is saved."""
    computed, order = threading.Event(), []

    def slow() -> None:
        assert computed.wait(DEADLINE_S)
        order.append("slow")

    prefixes = [rank.prefix("fences", 16, seed) for seed in range(2)]
    first = rank.save(prefixes[0], range(1, 5), fence=slow)
    second = rank.save(prefixes[1], range(5, 9), fence=lambda: order.append("quick"))
    assert rank.transfers.take_outcomes().saves == {} and not order
    fill(rank)
    computed.set()
    assert rank.settle().saves == {first: 1, second: 1}
    assert order == ["slow", "quick"]
    for prefix, ids in zip(prefixes, (range(1, 5), range(5, 9)), strict=True):
        rank.load("r", prefix, range(20, 24))
        rank.settle()
        assert pages_of(rank, range(20, 24)) == pages_of(rank, ids)


@pytest.mark.parametrize("error", [RuntimeError("the GPU is gone"), ValueError("?")])
def test_a_save_that_breaks_is_acknowledged_and_the_next_is_made(
    rank: Rank, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Otherwise vLLM's blocks stayed pinned for ever."""

    def broken() -> None:
        raise error

    fill(rank)
    first = rank.save(rank.prefix(f"breaks {error}", 16), range(1, 5), fence=broken)
    second = rank.save(rank.prefix(f"breaks {error}", 16, 1), range(5, 9))
    assert rank.settle().saves == {first: 1, second: 1}
    assert rank.counted() == {"dropped_blocks": 1, "saved_blocks": 1}
    assert len(lines(caplog, logging.ERROR)) == 1


class LayersEngine(HostCopyEngine):
    """Copies a layer when it is allowed to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.allowed = [threading.Event() for _ in range(3)]
        self.copied = 0

    async def copy(self, pairs: Sequence[Pair]) -> None:
        layer, self.copied = self.copied, self.copied + 1
        await asyncio.to_thread(self.allowed[layer].wait, DEADLINE_S)
        await super().copy(pairs)


def test_a_step_that_computes_on_a_load_waits_for_each_layer(daemon: DaemonProcess, make_rank: MakeRank) -> None:
    source, engine = make_rank(daemon.address), LayersEngine()
    rank = make_rank(daemon.address, engine=engine)
    fill(source)
    prefix = source.prefix("layers", 32)
    source.saved(prefix, range(1, 9))
    rank.load("r", prefix, range(20, 28), waits=True)
    for layer in range(3):
        passed = threading.Event()

        def wait(layer: int = layer, passed: threading.Event = passed) -> None:
            rank.transfers.wait_for_layer(layer)
            passed.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not passed.is_set() and not rank.memory[0][layer].any()
        engine.allowed[layer].set()
        waiting.join(DEADLINE_S)
        assert np.array_equal(rank.memory[0][layer, 20:28], source.memory[0][layer, 1:9])
    rank.transfers.wait_for_loads_of_step()
    assert rank.transfers.take_received() == (set(), {}), "the request was in the step"
    assert rank.settle().loads["r"][1].failed_blocks == 0


@pytest.mark.parametrize("replicated", [[], [0]], ids=["heads apart", "latents, which all ranks have alike"])
def test_each_rank_loads_its_own_part_layer_by_layer(
    daemon: DaemonProcess, make_rank: MakeRank, replicated: list[int]
) -> None:
    ranks = [make_rank(daemon.address, rank=index, ranks=2, replicated=replicated) for index in range(2)]
    prefix = ranks[0].prefix("layers of ranks", 32, seed=len(replicated))
    for index, rank in enumerate(ranks):
        fill(rank, seed=0 if replicated else index)
        rank.saved(prefix, range(1, 9))
    for rank in ranks:
        rank.load("r", prefix, range(20, 28), waits=True)
    for layer in range(3):
        for rank in ranks:
            rank.transfers.wait_for_layer(layer)
            assert np.array_equal(rank.memory[0][layer, 20:28], rank.memory[0][layer, 1:9])
    for rank in ranks:
        assert rank.settle().loads["r"][1].failed_blocks == 0


def test_a_step_does_not_wait_for_ever_for_a_load_that_fails(daemon: DaemonProcess, make_rank: MakeRank) -> None:
    rank = make_rank(daemon.address)
    rank.load("r", rank.prefix("not there", 32), range(20, 28), waits=True)
    for layer in range(3):
        rank.transfers.wait_for_layer(layer)
    rank.transfers.wait_for_loads_of_step()
    assert rank.transfers.take_failed_ids() == set(range(20, 28))


def test_waiting_for_anything_ends_when_something_has_ended_or_nothing_is_under_way(rank: Rank) -> None:
    rank.transfers.wait_for_any(DEADLINE_S)  # at once
    rank.load("r", rank.prefix("any", 32), range(1, 9))
    rank.transfers.wait_for_any(DEADLINE_S)
    assert "r" in rank.transfers.take_outcomes().loads


# -- the end --------------------------------------------------------------------------------------------------------


def test_closing_waits_for_the_copy_under_way_and_reports_the_rest(
    daemon: DaemonProcess, make_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    """Slots that are still being written are nobody else's: only then does the daemon hear that they are free."""
    engine = GatedEngine()
    rank = make_rank(daemon.address, engine=engine)
    before = threading.active_count()
    rank.save(rank.prefix("closing", 32), range(1, 9))
    assert engine.reached.wait(DEADLINE_S)
    assert reservations(daemon) == 1
    closing = threading.Thread(target=rank.close)
    closing.start()
    wait_until(lambda: rank.link._client._closed)
    assert reservations(daemon) == 1
    engine.go.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert reservations(daemon) == 0
    assert threading.active_count() <= before
    assert not lines(caplog, logging.ERROR)


def test_what_comes_after_the_end_fails_and_raises_nothing(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.close()
    rank.load("r", rank.prefix("late", 32), range(1, 9))
    rank.transfers.wait_for_loads_of_step()
    assert rank.transfers.take_outcomes().loads["r"][1].failed_blocks == 2
    rank.save(rank.prefix("late", 32), range(1, 9))
    assert not lines(caplog, logging.ERROR)


# -- windows --------------------------------------------------------------------------------------------------------


def test_of_a_window_group_only_the_window_is_loaded(daemon: DaemonProcess, make_rank: MakeRank) -> None:
    rank = make_rank(daemon.address, groups=2, window_tokens=20)  # the last 19 tokens lie in two blocks of 16
    fill(rank)
    prefix = rank.prefix("window", 64)
    assert rank.saved(prefix, range(1, 17), range(1, 9)) == {"saved_blocks": 4}
    full, window = pages_of(rank, range(1, 17)), pages_of(rank, range(1, 9), 1)
    for array in rank.memory:
        array[:, 17:] = 0
    # The engine has room for the last 19 tokens and what else is in their blocks of 8 tokens.
    rank.load("r", prefix, range(16, 32), [*[NO_BLOCK] * 5, 21, 22, 23])
    outcome = rank.settle().loads["r"][1]
    assert outcome.failed_blocks == 0
    assert pages_of(rank, range(16, 32))[1:] == full[1:] and pages_of(rank, [21, 22, 23], 1) == window[5:]
    assert outcome.nbytes == (16 + 3) * LAYERS * PAGE_BYTES, "bytes that were copied"


def test_a_load_that_wants_bytes_outside_the_window_fails_and_says_so(
    daemon: DaemonProcess, make_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank = make_rank(daemon.address, groups=2, window_tokens=17)
    fill(rank)
    prefix = rank.prefix("outside", 48)
    rank.saved(prefix, range(1, 13), range(1, 7))
    rank.load("r", prefix, range(13, 25), [NO_BLOCK, NO_BLOCK, NO_BLOCK, 11, 12, 13])
    assert rank.settle().loads["r"][1].failed_blocks == 3
    assert rank.transfers.take_received() == ({"r"}, {"r": {*range(11, 25)}})
    (line,) = lines(caplog)
    assert "KV group 1 in block 1" in line and "sliding window of 17 tokens" in line


def test_blocks_without_window_bytes_lead_up_to_blocks_with_them(daemon: DaemonProcess, make_rank: MakeRank) -> None:
    """What the engine's window has passed is saved without the window group; longer prefixes can be used then."""
    rank = make_rank(daemon.address, groups=2, window_tokens=17)
    fill(rank)
    prefix = rank.prefix("passed", 64)
    passed = type(prefix)(prefix.spec, prefix.tokens[: 48 * 4])
    assert rank.saved(passed, range(1, 13), groups=[0]) == {"saved_blocks": 3}
    rank.load("short", passed, range(20, 32), [NO_BLOCK] * 6)
    assert rank.settle().loads["short"][1].failed_blocks == 3, "no prefix of it has its window"
    rank.counted()
    assert rank.saved(prefix, range(13, 17), [7, 8], first=3) == {"saved_blocks": 1}
    for array in rank.memory:
        array[:, 17:] = 0
    full, window = pages_of(rank, range(1, 17)), pages_of(rank, [7, 8], 1)
    rank.load("long", prefix, range(16, 32), [*[NO_BLOCK] * 6, 30, 31])
    assert rank.settle().loads["long"][1].failed_blocks == 0
    assert pages_of(rank, range(16, 32))[1:] == full[1:] and pages_of(rank, [30, 31], 1) == window


def test_window_bytes_are_added_to_blocks_that_have_the_rest(daemon: DaemonProcess, make_rank: MakeRank) -> None:
    rank = make_rank(daemon.address, groups=2, window_tokens=17)
    fill(rank)
    prefix = rank.prefix("added", 32)
    assert rank.saved(prefix, range(1, 9), groups=[0]) == {"saved_blocks": 2}
    first = pages_of(rank, range(1, 9))
    for array in rank.memory:
        array[:] += 1
    window = pages_of(rank, range(1, 5), 1)
    assert rank.saved(prefix, range(1, 5), groups=[1]) == {}, "the blocks are counted already"
    assert rank.saved_bytes == 2 * rank.geometry.groups[1].part_bytes
    rank.load("r", prefix, range(20, 28), [NO_BLOCK, NO_BLOCK, 22, 23])
    assert rank.settle().loads["r"][1].failed_blocks == 0
    assert pages_of(rank, range(20, 28)) == first, "the first copy stays"
    assert pages_of(rank, [22, 23], 1) == window[2:]


def test_with_windows_a_shorter_prefix_than_was_found_is_of_no_use(daemon: DaemonProcess, make_rank: MakeRank) -> None:
    rank = make_rank(daemon.address, groups=2, window_tokens=17)
    fill(rank)
    prefix = rank.prefix("shorter", 48)
    rank.saved(type(prefix)(prefix.spec, prefix.tokens[: 32 * 4]), range(1, 9), range(1, 5))
    rank.load("r", prefix, range(13, 25), [*[NO_BLOCK] * 4, 15, 16])
    outcome = rank.settle().loads["r"][1]
    assert outcome.failed_blocks == 3 and outcome.nbytes == 0
    assert (
        rank.transfers.take_received() == ({"r"}, {"r": {*range(13, 25), 15, 16}})
        and rank.transfers.take_failed_ids() == set()
    )


# -- prefixes longer than the daemon's memory ------------------------------------------------------------------------

LONG = 8  # blocks, all of the rank's memory
PAGE = 4096  # with it a block has 48 KiB in each group


@pytest.fixture
def small_daemon() -> Iterator[Callable[[int], DaemonProcess]]:
    """Daemons with a disk, and so many bytes of memory."""
    with ExitStack() as running:
        yield lambda nbytes: running.enter_context(DaemonProcess({"cpu.bytes": nbytes, "disk.bytes": "64MiB"}))


def save_long(rank: Rank, prefix: Namespaced, ids: Sequence[Sequence[int]]) -> None:
    """Saves a block after the other, each on disk before the next."""
    with Client(rank.link.address) as client:
        cache = client.register(prefix.spec)
        for end in range(1, LONG + 1):
            some = Namespaced(prefix.spec, prefix.tokens[: end * 64])
            own = [of_group[(end - 1) * (len(of_group) // LONG) : end * (len(of_group) // LONG)] for of_group in ids]
            rank.save(some, *own, first=end - 1)
            rank.settle()
            assert cache.persist(np.frombuffer(some.tokens, "<u4")) == end


@pytest.mark.slow
@pytest.mark.parametrize("memory_blocks", [1, 2, 5, 64])
def test_a_prefix_longer_than_the_daemons_memory_is_loaded_in_slices(
    small_daemon: Callable[[int], DaemonProcess], make_rank: MakeRank, memory_blocks: int
) -> None:
    rank = make_rank(small_daemon(memory_blocks * 12 * PAGE).address, page_bytes=PAGE)
    fill(rank)
    prefix, ids = rank.prefix("long", 16 * LONG), list(range(32))
    save_long(rank, prefix, [ids])
    before = pages_of(rank, ids)
    rank.memory[0][:] = 0
    with Client(rank.link.address) as client:
        cache = client.register(prefix.spec)
        found = cache.match(np.frombuffer(prefix.tokens, "<u4"), counted=True)
        rank.load("r", prefix, ids, found=found)
        assert rank.settle().loads["r"][1].failed_blocks == 0
        stats = client.stats()
        assert (stats.asked_tokens, stats.hit_tokens) == (16 * LONG, 16 * LONG)
    assert pages_of(rank, ids) == before


@pytest.mark.slow
@pytest.mark.parametrize("memory_blocks", [2, 5])
def test_of_a_long_prefix_with_windows_the_end_has_the_windows_bytes(
    small_daemon: Callable[[int], DaemonProcess], make_rank: MakeRank, memory_blocks: int
) -> None:
    """The lease of a slice has what a prefix of the whole length needs, not what one of the slice's end does."""
    address = small_daemon(memory_blocks * 18 * PAGE).address
    rank = make_rank(address, page_bytes=PAGE, groups=2, window_tokens=18)
    fill(rank)
    prefix, ids = rank.prefix("long windows", 16 * LONG), [list(range(32)), list(range(16))]
    save_long(rank, prefix, ids)
    before = [pages_of(rank, of_group, group) for group, of_group in enumerate(ids)]
    for memory in rank.memory:
        memory[:] = 0
    rank.load("r", prefix, ids[0], [NO_BLOCK] * 12 + ids[1][12:])
    assert rank.settle().loads["r"][1].failed_blocks == 0
    assert pages_of(rank, ids[0]) == before[0]
    assert pages_of(rank, ids[1][12:], 1) == before[1][12:]


@pytest.mark.slow
def test_slices_that_came_are_good_when_there_is_no_room_for_more(
    small_daemon: Callable[[int], DaemonProcess], make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.integrations.engine.copying.block_transfers._ROOM_S", 0.05)
    rank = make_rank(small_daemon(4 * 12 * PAGE).address, page_bytes=PAGE)
    fill(rank)
    prefix, ids = rank.prefix("long", 16 * LONG), list(range(32))
    save_long(rank, prefix, [ids])
    before = pages_of(rank, ids)
    rank.memory[0][:] = 0
    with Client(rank.link.address) as client:
        cache = client.register(prefix.spec)
        with cache.acquire(np.frombuffer(prefix.tokens, "<u4")) as others:
            assert others.blocks == 4, "all of the memory"
            rank.load("r", prefix, ids)
            assert rank.settle().loads["r"][1].failed_blocks == 4
    assert pages_of(rank, ids[:16]) == before[:16]
    assert rank.transfers.take_failed_ids() == set(ids[16:])
