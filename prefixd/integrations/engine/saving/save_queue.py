"""The scheduler's half, writing: which of the engine's blocks are given to the cache, and when.

The engine's blocks are pinned (their reference counts raised) when the step that completes the prefixd block that they
belong to is scheduled, until the workers have acknowledged its save. So nothing that the scheduler does with the
request meanwhile, preempting or finishing it, or sliding a window past the block, can change the bytes before they are
copied. Nothing is pinned but for a save that is under way: vLLM empties its cache only while nobody holds a block.

Of layers that need all of a prefix every block is saved; of the others the ends of prefixes that are likely to be asked
for (`ResumePoints`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefixd.client import NamespaceSpec, Retention
from prefixd.integrations.engine.geometry import Geometry, Tail
from prefixd.integrations.engine.jobs import Namespaced, SaveJob
from prefixd.integrations.engine.saving.resume_points import ResumePoints


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
    first: int
    """Blocks that were cached when it began."""
    points: ResumePoints
    block: int
    """The next prefixd block to save."""
    tokens: array[int] = field(default_factory=lambda: array("I"), repr=False)
    """The request's token ids as far as jobs have needed them: to list all of a long prompt's takes milliseconds."""
    retention: tuple[Retention, ...] = ()
    """Priorities of the prompt's blocks."""
    over: bool = False
    """The engine has let go of bytes of `block` without which no prefix that contains it can be used."""


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of which the bytes of the same groups are saved."""

    first_block: int
    groups: tuple[int, ...]
    ids: list[list[int]]
    """The engine's blocks, by group."""
    blocks: int = 0

    @property
    def end(self) -> int:
        return self.first_block + self.blocks


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
        every: see `ResumePoints`.
    """

    geometry: Geometry
    pin: Callable[[Sequence[int]], None]
    unpin: Callable[[Sequence[int]], None]
    hash_tokens: int
    most_pinned: int
    no_block: int
    every: int = 1
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

    def begin(
        self,
        request_id: str,
        spec: NamespaceSpec,
        cached_tokens: int,
        prompt_tokens: int,
        branch_tokens: int = 0,
        retention: tuple[Retention, ...] = (),
    ) -> None:
        """From now on the request's blocks are saved, from the first on that is not cached.

        Args:
            prompt_tokens: what is known of it now; the rest it generates.
            branch_tokens: how far other prompts are the same; 0: not known.
            retention: priorities of the prompt's blocks.
        """
        geometry = self.geometry
        first = cached_tokens // geometry.block_tokens
        prompt, branch = geometry.most_loadable(prompt_tokens), branch_tokens
        points = ResumePoints(prompt // geometry.block_tokens, self.every, branch // geometry.block_tokens)
        self._requests[request_id] = Saving(spec, first, points, first, retention=retention)

    def advance(
        self,
        request_id: str,
        request: EngineRequest,
        tables: Tables,
        computed_tokens: int,
        states: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Takes the blocks that are complete when the step being scheduled has run.

        Args:
            request: the engine's.
            tables: its block ids, by the engine's groups.
            computed_tokens: tokens whose KV is there then; no more than those that are known.
            states: (group of the engine's, id, tokens) of the blocks that have the states after so many tokens then.
        """
        saving = self._requests.get(request_id)
        if saving is None or saving.over:
            return
        geometry = self.geometry
        most = self.most_pinned - sum(geometry.block_tokens // group.block_tokens for group in geometry.groups)
        runs: dict[tuple[int, ...], list[_Run]] = {geometry.body: []}  # in the order in which they are to be saved
        # What is too much to be pinned now is saved when some blocks are let go.
        while (saving.block + 1) * geometry.block_tokens <= computed_tokens and self._pinned <= most:
            ids = self._available(tables, saving.block)
            if ids is None:
                saving.over = True
                break
            self._extend(runs, geometry.body, saving.block, ids)
            for tail in geometry.tails:
                if not tail.state and saving.points.need(saving.block, tail.span):
                    self._extend(runs, tail.groups, saving.block, ids)
            saving.block += 1
        for block, ids in self._states(saving, states).items():
            for tail in geometry.tails:
                if tail.state and all(group in ids for group in tail.groups):
                    self._extend(runs, tail.groups, block, ids)
        for of_groups in runs.values():
            for run in of_groups:
                self._make_job(request, saving, run)

    def finish(
        self,
        request_id: str,
        request: EngineRequest,
        tables: Tables,
        computed_tokens: int,
        cached: Callable[[int, int], int],
    ) -> None:
        """The request has ended: takes what is complete, and the end of it all, which a longer prompt may continue.

        Args:
            cached: of a group of the engine's, by index, and the number of one of its blocks of the request, the id
                under which the engine still has the bytes, though the request has let go of them; else `no_block`.
        """
        self.advance(request_id, request, tables, computed_tokens)
        saving = self._requests.get(request_id)
        if saving is not None and saving.block > saving.first and saving.block not in saving.points:
            for tail in self.geometry.tails:
                run = self._end(saving.block, tail, tables, cached)
                if run is not None:
                    self._make_job(request, saving, run)
        self.end(request_id)

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
        """The request is over or was preempted: no more of its blocks are saved."""
        self._requests.pop(request_id, None)

    def clear(self) -> None:
        """No request's blocks are saved any more; jobs under way are."""
        self._requests.clear()

    # -- inside -------------------------------------------------------------------------------------------------

    def _available(self, tables: Tables, block: int) -> dict[int, list[int]] | None:
        """The engine's blocks of one prefixd block, by place of their group; None where they are of no use.

        A group whose window has passed the block is left out: longer prefixes do not need its bytes. A prefix needs the
        bytes of all other groups. States are not found here: which block of a table has which is the engine's affair.
        """
        available: dict[int, list[int]] = {}
        for place, group in enumerate(self.geometry.groups):
            if group.state:
                continue
            ids = self._ids(tables[group.index], block, group.block_tokens)
            if ids is not None:
                available[place] = ids
            elif group.window_tokens is None:
                return None
        return available or None

    def _states(self, saving: Saving, states: Sequence[tuple[int, int, int]]) -> dict[int, dict[int, list[int]]]:
        """Of the states that the engine has, those to be saved: by prefixd block, the ids by place of their group."""
        places = {group.index: place for place, group in enumerate(self.geometry.groups)}
        wanted: dict[int, dict[int, list[int]]] = {}
        for index, block_id, tokens in states:
            blocks, rest = divmod(tokens, self.geometry.block_tokens)
            known = index in places and block_id != self.no_block
            if known and not rest and saving.first < blocks <= saving.block and saving.points.need(blocks - 1, 1):
                wanted.setdefault(blocks - 1, {})[places[index]] = [block_id]
        return wanted

    def _extend(
        self, runs: dict[tuple[int, ...], list[_Run]], groups: tuple[int, ...], block: int, ids: Mapping[int, list[int]]
    ) -> None:
        """Adds a block to the runs of `groups`, as far as there are ids of them, and pins it."""
        there = tuple(group for group in groups if group in ids)
        if not there:
            return
        of_groups = runs.setdefault(groups, [])
        if not of_groups or of_groups[-1].groups != there or of_groups[-1].end != block:
            of_groups.append(_Run(block, there, [[] for _ in there]))
        run = of_groups[-1]
        for group, of_run in zip(there, run.ids, strict=True):
            self.pin(ids[group])
            self._pinned += len(ids[group])
            of_run += ids[group]
        run.blocks += 1

    def _end(self, blocks: int, tail: Tail, tables: Tables, cached: Callable[[int, int], int]) -> _Run | None:
        """What a prefix of so many blocks needs of the tail's groups, pinned; None where the engine lacks some."""
        wanted: dict[int, list[list[int]]] = {}
        first = max(0, blocks - tail.span)
        for place in tail.groups:
            group = self.geometry.groups[place]
            table = [] if tail.state else tables[group.index]
            each = self.geometry.block_tokens // group.block_tokens
            for block in range(first, blocks):
                ids = [
                    cached(group.index, number) if tail.state or table[number] == self.no_block else table[number]
                    for number in range(block * each, (block + 1) * each)
                ]
                if self.no_block in ids:
                    return None
                wanted.setdefault(block, []).append(ids)
        runs: dict[tuple[int, ...], list[_Run]] = {}
        for block, of_groups in wanted.items():
            self._extend(runs, tail.groups, block, dict(zip(tail.groups, of_groups, strict=True)))
        return runs[tail.groups][0]

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
        tokens = saving.tokens[:end].tobytes()  # jobs of other groups may have needed more
        job = SaveJob(
            self._next_id,
            Namespaced(saving.spec.name, saving.spec.salt, tokens),
            run.first_block,
            run.blocks,
            run.groups,
            tuple(tuple(ids) for ids in run.ids),
            saving.retention,
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
