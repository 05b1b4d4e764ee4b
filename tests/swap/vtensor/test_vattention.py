"""vAttention's API: memory that grows a step at a time, stays mapped, is shared, and runs out without a crash."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from prefixd_swap import GeometryError, MemoryMisuseError, OutOfMemoryError, VAttention
from prefixd_swap.group_shape import Layout
from prefixd_swap.vmem import virtual_range
from prefixd_swap.vmem.fence import Fence, Work
from prefixd_swap.vtensor import vattention

BATCH, FRAMES = 4, 20
Make = Callable[..., VAttention]


def init(kv: VAttention, device: str, layout: Layout = "token", frames: int = FRAMES, **arguments: object) -> int:
    """A cache of `frames` blocks, and 8 blocks a request; returns tokens a block, 4 in either layout."""
    chunk_bytes = 64 << 10 if device == "cpu" else 2 << 20
    head_dim = chunk_bytes // (128 if layout == "token" else 64)
    block_bytes = chunk_bytes * (1 if layout == "token" else 2)
    arguments.setdefault("ahead", False)
    tensors = kv.init_kvcache(
        layers=2,
        kv_heads=2,
        head_dim=head_dim,
        dtype=torch.float32,
        device=device,
        max_batch=BATCH,
        max_context=32,
        memory_limit=frames * block_bytes,
        chunk_bytes=chunk_bytes,
        layout=layout,
        **arguments,  # type: ignore[arg-type]
    )
    kv.layers = tensors  # type: ignore[attr-defined]
    return kv.block_tokens


def layers(kv: VAttention) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return kv.layers  # type: ignore[attr-defined,no-any-return]


@pytest.fixture(params=["token", "layer"])
def make(request: pytest.FixtureRequest, device: str) -> Iterator[Make]:
    made: list[VAttention] = []

    def make(**arguments: object) -> VAttention:
        made.append(VAttention())
        assert init(made[-1], device, request.param, **arguments) == 4
        return made[-1]

    yield make
    for kv in made:
        kv.check_integrity()
        kv.close()


def lengths(**of: int) -> list[int]:
    """`lengths(r0=5, r2=3)`: 5, 0, 3, 0."""
    return [of.get(f"r{reqid}", 0) for reqid in range(BATCH)]


def at(length: int, *reqids: int) -> list[int]:
    return [length if reqid in reqids else 0 for reqid in range(BATCH)]


def mapped(kv: VAttention) -> int:
    return kv.stats().mapped


def test_a_layers_keys_are_one_tensor_with_a_request_a_row(make: Make, device: str) -> None:
    kv = make()
    assert len(layers(kv)) == 2
    for keys, values in layers(kv):
        assert keys.shape == values.shape == (BATCH, 32, 2, keys.shape[3]) and keys.dtype == torch.float32
    keys = layers(kv)[1][0]
    assert keys[2].data_ptr() - keys[0].data_ptr() == 2 * keys.stride(0) * 4, "the offset is reqid * S (5.2.3)"
    reqids = [kv.alloc_reqid() for _ in range(BATCH)]
    assert sorted(reqids) == list(range(BATCH))
    with pytest.raises(OutOfMemoryError, match="all 4 virtual tensors are taken"):
        kv.alloc_reqid()


def test_a_step_maps_a_block_only_when_the_last_one_is_full(make: Make) -> None:
    kv = make()
    reqid = kv.alloc_reqid()
    counts = []
    for length in range(3, 11):
        assert kv.step(at(length, reqid)) == 0
        layers(kv)[0][0][reqid, length - 1] = length
        layers(kv)[1][1][reqid, length - 1] = -length
        counts.append(mapped(kv))
    assert counts == [1, 1, 2, 2, 2, 2, 3, 3]
    assert layers(kv)[0][0][reqid, 2:10, 0, 0].tolist() == list(range(3, 11))
    assert layers(kv)[1][1][reqid, 2:10, 1, -1].tolist() == [-length for length in range(3, 11)]
    assert kv.step(at(0)) == 0, "a live request can be left out of a step"
    assert kv.stats().free_bytes == kv.stats().limit_bytes // FRAMES * (FRAMES - 3)


def test_running_out_is_a_return_code_and_changes_nothing(make: Make) -> None:
    kv = make(frames=5)
    one, two = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step([8 if reqid in (one, two) else 0 for reqid in range(BATCH)]) == 0
    for reqid in (one, two):
        layers(kv)[0][0][reqid, :8] = reqid + 1
    before = kv.stats()
    assert kv.step(at(12, one, two)) == -1, "two blocks are wanted, one is left"
    assert kv.stats() == before, "not even the one that fits is mapped"
    kv.check_integrity()
    assert kv.step([12 if reqid == one else 8 if reqid == two else 0 for reqid in range(BATCH)]) == 0
    assert kv.step(at(16, one)) == -1
    kv.free_reqid(two)  # preempted
    assert kv.step(at(16, one)) == 0
    assert layers(kv)[0][0][one, :8].eq(one + 1).all()


def test_what_was_mapped_ahead_does_not_make_a_step_fail(make: Make) -> None:
    kv = make(frames=3)
    one, two = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(4, one)) == 0
    kv.step_async(at(8, one))
    assert kv.stats().free_bytes * 3 == kv.stats().limit_bytes
    assert kv.step([4 if reqid == one else 8 if reqid == two else 0 for reqid in range(BATCH)]) == 0
    assert kv.step(at(8, one)) == -1


def test_step_async_maps_what_the_next_step_needs(make: Make) -> None:
    kv = make()
    reqid = kv.alloc_reqid()
    assert kv.step(at(4, reqid)) == 0
    kv.step_async(at(5, reqid))
    before = mapped(kv)
    assert before >= 2
    assert kv.step(at(5, reqid)) == 0 and mapped(kv) == before, "the step found it mapped"
    layers(kv)[0][0][reqid, :5] = 1
    kv.step_async(at(32, reqid))
    kv.free_reqid(reqid)
    kv.check_integrity()


def test_a_step_begins_to_map_for_the_next_one(make: Make) -> None:
    """As in the paper (6.2.1): a token more for each request. And a prompt of the same length (6.2.2)."""
    kv = make(ahead=True)
    reqid, idle = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(4, reqid)) == 0 and mapped(kv) == 3, "with that of token 5 and one ahead"
    assert kv.step(at(5, reqid)) == 0 and mapped(kv) == 3
    assert kv.step(at(31, reqid)) == 0 and kv.step(at(32, reqid)) == 0, "there is no token behind the last"
    kv.free_reqid(idle)
    kv.check_integrity()


def test_step_async_beyond_the_memory_is_no_error(make: Make) -> None:
    kv = make(frames=2)
    reqid = kv.alloc_reqid()
    assert kv.step(at(8, reqid)) == 0
    kv.step_async(at(12, reqid))
    assert kv.step(at(12, reqid)) == -1
    assert kv.step(at(8, reqid)) == 0


def test_the_next_request_finds_the_memory_of_the_last_one_mapped(make: Make) -> None:
    """Deferred reclamation (6.2.2)."""
    kv = make()
    first, other = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(16, first)) == 0 and kv.step(at(4, other)) == 0
    kv.free_reqid(other)
    kv.free_reqid(first)
    before = kv.stats()
    again = kv.alloc_reqid()
    assert again == first, "more is mapped there"
    assert kv.step(at(16, again)) == 0
    after = kv.stats()
    assert (after.mapped, after.reused) == (before.mapped, before.reused + 4)
    assert kv.step(at(20, again)) == 0 and mapped(kv) == before.mapped + 1, "only what it has more"


def test_memory_is_mapped_ahead_for_the_request_to_come(make: Make) -> None:
    """Eager allocation (6.2.2): as much as the last prompt had."""
    kv = make()
    first = kv.alloc_reqid()
    assert kv.step(at(12, first)) == 0 and mapped(kv) == 3
    kv.step_async(at(12, first))
    assert mapped(kv) == 6
    kv.step_async(at(12, first))
    assert mapped(kv) == 6, "once"
    second = kv.alloc_reqid()
    assert second != first and kv.step(at(11, second)) == 0
    assert mapped(kv) == 6 and kv.stats().reused == 3
    for reqid in (first, second):
        layers(kv)[1][0][reqid, :11] = reqid
    assert layers(kv)[1][0][first, :11].eq(first).all()


def test_mapping_ahead_takes_nothing_that_somebody_needs(make: Make) -> None:
    kv = make(frames=6, watermark=0.0)
    first = kv.alloc_reqid()
    assert kv.step(at(12, first)) == 0
    kv.step_async(at(12, first))
    assert kv.stats().unmapped_bytes == 0 and kv.stats().free_bytes * 2 == kv.stats().limit_bytes
    assert kv.step(at(24, first)) == 0, "free is free, mapped ahead or not"


def test_memory_of_ended_requests_is_unmapped_below_the_watermark_only(make: Make) -> None:
    """Reclamation (6.2.2): at least half of 20 blocks are to be mapped nowhere."""
    kv = make(watermark=0.5)
    block = kv.stats().limit_bytes // FRAMES
    reqids = [kv.alloc_reqid() for _ in range(3)]
    for reqid in reqids[:2]:
        assert kv.step(at(12, reqid)) == 0
    for reqid in reqids[:2]:
        kv.free_reqid(reqid)
    kv.step_async(at(0))
    assert kv.stats().unmapped_bytes == 14 * block, "above: they stay"
    assert kv.step(at(32, reqids[2])) == 0
    assert kv.stats().unmapped_bytes == 6 * block, "a request takes what is mapped nowhere first"
    kv.step_async(at(32, reqids[2]))
    stats = kv.stats()
    assert stats.unmapped_bytes == 9 * block, "the row of the next request keeps its three blocks"
    assert stats.free_bytes == 12 * block


def test_a_prefix_is_shared_by_mapping_and_its_tail_copied(make: Make) -> None:
    kv = make()
    parent, child = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(15, parent)) == 0
    keys, values = layers(kv)[1]
    keys[parent, :15], values[parent, :15] = 3, 4
    keys[parent, 11:15] = float("nan")
    block = kv.stats().limit_bytes // FRAMES
    assert kv.share(child, parent, 11) == 0
    stats = kv.stats()
    assert (stats.shared_bytes, stats.copied) == (2 * block, 1)
    assert stats.free_bytes == (FRAMES - 5) * block, "four blocks of the parent, and the child's tail"
    assert keys[child, :11].eq(3).all() and values[child, :11].eq(4).all()
    keys[child, 10] = 8
    assert keys[parent, 10].eq(3).all(), "the tail is its own"
    kv.free_reqid(parent)
    assert kv.stats().free_bytes == (FRAMES - 3) * block, "shared memory is counted: the child keeps it"
    newcomer = kv.alloc_reqid()
    assert kv.step(at(32, newcomer)) == 0
    keys[newcomer] = 5
    assert keys[child, :10].eq(3).all() and kv.step(at(12, child)) == 0


def test_a_shared_block_is_copied_before_it_is_written_again(make: Make) -> None:
    kv = make(frames=3)
    parent, child = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(8, parent)) == 0
    keys = layers(kv)[0][0]
    keys[parent, :8] = 1
    assert kv.share(child, parent, 8) == 0
    assert kv.writable(child, 5) == 0
    assert kv.writable(child, 6) == 0, "it is the child's own already"
    keys[child, 5] = 2
    assert keys[parent, :8].eq(1).all() and keys[child, [4, 6, 7]].eq(1).all()
    assert kv.writable(child, 0) == -1, "no block is left"
    with pytest.raises(MemoryMisuseError, match="no token 8"):
        kv.writable(child, 8)
    kv.free_reqid(parent)
    assert kv.writable(child, 0) == 0 and kv.stats().copied == 1, "the last owner writes in place"


class LateFence(Fence):
    """Streams that run until somebody waits for them."""

    def __init__(self) -> None:
        self.waiting: list[Work] = []

    def retire(self, streams: Iterable[int], work: Work) -> None:
        self.waiting.append(work)

    def poll(self, wait: bool = False) -> int:
        while wait and self.waiting:
            self.waiting.pop(0)()
        return len(self.waiting)

    def close(self) -> None:
        self.poll(wait=True)


def test_a_freed_request_that_still_runs_shares_no_block(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make()
    monkeypatch.setattr(kv._manager, "_fence", LateFence())
    parent, child = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(8, parent)) == 0
    assert kv.share(child, parent, 8) == 0
    kv.free_reqid(parent)
    assert kv.stats().shared_bytes > 0, "its streams still run"
    assert kv.writable(child, 0) == 0
    assert (kv.stats().copied, kv.stats().shared_bytes) == (0, 0), "the last owner writes in place"


class PolledFence(LateFence):
    """Streams that have ended, as whoever asks will see."""

    def poll(self, wait: bool = False) -> int:
        return super().poll(wait=True)


def test_the_memory_of_a_request_that_has_just_ended_is_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make()
    monkeypatch.setattr(kv._manager, "_fence", PolledFence())
    first, second = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(8, second)) == 0
    kv.free_reqid(second)
    assert kv.alloc_reqid() == second, "where most free memory is mapped"
    assert first != second


def test_a_request_that_still_runs_is_not_waited_for_while_there_is_room(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make()
    fence = LateFence()
    monkeypatch.setattr(kv._manager, "_fence", fence)
    requests = [kv.alloc_reqid() for _ in range(BATCH - 1)]
    kv.free_reqid(requests[0])
    last = kv.alloc_reqid()
    assert last not in requests and len(fence.waiting) == 1
    assert kv.alloc_reqid() == requests[0] and not fence.waiting, "now there was no other"


def test_the_device_is_waited_for_before_a_block_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's own kernels may still read the block that is unmapped."""
    kv = make()
    manager, order = kv._manager, list[str]()
    assert manager is not None
    parent, child = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(8, parent)) == 0 and kv.share(child, parent, 8) == 0
    synchronize, replace = vattention._synchronize, manager.writable
    monkeypatch.setattr(vattention, "_synchronize", lambda kv: (order.append("waited"), synchronize(kv)))
    monkeypatch.setattr(manager, "writable", lambda *arguments: (order.append("replaced"), replace(*arguments)))
    assert kv.writable(child, 5) == 0
    assert order == ["waited", "replaced"]


def test_sharing_beyond_the_memory_changes_nothing(make: Make) -> None:
    kv = make(frames=3)
    parent, child = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(12, parent)) == 0
    before = kv.stats()
    assert kv.share(child, parent, 9) == -1
    after = kv.stats()
    assert (after.shared_bytes, after.free_bytes) == (before.shared_bytes, before.free_bytes) == (0, 0)
    assert kv.share(child, parent, 8) == 0, "without a tail no memory is needed"


def test_misuse_is_refused_and_changes_nothing(make: Make) -> None:
    kv = make()
    one, two = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(9, one)) == 0
    before = kv.stats()
    for match, call in {
        "reqid 3 is not live": lambda: kv.step(lengths(r3=1)),
        "3 lengths for a batch of 4": lambda: kv.step([1, 1, 1]),
        "wants 33 tokens, over max_context 32": lambda: kv.step(at(33, one, two)),
        "has 9 tokens and cannot shrink to 8": lambda: kv.step_async(at(8, one)),
        "wants|reqid -1 is not live": lambda: kv.free_reqid(-1),
        "has 9 tokens; share before": lambda: kv.share(one, two, 1),
        "has 9 tokens, not the 10": lambda: kv.share(two, one, 10),
        "has 0 tokens, not the 1 ": lambda: kv.share(two, two, 1),
        "was called before": lambda: init(kv, "cpu"),
        "tokens is 5.5; give a whole number": lambda: kv.share(two, one, 5.5),  # type: ignore[arg-type]
        "method 'bogus' is unknown; give one of map, copy, auto": lambda: kv.share(two, one, 9, "bogus"),  # type: ignore[arg-type]
        "token is None": lambda: kv.writable(one, None),  # type: ignore[arg-type]
        "length of reqid 1 is nan": lambda: kv.step([0, math.nan, 0, 0]),  # type: ignore[list-item]
    }.items():
        with pytest.raises(MemoryMisuseError, match=match):
            call()
    assert kv.stats() == before
    kv.free_reqid(two)
    with pytest.raises(MemoryMisuseError, match="is not live"):
        kv.free_reqid(two)


def test_calls_before_and_after_its_life_are_refused(device: str) -> None:
    kv = VAttention()
    with pytest.raises(MemoryMisuseError, match="call init_kvcache first"):
        kv.alloc_reqid()
    with kv:
        init(kv, device)
        kv.alloc_reqid()
        kv.step_async(at(0))
    kv.close()
    for call in (kv.alloc_reqid, kv.stats, lambda: kv.step(at(0)), lambda: kv.free_reqid(0)):
        with pytest.raises(MemoryMisuseError, match="is closed"):
            call()
    with pytest.raises(MemoryMisuseError, match="is closed; make another"):
        init(kv, device)


def test_one_that_is_forgotten_is_warned_of() -> None:
    """Its tensors may be in use, so its memory cannot be given back."""
    kv = VAttention()
    tensors = kv.init_kvcache(
        layers=1,
        kv_heads=1,
        head_dim=128,
        dtype=torch.float32,
        max_batch=1,
        max_context=8,
        memory_limit=1 << 16,
        device=torch.device("cpu"),
        chunk_bytes=1 << 14,
    )
    assert kv.step([8 if kv.alloc_reqid() == 0 else 0]) == 0
    manager = kv._manager
    assert manager is not None
    with pytest.warns(ResourceWarning, match="65536 bytes was not closed"):
        del kv
        gc.collect()
    tensors[0][0][0, :8] = 1
    manager.close()
    manager.memory.close()


def test_what_is_rounded_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Qwen2.5-7B: 56 KiB a token, so a chunk of 2 MiB holds no whole number of tokens."""
    qwen = {"layers": 28, "kv_heads": 4, "head_dim": 128, "dtype": torch.bfloat16, "device": "cpu"}
    caplog.set_level("INFO", "prefixd_swap.vtensor.vattention")
    with VAttention() as kv:
        kv.init_kvcache(**qwen, max_batch=2, max_context=300, memory_limit=30 << 20)  # type: ignore[arg-type]
        assert kv.block_tokens == 256 and kv.stats().limit_bytes == 28 << 20
        blocks, context, limit = kv.rounding
        assert "256 tokens, 14680064 bytes" in blocks and "takes 56 KiB and" in blocks and "chunks of 2 MiB" in blocks
        assert "512 tokens a request, not 300" in context
        assert f"{28 << 20} of {30 << 20} bytes" in limit
        assert all(line in caplog.text for line in kv.rounding)
        with pytest.raises(MemoryMisuseError, match="over max_context 300"):
            kv.alloc_reqid()
            kv.step([301, 0])
    with VAttention() as kv:
        kv.init_kvcache(  # type: ignore[arg-type]
            **qwen, max_batch=1, max_context=1024, memory_limit=56 << 20, layout="layer"
        )
        assert kv.block_tokens == 1024
        assert len(kv.rounding) == 1 and "2 KiB in each of 28 layers" in kv.rounding[0]


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"memory_limit": 4000}, MemoryMisuseError, "less than one block of 8 tokens, 4096 bytes"),
        ({"dtype": torch.int8}, GeometryError, "int8"),
        ({"chunk_bytes": 1000}, MemoryMisuseError, "1000"),
        ({"watermark": 1.5}, MemoryMisuseError, "watermark 1.5"),
        ({"memory_limit": 1 << 50}, OutOfMemoryError, "bytes of host memory"),
        ({"max_batch": 0}, MemoryMisuseError, "0 requests"),
        ({"max_batch": 2.5}, MemoryMisuseError, "max_batch is 2.5"),
        ({"memory_limit": 4.5e6}, MemoryMisuseError, "memory_limit is 4500000.0"),
    ],
)
def test_an_impossible_cache_is_refused(wrong: dict[str, object], error: type[Exception], match: str) -> None:
    right = {"dtype": torch.float32, "max_batch": 1, "max_context": 8, "memory_limit": 1 << 20, "chunk_bytes": 4096}
    with VAttention() as kv:
        with pytest.raises(error, match=match):
            kv.init_kvcache(layers=2, kv_heads=2, head_dim=16, device="cpu", **(right | wrong))  # type: ignore[arg-type]
        kv.init_kvcache(layers=2, kv_heads=2, head_dim=16, device="cpu", **right)  # type: ignore[arg-type]
        assert kv.block_tokens == 8


def test_no_mapping_left_is_a_return_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixd_swap.vmem.backends import host, mapping_budget

    monkeypatch.setattr(host, "PROCESS_MAPPINGS", mapping_budget.MappingBudget(8))
    with VAttention() as kv:
        init(kv, "cpu")
        one, two = kv.alloc_reqid(), kv.alloc_reqid()
        assert kv.step(at(4, one, two)) == 0
        for length in range(8, 33, 4):  # turn by turn, so that no two neighbours have consecutive chunks
            before = kv.stats().free_bytes
            if kv.step(at(length, one, two)) < 0:
                break
        assert length < 32 and kv.stats().free_bytes == before
        kv.check_integrity()
        kv.free_reqid(two)
        assert kv.step(at(length, one)) == 0


def test_an_error_of_the_background_is_raised_by_the_next_call(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make()
    reqid = kv.alloc_reqid()

    def refuse(*_: object) -> None:
        raise MemoryMisuseError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(virtual_range.VirtualRange, "map", refuse)
        kv.step_async(at(4, reqid))
        with pytest.raises(MemoryMisuseError, match="the device is gone"):
            kv.step(at(4, reqid))
    assert kv.step(at(4, reqid)) == 0


class FacadeMachine(RuleBasedStateMachine):
    """An engine: requests that come, are stepped, written, shared, written again and freed.

    The model of a request is the values of its tokens and the blocks that it has, as numbers; what is shared has the
    same number. So the memory in use is known exactly, and with it when a step must fail.
    """

    def __init__(self, device: str, layout: Layout) -> None:
        super().__init__()
        self.kv = VAttention()
        self.limit = 12
        self.block = init(self.kv, device, layout, frames=self.limit, watermark=0.25, ahead=True)
        self.values: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.next = 0

    def fresh(self) -> int:
        self.next += 1
        return self.next

    @property
    def left(self) -> int:
        return self.limit - len({block for blocks in self.blocks.values() for block in blocks})

    def needed(self, wanted: list[int]) -> int:
        return sum(max(0, -(-length // self.block) - len(self.blocks.get(i, ()))) for i, length in enumerate(wanted))

    def draw_lengths(self, data: st.DataObject, most: int) -> list[int]:
        def draw(reqid: int) -> int:
            have = len(self.values[reqid])
            return data.draw(st.sampled_from([0, min(32, have + 1), min(32, have + data.draw(st.integers(0, most)))]))

        return [draw(reqid) if reqid in self.values else 0 for reqid in range(BATCH)]

    def put(self, reqid: int, token: int) -> None:
        value = self.fresh()
        for keys, values in layers(self.kv):
            keys[reqid, token] = value
            values[reqid, token] = -value
        self.values[reqid][token : token + 1] = [value]

    @rule()
    def alloc(self) -> None:
        if len(self.values) == BATCH:
            with pytest.raises(OutOfMemoryError):
                self.kv.alloc_reqid()
            return
        reqid = self.kv.alloc_reqid()
        assert reqid not in self.values
        self.values[reqid], self.blocks[reqid] = [], []

    @precondition(lambda self: self.values)
    @rule(data=st.data(), most=st.sampled_from([1, 6, 20]))
    def step(self, data: st.DataObject, most: int) -> None:
        wanted = self.draw_lengths(data, most)
        fits = self.needed(wanted) <= self.left
        assert self.kv.step(wanted) == (0 if fits else -1)
        if fits:
            for reqid, length in enumerate(wanted):
                if length:
                    while len(self.blocks[reqid]) * self.block < length:
                        self.blocks[reqid].append(self.fresh())
                    for token in range(len(self.values[reqid]), length):
                        self.put(reqid, token)

    @precondition(lambda self: self.values)
    @rule(data=st.data(), most=st.sampled_from([1, 20]))
    def step_async(self, data: st.DataObject, most: int) -> None:
        self.kv.step_async(self.draw_lengths(data, most))

    @precondition(lambda self: any(self.values.values()) and not all(self.values.values()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(reqid for reqid, values in self.values.items() if values)))
        child = data.draw(st.sampled_from(sorted(reqid for reqid, values in self.values.items() if not values)))
        tokens = data.draw(st.integers(1, len(self.values[parent])))
        full, tail = divmod(tokens, self.block)
        fits = bool(tail) <= self.left
        assert self.kv.share(child, parent, tokens) == (0 if fits else -1)
        if fits:
            self.values[child] = self.values[parent][:tokens]
            self.blocks[child] = self.blocks[parent][:full] + [self.fresh()] * bool(tail)

    @precondition(lambda self: any(self.values.values()))
    @rule(data=st.data())
    def write_again(self, data: st.DataObject) -> None:
        reqid = data.draw(st.sampled_from(sorted(reqid for reqid, values in self.values.items() if values)))
        token = data.draw(st.integers(0, len(self.values[reqid]) - 1))
        block = self.blocks[reqid][token // self.block]
        shared = sum(block in blocks for blocks in self.blocks.values()) > 1
        fits = not shared or self.left > 0
        assert self.kv.writable(reqid, token) == (0 if fits else -1)
        if fits:
            if shared:
                self.blocks[reqid][token // self.block] = self.fresh()
            self.put(reqid, token)

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        reqid = data.draw(st.sampled_from(sorted(self.values)))
        self.kv.free_reqid(reqid, streams=[0])
        del self.values[reqid], self.blocks[reqid]

    @invariant()
    def everybody_reads_what_is_theirs(self) -> None:
        for reqid, values in self.values.items():
            for keys, of_values in layers(self.kv):
                assert keys[reqid, : len(values), 1, -1].tolist() == values
                assert of_values[reqid, : len(values), 0, 0].tolist() == [-value for value in values]

    @invariant()
    def everything_adds_up(self) -> None:
        self.kv.check_integrity()

    def teardown(self) -> None:
        self.kv.close()


@pytest.mark.parametrize("layout", ["token", "layer"])
def test_an_engine_follows_the_model(device: str, layout: Layout) -> None:
    run_state_machine_as_test(
        lambda: FacadeMachine(device, layout), settings=settings(max_examples=25, stateful_step_count=40)
    )


def test_a_prefix_can_be_copied_instead_and_auto_takes_what_is_faster(make: Make) -> None:
    kv = make()
    parent, copied, shared = kv.alloc_reqid(), kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(10, parent)) == 0
    keys = layers(kv)[0][0]
    keys[parent, :10] = 6
    assert kv.share(copied, parent, 10, "copy") == 0
    assert kv.stats().shared_bytes == 0 and keys[copied, :10].eq(6).all()
    keys[copied, 0] = 1
    assert keys[parent, 0].eq(6).all(), "nothing is shared"
    kv.free_reqid(copied)
    kv.costs.map_s, kv.costs.copy_s = 1e-6, 1.0
    assert kv.share(shared, parent, 10, "auto") == 0 and kv.stats().shared_bytes > 0
    kv.free_reqid(shared)
    kv.costs.map_s, kv.costs.copy_s = 1.0, 1e-6
    again = kv.alloc_reqid()
    assert kv.share(again, parent, 10, "auto") == 0 and kv.stats().shared_bytes == 0
    assert keys[again, :10].eq(6).all()


def test_auto_measures_once_and_shares_while_memory_is_short(make: Make) -> None:
    kv = make()
    parent, child = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(10, parent)) == 0
    assert kv.share(child, parent, 8, "auto") == 0
    assert kv.costs.map_s is not None and kv.costs.copy_s is not None and kv.costs.copy_s > 0
    kv.free_reqid(child)
    tight = make(frames=4)
    parent, child = tight.alloc_reqid(), tight.alloc_reqid()
    assert tight.step(at(10, parent)) == 0
    tight.costs.map_s, tight.costs.copy_s = 1.0, 1e-6
    assert tight.share(child, parent, 8, "auto") == 0 and tight.stats().shared_bytes > 0


@pytest.mark.parametrize(("watermark", "copies"), [(0.25, True), (0.5, False)])
def test_auto_copies_only_while_more_than_the_watermark_is_free(make: Make, watermark: float, copies: bool) -> None:
    kv = make(frames=8, watermark=watermark)
    parent, ended = kv.alloc_reqid(), kv.alloc_reqid()
    assert kv.step(at(10, parent)) == 0 and kv.step(at(8, ended)) == 0
    kv.free_reqid(ended)
    vattention._synchronize(layers(kv)[0][0])
    kv.costs.map_s, kv.costs.copy_s = 1.0, 1e-6
    child = kv.alloc_reqid()
    assert child == ended, "a copy needs no mapping here, so it pays"
    assert kv.share(child, parent, 8, "auto") == 0  # five blocks of eight are free, and a copy takes two
    assert (kv.stats().shared_bytes == 0) == copies
