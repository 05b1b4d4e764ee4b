"""Who computes blocks that are missing: claims, waits and their ends, against a model of plain dictionaries."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, NotFoundError, SessionEndedError
from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import ComputeClaim, Session
from prefixd.cache.background.forgetting import find_namespaces, forget
from prefixd.cache.sessions import claims
from prefixd.cache.sessions.claims import ClaimAnswer
from tests.cache.machine import RigMachine
from tests.rig import MakeRig, Rig
from tests.waiting import until

LONG_S = 60.0  # a wait that another call ends


async def claimed(rig: Rig, prompt: Sequence[int], session: Session | None = None, **how: Any) -> ClaimAnswer:
    return await rig.cache.computing.claim(session or rig.session, rig.namespace, rig.chain(prompt), **how)


def of(answer: ClaimAnswer) -> ComputeClaim:
    assert answer.claim is not None
    return answer.claim


async def waiting(
    rig: Rig, prompt: Sequence[int], session: Session | None = None, **how: Any
) -> asyncio.Task[ClaimAnswer]:
    """A call that waits for another's claim."""
    before = rig.cache.computing.counters.waits
    task = asyncio.create_task(claimed(rig, prompt, session or rig.open_session(), **{"wait_s": LONG_S, **how}))
    await until(lambda: rig.cache.computing.counters.waits > before)
    return task


async def test_the_first_computes_and_the_others_wait(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.put([1])
    first = await claimed(rig, [1, 2, 3])
    assert (first.cached_blocks, of(first).first_block, of(first).blocks) == (1, 1, 2)
    calls = [await waiting(rig, [1, 2, 3]) for _ in range(7)]
    await rig.put([1, 2])
    assert not any(call.done() for call in calls), "a part of it is of no use yet"
    await rig.put([1, 2, 3])
    answers = [await call for call in calls]
    assert answers == [ClaimAnswer(3)] * 7, "all is cached, and none has to compute"
    counters = rig.cache.computing.counters
    assert (counters.granted, counters.waits, counters.taken_over) == (1, 7, 0)
    assert counters.spared_tokens == 7 * 2 * rig.namespace.spec.block_tokens
    with pytest.raises(NotFoundError, match="its blocks are cached"):
        rig.cache.release(rig.session, of(first).id)


async def test_what_the_prompts_share_is_waited_for_and_the_rest_is_claimed(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16)
    long = of(await claimed(rig, [1, 2, 3, 4]))
    other = await waiting(rig, [1, 2, 8])
    apart = await claimed(rig, [9, 2, 3], rig.open_session())
    assert of(apart).first_block == 0, "another beginning is another's"
    await rig.put([1, 2])
    answer = await other
    assert (answer.cached_blocks, of(answer).first_block, of(answer).blocks) == (2, 2, 1)
    assert rig.cache.leases.find(rig.session, long.id) is long, "it goes on"
    seen = await rig.cache.computing.seen(answer.claim.session, rig.namespace, rig.chain([1, 2, 3, 9]), 2)  # type: ignore[union-attr]
    assert seen is not None and (seen.first_block, seen.end_block, seen.prompt_blocks) == (2, 3, 4)


@pytest.mark.parametrize("how", ["released", "expired", "session ended"])
async def test_when_a_claim_ends_without_its_blocks_the_first_that_waits_gets_it(make_rig: MakeRig, how: str) -> None:
    rig = make_rig()
    claim = of(await claimed(rig, [1, 2], ttl_s=5.0))
    sessions = [rig.open_session() for _ in range(3)]
    calls = [await waiting(rig, [1, 2], session) for session in sessions]
    if how == "released":
        rig.cache.release(rig.session, claim.id)
    elif how == "expired":
        rig.clock.now += 5
        rig.cache.leases.expire(rig.clock())
    else:
        rig.cache.leases.close(rig.session)
    assert of(await calls[0]).session is sessions[0]
    await until(lambda: rig.cache.computing.counters.waits == 5)
    assert not calls[1].done() and not calls[2].done(), "the others wait for it"
    rig.cache.leases.close(sessions[0])
    assert of(await calls[1]).session is sessions[1], "who has waited longer is first"
    assert rig.cache.computing.counters.taken_over == 2
    rig.cache.leases.close(sessions[2])
    with pytest.raises(SessionEndedError):
        await calls[2]


async def test_a_session_that_ended_while_it_waited_gets_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    await claimed(rig, [1, 2])
    gone, next_one = rig.open_session(), rig.open_session()
    calls = [await waiting(rig, [1, 2], session) for session in (gone, next_one)]
    rig.cache.leases.close(rig.session)
    rig.cache.leases.close(gone)  # after it was woken, before it goes on
    with pytest.raises(SessionEndedError):
        await calls[0]
    assert of(await calls[1]).session is next_one
    assert [claim.session for claim in rig.cache.computing] == [next_one]


async def test_a_claim_keeps_nobody_from_anything(make_rig: MakeRig) -> None:
    rig = make_rig()
    other = rig.open_session()
    await claimed(rig, [1, 2], other)
    assert await rig.put([1, 2]) == (2, 0), "others commit the blocks"
    assert len(rig.cache.computing) == 0 and not other.grants, "and end the claim so"
    assert await claimed(rig, [1, 2], other) == ClaimAnswer(2)


async def test_of_a_very_long_prompt_the_first_missing_blocks_are_claimed(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=16)
    monkeypatch.setattr(claims, "BLOCKS", 3)
    await rig.put([1])
    first = of(await claimed(rig, [1, 2, 3, 4, 5, 6]))
    assert (first.first_block, first.end_block) == (1, 4)
    call = await waiting(rig, [1, 2, 3, 4, 5, 6])
    await rig.put([1, 2, 3, 4])
    assert (of(await call).first_block, of(await call).end_block) == (4, 6), "who waited goes on with the rest"


async def test_a_block_counts_once_all_ranks_have_committed_it(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.namespace = rig.register("two ranks", parts=2)
    await claimed(rig, [1, 2])
    call = await waiting(rig, [1, 2])
    await rig.put([1, 2], parts=[0])
    assert len(rig.cache.computing) == 1 and not call.done()
    await rig.put([1, 2], parts=[1])
    assert await call == ClaimAnswer(2)


async def test_time_and_patience(make_rig: MakeRig) -> None:
    rig = make_rig()
    claim = of(await claimed(rig, [1, 2], ttl_s=5.0))
    rig.clock.now += 2
    refused = await claimed(rig, [1, 2, 3], rig.open_session())
    assert refused.claim is None and refused.other is not None
    assert (refused.other.age_s, refused.other.left_s, refused.other.end_block) == (2.0, 3.0, 2)
    assert (await claimed(rig, [1, 2], rig.open_session(), wait_s=0.01)).other is not None, "the time is over"
    assert await claimed(rig, [1, 2, 3]) == ClaimAnswer(0), "nobody waits for oneself"
    rig.cache.leases.renew(rig.session, [claim.id], 10.0, rig.clock())
    rig.clock.now += 5
    rig.cache.leases.expire(rig.clock())
    assert len(rig.cache.computing) == 1
    for wrong in (-1.0, math.nan, math.inf, claims.LONGEST_WAIT_S + 1):
        with pytest.raises(InvalidArgumentError, match="wait_s is"):
            await claimed(rig, [1, 2], wait_s=wrong)


async def test_a_caller_that_gives_up_waits_no_longer(make_rig: MakeRig) -> None:
    rig = make_rig()
    claim = of(await claimed(rig, [1, 2]))
    calls = [await waiting(rig, [1, 2]) for _ in range(2)]
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    assert len(claim.waits) == 1
    rig.cache.release(rig.session, claim.id)
    assert (await calls[1]).claim is not None


async def test_tenants_do_not_see_each_others_claims(make_rig: MakeRig) -> None:
    tenants = Tenants()
    rig = make_rig(share_after=1, tenants=tenants)  # one namespace for all tenants
    await claimed(rig, [1, 2])
    stranger = rig.cache.leases.open("other", 1, rig.clock(), tenants.known("other"))
    assert await rig.cache.computing.seen(stranger, rig.namespace, rig.chain([1, 2]), 0) is None
    assert (await claimed(rig, [1, 2], stranger)).claim is not None


async def test_salts_are_apart(make_rig: MakeRig) -> None:
    rig = make_rig()
    salted = rig.register(salt=b"a")
    await claimed(rig, [1, 2])
    answer = await rig.cache.computing.claim(rig.open_session(), salted, rig.chain([1, 2], salted))
    assert answer.claim is not None


async def test_bounds(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "CLAIMS_OF_SESSION", 2)
    monkeypatch.setattr(claims, "CLAIMS", 3)
    monkeypatch.setattr(claims, "WAITS", 1)
    monkeypatch.setattr(claims, "CLAIMED_BLOCKS", 6)
    rig = make_rig()
    for start in (1, 2):
        await claimed(rig, [start, 0])
    with pytest.raises(ExhaustedError, match="has 2 claims, the most allowed; compute without a claim"):
        await claimed(rig, [3, 0])
    other = rig.open_session()
    with pytest.raises(ExhaustedError, match=r"2 claims of 4 blocks, of 3 and 6 at most, .* for 3 blocks"):
        await claimed(rig, [3, 0, 0], other)
    await claimed(rig, [3, 0], other)
    with pytest.raises(ExhaustedError, match="3 claims"):
        await claimed(rig, [4], rig.open_session())
    await waiting(rig, [1, 0], other)
    with pytest.raises(ExhaustedError, match="1 calls wait"):
        await claimed(rig, [2, 0], other, wait_s=1.0)


async def test_no_tenant_takes_the_claims_and_waits_of_others(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("CLAIMS", "WAITS", "CLAIMED_BLOCKS"):
        monkeypatch.setattr(claims, limit, 8)
    tenants = Tenants()
    rig = make_rig(tenants=tenants)
    stranger = rig.cache.leases.open("other", 1, rig.clock(), tenants.known("other"))
    granted = 0
    with pytest.raises(ExhaustedError, match="tenant default"):
        for granted in range(9):
            await claimed(rig, [granted])
    waits = [await waiting(rig, [0]) for _ in range(granted)]
    with pytest.raises(ExhaustedError, match="of tenant default"):
        await claimed(rig, [0], rig.open_session(), wait_s=1.0)
    assert 4 <= granted < 8
    for number in range(2):
        assert of(await claimed(rig, [number], stranger)).blocks == 1
    third = rig.cache.leases.open("third", 1, rig.clock(), tenants.known("other"))
    waits.append(await waiting(rig, [0], third))
    for wait in waits:
        wait.cancel()


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
SESSIONS = st.integers(0, 2)


class Claims(RigMachine):
    """Sessions claim, compute, give up and die, and blocks are evicted.

    The model knows which prompts are cached, and the claims: by their prompt, first block and session.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cached: set[tuple[int, ...]] = set()
        """Each cached block, as the prompt that ends with it."""
        self.model: dict[ComputeClaim, tuple[tuple[int, ...], float]] = {}
        """The prompt of each claim, and when it expires."""
        self.sessions = [self.rig.open_session() for _ in range(3)]

    async def make(self, path: Path) -> Rig:
        return Rig(path, cpu=64, disk=0, default_ttl_s=10.0)

    def let_go(self) -> None:
        """Nothing is held."""

    def found(self, prompt: Sequence[int]) -> int:
        return next((n for n in range(len(prompt)) if tuple(prompt[: n + 1]) not in self.cached), len(prompt))

    def other(self, prompt: Sequence[int], block: int) -> list[ComputeClaim]:
        """Claims on a block of the prompt."""
        beginning = tuple(prompt[: block + 1])
        return [
            claim
            for claim, (of_claim, _) in self.model.items()
            if claim.first_block <= block and of_claim[: block + 1] == beginning
        ]

    @rule(prompt=PROMPTS, session=SESSIONS, ttl_s=st.sampled_from([0.0, 3.0]))
    def claim(self, prompt: list[int], session: int, ttl_s: float) -> None:
        who, block = self.sessions[session], self.found(prompt)
        answer = self.run(claimed(self.rig, prompt, who, ttl_s=ttl_s))
        assert answer.cached_blocks == block
        others = self.other(prompt, block) if block < len(prompt) else []
        if block == len(prompt):
            assert answer.claim is None and answer.other is None
        elif not others:
            claim = of(answer)
            assert (claim.first_block, claim.end_block, claim.session) == (block, len(prompt), who)
            self.model[claim] = tuple(prompt), self.rig.clock() + (ttl_s or 10.0)
        elif answer.other is None:
            assert answer.claim is None and any(claim.session is who for claim in others)
        else:
            assert any(claim.session is not who for claim in others)
            ends = {
                sum(
                    of_claim[: n + 1] == tuple(prompt[: n + 1]) for n in range(min(len(of_claim), len(prompt)))
                )  # equal beginnings
                for claim in others
                for of_claim, _ in [self.model[claim]]
            }
            assert answer.other.first_block == block and answer.other.end_block in ends

    @rule(prompt=PROMPTS)
    def compute(self, prompt: list[int]) -> None:
        """Somebody commits all of a prompt; whether it had a claim or none."""
        before = self.found(prompt)
        self.run(self.rig.put(prompt))
        if before < len(prompt):
            self.cached |= {tuple(prompt[: n + 1]) for n in range(len(prompt))}
            for claim, (of_claim, _) in list(self.model.items()):
                if of_claim == tuple(prompt[: len(of_claim)]):
                    del self.model[claim]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(sorted(self.model, key=lambda each: each.id)))
        self.rig.cache.release(claim.session, claim.id)
        del self.model[claim]

    @rule(session=SESSIONS)
    def die(self, session: int) -> None:
        gone = self.sessions[session]
        self.rig.cache.leases.close(gone)
        self.sessions[session] = self.rig.open_session()
        self.model = {claim: of_claim for claim, of_claim in self.model.items() if claim.session is not gone}

    @rule(seconds=st.sampled_from([1, 4]))
    def pass_time(self, seconds: int) -> None:
        now = self.rig.clock.now = self.rig.clock.now + seconds
        self.rig.cache.leases.expire(now)
        self.model = {claim: of_claim for claim, of_claim in self.model.items() if of_claim[1] > now}

    @rule()
    def evict(self) -> None:
        """All blocks go. Claims whose blocks were cached in part stay at the length at which they were made."""

        async def drop() -> None:
            await self.rig.cache.mover.checksums.wait_for_all()
            blocks = await find_namespaces(self.rig.trie, None)
            async for _ in forget(self.rig.cache.mover, blocks, shared=False):
                pass

        self.run(drop())
        self.cached.clear()

    @rule(prompt=PROMPTS, first=SESSIONS, second=SESSIONS, how=st.sampled_from(["compute", "release", "die"]))
    def wait(self, prompt: list[int], first: int, second: int, how: str) -> None:
        """One waits for another's new claim, which ends in some way."""
        block = self.found(prompt)
        if first == second or block == len(prompt) or self.other(prompt, block):
            return

        async def wait_for_it() -> tuple[ComputeClaim, ClaimAnswer]:
            claim = of(await claimed(self.rig, prompt, self.sessions[first]))
            call = await waiting(self.rig, prompt, self.sessions[second])
            if how == "compute":
                await self.rig.put(prompt)
            elif how == "release":
                self.rig.cache.release(claim.session, claim.id)
            else:
                self.rig.cache.leases.close(claim.session)
            return claim, await call

        claim, answer = self.run(wait_for_it())
        if how == "compute":
            assert answer == ClaimAnswer(len(prompt))
            self.cached |= {tuple(prompt[: n + 1]) for n in range(len(prompt))}
            for each, (of_claim, _) in list(self.model.items()):
                if of_claim == tuple(prompt[: len(of_claim)]):
                    del self.model[each]
            return
        assert of(answer).session is self.sessions[second] and of(answer).first_block == block
        if how == "die":
            self.sessions[first] = self.rig.open_session()
            self.model = {each: of_claim for each, of_claim in self.model.items() if each.session is not claim.session}
        self.model[of(answer)] = tuple(prompt), self.rig.clock() + 10.0

    @invariant()
    def the_claims_are_those_of_the_model(self) -> None:
        assert set(self.rig.cache.computing) == self.model.keys()
        assert not self.rig.cache.computing.check_integrity()
        self.rig.check()


@pytest.mark.slow
def test_claims_are_those_of_the_model() -> None:
    run_state_machine_as_test(Claims, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))
