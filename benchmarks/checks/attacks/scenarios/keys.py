"""Attacks with block keys: the attacker chooses tokens so that its blocks get the keys that it wants."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import numpy as np

from benchmarks.checks.attacks.attacker import Given, Mallory
from benchmarks.checks.attacks.crafted_tokens import BLOCK_TOKENS, block_with_key, crowded_chain
from benchmarks.checks.attacks.scenario import Scenario
from benchmarks.checks.attacks.scene import Scene, ask, fresh_bytes, fresh_prompt
from prefixd.cache import BlockChain
from prefixd.client import Client, NamespaceSpec, PartSpec

_ENOUGH = 5
_SALTS = 14  # with a probability of 2%, no namespace with one of these salts can have a given key
_PART = (PartSpec("full", 0, 64),)
_VICTIM = NamespaceSpec("victim-model", BLOCK_TOKENS, (PartSpec("full", 0, 8192),))


class CrowdedKeys(Scenario):
    """Stores 4,096 blocks with keys that have an equal first half: a search would pass thousands of slots of the index
    if they were next to each other."""

    name = "crowded keys"
    closed_by = "tests/cache/index/keys/test_crafted_keys.py"
    blocks = 4096
    slower = 4.0
    """Limit of the time of a search, as a multiple of the time with other keys. Medians of searches that take turns do
    not differ that much by chance."""

    async def attack(self, mallory: Mallory) -> Given:
        """Compares searches for these keys with searches for the same number of other keys."""
        cache = await (await mallory.client()).register(NamespaceSpec("crowd", BLOCK_TOKENS, _PART))
        seed = int.from_bytes(cache.namespace_id, "little")
        prompts = {
            "crowded": np.frombuffer(crowded_chain(self.blocks, seed), np.uint32),
            "other": np.random.default_rng(0).integers(0, 1 << 32, self.blocks * BLOCK_TOKENS, np.uint32),
        }
        content = np.zeros(self.blocks * _PART[0].nbytes, np.uint8)
        for tokens in prompts.values():
            await cache.store(tokens, content)
        mallory.in_place()
        took: dict[str, list[float]] = {name: [] for name in prompts}
        while mallory.going:
            for name, tokens in prompts.items():
                begin_s = time.perf_counter()
                if (await cache.match(tokens)).blocks == self.blocks:
                    took[name].append(time.perf_counter() - begin_s)
        return {name: statistics.median(seconds) for name, seconds in took.items() if len(seconds) >= _ENOUGH}

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        if len(found) == 2 and found["crowded"] > self.slower * found["other"]:
            yield f"a search for crafted keys takes {found['crowded'] / found['other']:.1f} times as long as for others"


class KeySquatting(Scenario):
    """Stores blocks under the keys of a victim's first blocks, before the victim stores its own.

    A block key follows from the tokens and the namespace's id, which is no secret. Of four namespaces of the attacker,
    one can have any given key.
    """

    name = "key squatting"
    prompts = 4

    def prepare(self, scene: Scene) -> Given:
        """Returns keys of a victim's system prompts and of its prompts to the daemon's model, and the geometry of
        both."""
        numbers = [scene.next() for _ in range(2 * self.prompts)]
        served = scene.served()
        with scene.client() as victim:
            owned = victim.register(_VICTIM).namespace_id
        keys = [_first_key(owned, fresh_prompt(number).tobytes()) for number in numbers[: self.prompts]]
        keys += [
            _first_key(served.namespace_id, (fresh_prompt(number) % 256).tobytes())
            for number in numbers[self.prompts :]
        ]
        parts = [(part.group, part.rank, part.nbytes) for part in served.namespace.parts]
        return {"keys": keys, "numbers": numbers, "parts": parts}

    async def attack(self, mallory: Mallory) -> None:
        """Stores a block of the victim's geometry under each key: only blocks of one geometry share an index."""
        client = await mallory.client()
        keys = [bytes.fromhex(key) for key in mallory.given["keys"]]
        stored = 0
        for parts, wanted in (
            (_VICTIM.parts, keys[: self.prompts]),
            (tuple(PartSpec(*part) for part in mallory.given["parts"]), keys[self.prompts :]),
        ):
            specs = [NamespaceSpec("squat", BLOCK_TOKENS, parts, salt=b"%d" % number) for number in range(_SALTS)]
            caches = [await client.register(spec) for spec in specs]
            for key in wanted:
                for cache in caches:
                    block = block_with_key(key, int.from_bytes(cache.namespace_id, "little"))
                    if block is not None:
                        content = np.zeros(cache.spec.block_bytes, np.uint8)
                        stored += (await cache.store(np.frombuffer(block, np.uint32), content)).committed
                        break
        await mallory.hold(stored=stored, numbers=mallory.given["numbers"])

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        numbers = facts.get("numbers", [])
        with scene.client() as victim:
            cache = victim.register(_VICTIM)
            missed = 0
            for number in numbers[: self.prompts]:
                cache.store(fresh_prompt(number), fresh_bytes(number))
                missed += cache.match(fresh_prompt(number)).blocks == 0
            if missed:
                yield f"{missed} of {self.prompts} prompts of a victim can never be cached"
            if missed := sum(not _found_again(victim, number) for number in numbers[self.prompts :]):
                yield f"{missed} of {self.prompts} prompts to the daemon's model are never found again"


def _first_key(namespace_id: bytes, token_ids: bytes) -> str:
    return BlockChain(token_ids, BLOCK_TOKENS, int.from_bytes(namespace_id, "little")).key(0).hex()


def _found_again(client: Client, number: int) -> bool:
    prompt = fresh_prompt(number) % 256
    ask(client, prompt)
    _, finished = ask(client, prompt)
    return sum(finished.hit_tokens.values()) > 0
