"""The scheduler's half, writing: which of the engine's blocks are given to the cache, and when.

The engine's blocks are pinned (their reference counts raised) when the step that completes the prefixd block that they
belong to is scheduled, until the workers have acknowledged its save. So nothing that the scheduler does with the
request meanwhile, preempting or finishing it, or sliding a window past the block, can change the bytes before they are
copied. Nothing is pinned but for a save that is under way: vLLM empties its cache only while nobody holds a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefixd.client import NamespaceSpec
from prefixd.integrations.engine.geometry import Geometry
from prefixd.integrations.engine.jobs import Namespaced, SaveJob


class Tables(Protocol):
    """A request's block ids, by the engine's groups; looked up only where a block is complete."""

    def __getitem__(self, group: int, /) -> Sequence[int]: ...


class EngineRequest(Protocol):
    """What is read of an engine's request."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and what was generated so far."""

    @property
    def block_hashes(self) -> Sequence[Hashable]:
        """The engine's own hash of the prefix that ends with each `hash_tokens` tokens; empty where it makes none."""


@dataclass(slots=True)
class Saving:
    """One request's blocks on their way into the cache."""

    spec: NamespaceSpec
    block: int
    """The next prefixd block to save."""
    tokens: array[int] = field(default_factory=lambda: array("I"), repr=False)
    """The request's token ids as far as jobs have needed them: to list all of a long prompt's takes milliseconds."""
    over: bool = False
    """The engine has let go of bytes of `block` without which no prefix that contains it can be used."""


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of which the engine has the bytes of the same groups."""

    first_block: int
    groups: tuple[int, ...]
    ids: list[list[int]]
    """The engine's blocks, by group."""
    blocks: int = 0


@dataclass(slots=True)
class _UnderWay:
    pinned: list[int]
    keys: list[Hashable]
    ranks_left: int


@dataclass(slots=True)
class SaveQueue:
    """Makes save jobs of the blocks that steps complete, and pins their memory.

    Args:
        geometry: how prefixd blocks are made of the engine's.
        pin: raises the reference counts of the engine's blocks, by id.
        unpin: lowers them.
        hash_tokens: tokens of each of the engine's block hashes.
        most_pinned: no more of the engine's blocks are pinned at a time; beyond it, saving waits.
        no_block: the engine's id for "no block here": outside a window, or freed.
    """

    geometry: Geometry
    pin: Callable[[Sequence[int]], None]
    unpin: Callable[[Sequence[int]], None]
    hash_tokens: int
    most_pinned: int
    no_block: int
    _requests: dict[str, Saving] = field(default_factory=dict)
    _jobs: dict[int, _UnderWay] = field(default_factory=dict)
    _keys: set[Hashable] = field(default_factory=set)
    _ready: list[SaveJob] = field(default_factory=list)
    _pinned: int = 0
    _next_id: int = 0

    @property
    def under_way(self) -> bool:
        """Whether saves wait for their acknowledgement."""
        return bool(self._jobs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def begin(self, request_id: str, spec: NamespaceSpec, cached_tokens: int) -> None:
        """From now on the request's blocks are saved, from the first on that is not cached."""
        self._requests[request_id] = Saving(spec, cached_tokens // self.geometry.block_tokens)

    def advance(self, request_id: str, request: EngineRequest, tables: Tables, computed_tokens: int) -> None:
        """Takes the blocks that are complete when the step being scheduled has run.

        Args:
            request: the engine's.
            tables: its block ids, by the engine's groups.
            computed_tokens: tokens whose KV is there then; no more than those that are known.
        """
        saving = self._requests.get(request_id)
        if saving is None or saving.over:
            return
        geometry = self.geometry
        most = self.most_pinned - sum(geometry.block_tokens // group.block_tokens for group in geometry.groups)
        runs: list[_Run] = []
        # What is too much to be pinned now is saved when some blocks are let go.
        while (saving.block + 1) * geometry.block_tokens <= computed_tokens and self._pinned <= most:
            ids = self._available(tables, saving.block)
            if ids is None:
                saving.over = True
                break
            if not runs or runs[-1].groups != tuple(ids):
                runs.append(_Run(saving.block, tuple(ids), [[] for _ in ids]))
            for found, of_run in zip(ids.values(), runs[-1].ids, strict=True):
                self.pin(found)
                self._pinned += len(found)
                of_run += found
            runs[-1].blocks += 1
            saving.block += 1
        for run in runs:
            self._make_job(request, saving, run)

    def take(self) -> list[SaveJob]:
        """The jobs that are new since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def acknowledge(self, job_id: int, ranks: int) -> None:
        """So many more ranks have ended a job."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.ranks_left -= ranks
        if job.ranks_left <= 0:
            del self._jobs[job_id]
            self._keys.difference_update(job.keys)
            self._release(job.pinned)

    def end(self, request_id: str) -> None:
        """The request has finished or was preempted."""
        self._requests.pop(request_id, None)

    def clear(self) -> None:
        """No request's blocks are saved any more; jobs under way are."""
        self._requests.clear()

    # -- inside -------------------------------------------------------------------------------------------------

    def _available(self, tables: Tables, block: int) -> dict[int, list[int]] | None:
        """The engine's blocks of one prefixd block, by place of their group; None where they are of no use.

        A group whose window has passed the block is left out: longer prefixes do not need its bytes. A prefix needs the
        bytes of all other groups.
        """
        available: dict[int, list[int]] = {}
        for place, group in enumerate(self.geometry.groups):
            ids = self._ids(tables[group.index], block, group.block_tokens)
            if ids is not None:
                available[place] = ids
            elif group.window_tokens is None:
                return None
        return available or None

    def _ids(self, table: Sequence[int], block: int, block_tokens: int) -> list[int] | None:
        """A group's blocks of one prefixd block; None where they are not all there (any more)."""
        count = self.geometry.block_tokens // block_tokens
        ids = list(table[block * count : (block + 1) * count])
        return ids if len(ids) == count and self.no_block not in ids else None

    def _make_job(self, request: EngineRequest, saving: Saving, run: _Run) -> None:
        pinned = [block for ids in run.ids for block in ids]
        keys = self._block_keys(request, saving, run)
        if keys and keys[-1] in self._keys:
            # Another request of the same prompt is saving them at this moment.
            self._release(pinned)
            return
        self._keys.update(keys)
        end = (run.first_block + run.blocks) * self.geometry.block_tokens
        saving.tokens.extend(request.all_token_ids[len(saving.tokens) : end])
        tokens = saving.tokens.tobytes()
        job = SaveJob(
            self._next_id,
            Namespaced(saving.spec.name, saving.spec.salt, tokens),
            run.first_block,
            run.blocks,
            run.groups,
            tuple(tuple(ids) for ids in run.ids),
        )
        self._next_id += 1
        self._jobs[job.id] = _UnderWay(pinned, keys, self.geometry.ranks)
        self._ready.append(job)

    def _block_keys(self, request: EngineRequest, saving: Saving, run: _Run) -> list[Hashable]:
        """What tells the blocks from others, by the engine's own hashes; empty where it makes none."""
        hashes = request.block_hashes
        each = self.geometry.block_tokens // self.hash_tokens
        return [
            (saving.spec.name, saving.spec.salt, hashes[(block + 1) * each - 1], run.groups)
            for block in range(run.first_block, run.first_block + run.blocks)
            if (block + 1) * each <= len(hashes)
        ]

    def _release(self, ids: Sequence[int]) -> None:
        """The last first, as vLLM frees a request's: it evicts in this order, and a prefix goes from its end."""
        if ids:
            self._pinned -= len(ids)
            self.unpin(ids[::-1])
