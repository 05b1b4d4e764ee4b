"""Hosts with different codecs for disk and store, a few slots each, and a store between them that is damaged.

After every step each object of the store is opened: under the name of exact bytes are exact bytes, under a lossy
codec's what is as close to the exact ones as it says, even after blocks have gone from lossy copies to memory, to other
hosts, to disk and back. Each byte that a host serves is exact, or known there as altered.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from prefixd.base.codec_names import CodecName
from prefixd.base.errors import ExhaustedError
from tests.cache.disk.coded_rig import CodedRig
from tests.cache.remote.coded_hosts import host, judge, remote_of

T = TypeVar("T")

SETTINGS: list[tuple[CodecName, CodecName]] = [  # of the store, and of the disk
    ("exact", "int8"),
    ("int8", "exact"),
    ("lossless", "k8v4"),
    ("int8", "int8"),
    ("exact", "exact"),
]
EXACT_ALONE = 4
"""The host that never reads a lossy copy."""

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=4)
hosts = st.integers(0, len(SETTINGS) - 1)


class CodedHosts(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()
    """Objects of each kind that were judged, in all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="prefixd-test-")
        self.loop = asyncio.new_event_loop()
        self.objects: dict[bytes, bytes] = {}
        self.rigs = [self.run(self.make(number)) for number in range(len(SETTINGS))]

    async def make(self, number: int) -> CodedRig:
        remote, disk = SETTINGS[number]
        folder = Path(self.folder.name) / str(number)
        return host(folder, self.objects, remote, disk_codec=disk, cpu=5, disk=8, gpu=4, mixed=True)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def and_rest() -> T:
            try:
                return await work
            finally:
                for rig in getattr(self, "rigs", []):
                    await remote_of(rig).lookups.close()
                    await rig.cache.mover.quiesce()

        return self.loop.run_until_complete(asyncio.wait_for(and_rest(), 60))

    @rule(number=hosts, prompt=prompts)
    def put(self, number: int, prompt: list[int]) -> None:
        with suppress(ExhaustedError):
            self.run(self.rigs[number].put(prompt))

    @rule(number=hosts, prompt=prompts)
    def put_gpu(self, number: int, prompt: list[int]) -> None:
        """Computed by a worker, also what is known to be elsewhere."""
        rig = self.rigs[number]
        rig.unhold(self.run(rig.put_gpu(prompt)), rig.cache.tiers.compute)

    @rule(number=hosts, prompt=prompts)
    def bring_to_gpu(self, number: int, prompt: list[int]) -> None:
        rig, gpu = self.rigs[number], self.rigs[number].cache.tiers.compute
        if rows := rig.rows(prompt):
            with rig.cache.placement.holds.hold("test", rig.trie, np.array(rows), gpu):
                self.run(rig.cache.mover.bring(rig.trie, np.array(rows), gpu))

    @rule(number=hosts, prompt=prompts)
    def get(self, number: int, prompt: list[int]) -> None:
        self.run(self.rigs[number].get(prompt))
        assert not self.rigs[EXACT_ALONE].served_altered

    @rule(number=hosts)
    def share(self, number: int) -> None:
        self.run(remote_of(self.rigs[number]).sharing.write_all())

    @rule(number=hosts)
    def flush(self, number: int) -> None:
        self.run(self.rigs[number].cache.write_back.flush())

    @rule(number=hosts, prompt=prompts)
    def leave_memory(self, number: int, prompt: list[int]) -> None:
        """What is on disk goes from memory, so that it comes back from there."""
        rig = self.rigs[number]
        self.run(rig.cache.write_back.flush())
        if rows := rig.rows(prompt):
            rig.cache.placement.drop(rig.trie, rows[::-1], rig.cache.tiers.shared)

    @rule(number=hosts)
    def restart(self, number: int) -> None:
        self.run(self.rigs[number].cache.write_back.flush())
        self.run(self.rigs[number].restart())

    @rule(number=hosts, seconds=st.sampled_from([2.0, 30.0, 700.0]))
    def time_passes(self, number: int, seconds: float) -> None:
        self.rigs[number].clock.now += seconds
        self.run(remote_of(self.rigs[number]).known._forget_marks(self.rigs[number].clock.now - 600))

    @precondition(lambda self: self.objects)
    @rule(at=st.integers(0, 1 << 16), how=st.sampled_from(["lose", "cut", "flip", "swap"]), byte=st.integers(0, 9999))
    def damage(self, at: int, how: str, byte: int) -> None:
        names = list(self.objects)
        name = names[at % len(names)]
        value = bytearray(self.objects[name])
        if how == "lose":
            del self.objects[name]
        elif how == "cut":
            self.objects[name] = bytes(value[: byte % len(value)])
        elif how == "flip":
            value[byte % len(value)] ^= 1 + byte % 255
            self.objects[name] = bytes(value)
        else:
            self.objects[name] = self.objects[names[byte % len(names)]]

    @invariant()
    def every_object_is_what_its_name_says(self) -> None:
        self.seen.update(judge(self.rigs[EXACT_ALONE], self.objects, 4))
        for rig in self.rigs:
            rig.check()

    def teardown(self) -> None:
        async def end() -> None:
            for rig in self.rigs:
                await rig.close()

        try:
            self.loop.run_until_complete(end())
        finally:
            self.loop.close()
            self.folder.cleanup()


@pytest.mark.slow
def test_no_host_gets_a_lossy_byte_as_an_exact_one() -> None:
    CodedHosts.seen.clear()
    run_state_machine_as_test(CodedHosts, settings=settings(max_examples=20, stateful_step_count=40, deadline=None))
    assert CodedHosts.seen["exact"] and CodedHosts.seen["lossy"]
