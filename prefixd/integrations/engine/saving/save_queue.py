"""Decides in the scheduler which of the engine's blocks are saved, and when.

The queue pins the engine's blocks (raises their reference counts) when the engine schedules the step that completes a
prefixd block, and unpins them when the workers have acknowledged its save. So preempting or finishing the request, or
sliding a window past the block, cannot change the bytes before they are copied. Only saves under way pin blocks: vLLM
empties its cache only while no block is held.

Every block is saved for layers that need all of a prefix. For the others the ends of prefixes are saved that are likely
to be asked for (`ResumePoints`).
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
    """A request's block ids, by the engine's groups; read only when a block is complete."""

    def __getitem__(self, group: int, /) -> Sequence[int]: ...


class EngineRequest(Protocol):
    """The fields of an engine's request that are read here."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt and the tokens generated so far."""

    @property
    def block_hashes(self) -> Sequence[Hashable]:
        """The engine's hash of the prefix after each `hash_tokens` tokens; empty if it makes none."""


@dataclass(slots=True)
class Saving:
    """How far one request's blocks are saved."""

    spec: NamespaceSpec
    first: int
    """Blocks that were cached when saving began."""
    points: ResumePoints
    block: int
    """The next prefixd block to save."""
    tokens: array[int] = field(default_factory=lambda: array("I"), repr=False)
    """The request's token ids as far as jobs have needed them: listing all of a long prompt takes milliseconds."""
    retention: tuple[Retention, ...] = ()
    """Priorities of the prompt's blocks."""
    request_id: str = ""
    """The engine's request."""
    traceparent: str = ""
    """The span of the engine's caller; empty: unknown."""
    over: bool = False
    """The engine has freed bytes of `block` that every longer prefix needs."""


@dataclass(slots=True)
class _Run:
    """Consecutive blocks that are saved for the same groups."""

    first_block: int
    groups: tuple[int, ...]
    ids: list[list[int]]
    """The engine's block ids, by group."""
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
    """Makes save jobs of the blocks that steps complete, and pins these blocks.

    Args:
        geometry: how prefixd blocks are made of the engine's.
        pin: raises the reference counts of the engine's blocks, by id.
        unpin: lowers them.
        hash_tokens: tokens of each of the engine's block hashes.
        most_pinned: most of the engine's blocks that are pinned at a time; saving waits beyond.
        no_block: the engine's id of a missing block: outside a window, or freed.
        every: as in `ResumePoints`.
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
        """Whether workers have saves to acknowledge."""
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
        traceparent: str = "",
    ) -> None:
        """Begins to save a request's blocks, from the first uncached one on.

        Args:
            prompt_tokens: tokens that the request has now; later ones are generated.
            branch_tokens: tokens that earlier prompts share before the request parts from them; 0: not known.
            retention: priorities of the prompt's blocks.
            traceparent: the span of the engine's caller; empty: unknown.
        """
        geometry = self.geometry
        first = cached_tokens // geometry.block_tokens
        prompt, branch = geometry.most_loadable(prompt_tokens), branch_tokens
        points = ResumePoints(prompt // geometry.block_tokens, self.every, branch // geometry.block_tokens)
        self._requests[request_id] = Saving(
            spec, first, points, first, retention=retention, request_id=request_id, traceparent=traceparent
        )

    def advance(
        self,
        request_id: str,
        request: EngineRequest,
        tables: Tables,
        computed_tokens: int,
        states: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Makes jobs of the blocks that are complete after the step that is being scheduled.

        Args:
            request: the engine's.
            tables: its block ids, by the engine's groups.
            computed_tokens: tokens with KV after the step; not more than the request has.
            states: (the engine's group, block id, tokens) of blocks that have the state after `tokens` tokens then.
        """
        saving = self._requests.get(request_id)
        if saving is None or saving.over:
            return
        geometry = self.geometry
        most = self.most_pinned - sum(geometry.block_tokens // group.block_tokens for group in geometry.groups)
        runs: dict[tuple[int, ...], list[_Run]] = {geometry.body: []}  # in the order of saving
        # Blocks beyond the limit are saved by a later step, when others are unpinned.
        while (saving.block + 1) * geometry.block_tokens <= computed_tokens and self._pinned <= most:
            ids = self._available_ids(tables, saving.block)
            if ids is None:
                saving.over = True
                break
            self._pin_block(runs, geometry.body, saving.block, ids)
            for tail in geometry.tails:
                if not tail.state and saving.points.need(saving.block, tail.span):
                    self._pin_block(runs, tail.groups, saving.block, ids)
            saving.block += 1
        for block, ids in self._wanted_states(saving, states).items():
            for tail in geometry.tails:
                if tail.state and all(group in ids for group in tail.groups):
                    self._pin_block(runs, tail.groups, block, ids)
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
        """Makes jobs of an ended request's complete blocks, and of its end, which a longer prompt may continue.

        Args:
            cached: (index of the engine's group, number of a block of the request) -> id under which the engine's
                cache still has the block, although the request has freed it; else `no_block`.
        """
        self.advance(request_id, request, tables, computed_tokens)
        saving = self._requests.get(request_id)
        if saving is not None and saving.block > saving.first and saving.block not in saving.points:
            for tail in self.geometry.tails:
                run = self._tail_run(saving.block, tail, tables, cached)
                if run is not None:
                    self._make_job(request, saving, run)
        self.stop(request_id)

    def take_jobs(self) -> list[SaveJob]:
        """Returns the jobs that are new since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def acknowledge(self, job_id: int, ranks: int) -> None:
        """Notes that `ranks` more ranks have ended a job; unpins its blocks after the last one."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.ranks_left -= ranks
        if job.ranks_left <= 0:
            del self._jobs[job_id]
            self._keys.difference_update(job.keys)
            self._unpin(job.pinned)

    def stop(self, request_id: str) -> None:
        """Saves no more blocks of a request that has ended or was preempted."""
        self._requests.pop(request_id, None)

    def clear(self) -> None:
        """Saves no more blocks of any request; jobs under way go on."""
        self._requests.clear()

    # -- inside -------------------------------------------------------------------------------------------------

    def _available_ids(self, tables: Tables, block: int) -> dict[int, list[int]] | None:
        """The engine's block ids of one prefixd block, by index of their group; None if a needed group has freed some.

        A group with a window that has passed the block is left out: longer prefixes do not need its bytes. A prefix
        needs the bytes of all other groups. States are left out too: the engine says which block has a state.
        """
        available: dict[int, list[int]] = {}
        for place, group in enumerate(self.geometry.groups):
            if group.state:
                continue
            ids = self._block_ids(tables[group.index], block, group.block_tokens)
            if ids is not None:
                available[place] = ids
            elif group.rule is None:
                return None
        return available or None

    def _wanted_states(self, saving: Saving, states: Sequence[tuple[int, int, int]]) -> dict[int, dict[int, list[int]]]:
        """The states to be saved: by prefixd block, block ids by index of their group."""
        places = {group.index: place for place, group in enumerate(self.geometry.groups)}
        wanted: dict[int, dict[int, list[int]]] = {}
        for index, block_id, tokens in states:
            blocks, rest = divmod(tokens, self.geometry.block_tokens)
            known = index in places and block_id != self.no_block
            if known and not rest and saving.first < blocks <= saving.block and saving.points.need(blocks - 1, 1):
                wanted.setdefault(blocks - 1, {})[places[index]] = [block_id]
        return wanted

    def _pin_block(
        self, runs: dict[tuple[int, ...], list[_Run]], groups: tuple[int, ...], block: int, ids: Mapping[int, list[int]]
    ) -> None:
        """Adds a block to the runs of `groups`, for the groups that have ids of it, and pins it."""
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

    def _tail_run(self, blocks: int, tail: Tail, tables: Tables, cached: Callable[[int, int], int]) -> _Run | None:
        """The blocks that a prefix of `blocks` blocks needs of the tail's groups, pinned; None if some are missing."""
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
            self._pin_block(runs, tail.groups, block, dict(zip(tail.groups, of_groups, strict=True)))
        return runs[tail.groups][0]

    def _block_ids(self, table: Sequence[int], block: int, block_tokens: int) -> list[int] | None:
        """A group's block ids of one prefixd block; None if one is missing or freed."""
        count = self.geometry.block_tokens // block_tokens
        ids = list(table[block * count : (block + 1) * count])
        return ids if len(ids) == count and self.no_block not in ids else None

    def _make_job(self, request: EngineRequest, saving: Saving, run: _Run) -> None:
        pinned = [block for ids in run.ids for block in ids]
        keys = self._block_keys(request, saving, run)
        if keys and keys[-1] in self._keys:
            # Another request with the same prompt is saving them at this moment.
            self._unpin(pinned)
            return
        self._keys.update(keys)
        end = (run.first_block + run.blocks) * self.geometry.block_tokens
        saving.tokens.extend(request.all_token_ids[len(saving.tokens) : end])
        tokens = saving.tokens[:end].tobytes()  # jobs of other groups may have needed more
        job = SaveJob(
            self._next_id,
            Namespaced(saving.spec, tokens),
            run.first_block,
            run.blocks,
            run.groups,
            tuple(tuple(ids) for ids in run.ids),
            saving.retention,
            saving.request_id,
            saving.traceparent,
        )
        self._next_id += 1
        self._jobs[job.id] = _UnderWay(pinned, keys, self.geometry.ranks)
        self._ready.append(job)

    def _block_keys(self, request: EngineRequest, saving: Saving, run: _Run) -> list[Hashable]:
        """Keys of the run's blocks, from the engine's own hashes; empty if it makes none."""
        hashes = request.block_hashes
        each = self.geometry.block_tokens // self.hash_tokens
        return [
            (saving.spec.name, saving.spec.salt, hashes[(block + 1) * each - 1], run.groups)
            for block in range(run.first_block, run.first_block + run.blocks)
            if (block + 1) * each <= len(hashes)
        ]

    def _unpin(self, ids: Sequence[int]) -> None:
        """Unpins blocks, the last first as vLLM frees a request's: vLLM evicts in this order, from a prefix's end."""
        if ids:
            self._pinned -= len(ids)
            self.unpin(ids[::-1])
