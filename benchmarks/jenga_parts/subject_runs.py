"""Runs a subject in each of its ways, and says what each run came to."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.jenga_parts.chats import Plan
from benchmarks.jenga_parts.chatting import Endpoint, Talked, gpu_tier, talk
from benchmarks.jenga_parts.subjects import (
    SUBJECTS,
    CountedBytes,
    Saved,
    Subject,
    count_bytes,
    daemon_settings,
    gpu_bytes,
    save,
)
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.workloads.latency_figures import digest


@dataclass(frozen=True, slots=True)
class Run:
    """What a run came to.

    model: the subject. gpu_bytes: of all daemons together. waste: see `benchmarks.jenga`; spare: mean share of the
    tier that is spare; samples: of both. gpu_blocks: see `Talked`. used_bytes, stranded_bytes: of the GPU tier, at the
    end.
    integrity_violations: what the daemons find wrong in accounting for their memory. restarts: of workers.
    needed_bytes, one_size_bytes: see `CountedBytes`; 0 where nothing is counted.
    passes: of the models. proposed_tokens, accepted_tokens: by a draft, and those of them that were right.
    """

    model: str
    way: str
    round: int
    gpu_bytes: int
    requests_per_s: float
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    waste: float
    spare: float
    samples: int
    preempted: int
    output_digest: str
    images: int = 0
    encoded_images: int = 0
    gpu_blocks: tuple[tuple[int, ...], ...] = ()
    used_bytes: int = 0
    stranded_bytes: int = 0
    needed_bytes: int = 0
    one_size_bytes: int = 0
    integrity_violations: int = 0
    restarts: int = 0
    passes: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


def measure(name: str, plan: Plan, step: Callable[[], None] = lambda: None) -> list[Run]:
    """One of SUBJECTS, as `measure_subject`."""
    return measure_subject(name, SUBJECTS[name], plan, step)


def measure_subject(name: str, subject: Subject, plan: Plan, step: Callable[[], None] = lambda: None) -> list[Run]:
    """A subject, all ways in turn, as often as there are rounds; `step` is called after each request.

    Raises DaemonFailed, ClientError.
    """
    with tempfile.TemporaryDirectory(prefix="prefixd-jenga-") as folder:
        saved = save(subject, Path(folder))
        nbytes = gpu_bytes(saved, plan)
        runs = []
        for number in range(plan.rounds):
            for way in subject.ways:
                talked = hold_chats(subject, way, saved, nbytes, plan, step)
                run = _run(name, subject.with_images, way, number, nbytes, plan, talked)
                runs.append(_counted(run, count_bytes(saved.models[0], plan)) if subject.counted else run)
        return runs


def _counted(run: Run, counted: CountedBytes) -> Run:
    """The run with what it has cached at its end as its waste, whatever was sampled meanwhile."""
    waste = round(1 - counted.needed / max(1, run.used_bytes + run.stranded_bytes), 4)
    return replace(run, waste=waste, needed_bytes=counted.needed, one_size_bytes=counted.one_size)


def hold_chats(
    subject: Subject, way: str, saved: Saved, nbytes: int, plan: Plan, step: Callable[[], None] = lambda: None
) -> Talked:
    """One run of one way, with daemons whose GPU tiers have `nbytes` together. Raises DaemonFailed, ClientError."""
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(DaemonProcess(settings))
            for settings in daemon_settings(subject, way, saved, nbytes, plan)
        ]
        addresses = [daemon.address for daemon in daemons] * (len(saved.models) // len(daemons))
        endpoints = [
            Endpoint(address, directory.name) for address, directory in zip(addresses, saved.models, strict=True)
        ]
        return asyncio.run(talk(endpoints, plan, subject.with_images, step))


def _run(name: str, with_images: bool, way: str, number: int, nbytes: int, plan: Plan, talked: Talked) -> Run:
    daemons, memory = talked.stats, talked.memory
    workers = [model.worker for stats in daemons for model in stats.models]
    prompt_tokens = sum(stats.asked_tokens for stats in daemons)
    hit_tokens = sum(stats.hit_tokens for stats in daemons)
    shown = {plan.shown(chat, turn) for chat in range(plan.chats) for turn in range(plan.turns)}
    return Run(
        model=name,
        way=way,
        round=number,
        gpu_bytes=nbytes,
        requests_per_s=len(talked.said) * plan.turns / talked.elapsed_s,
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        computed_tokens=prompt_tokens - hit_tokens,
        waste=round(memory.waste, 4),
        spare=round(memory.spare / max(1, memory.capacity), 4),
        samples=memory.samples,
        preempted=sum(stats.scheduler.preempted_requests for stats in daemons),
        output_digest=digest(talked.said),
        images=len(shown) if with_images else 0,
        encoded_images=sum(worker.images.encoded_images for worker in workers),
        gpu_blocks=tuple(map(tuple, talked.gpu_blocks)),
        used_bytes=sum(gpu_tier(stats).used_bytes for stats in daemons),
        stranded_bytes=sum(gpu_tier(stats).stranded_bytes for stats in daemons),
        integrity_violations=len(talked.violations),
        restarts=sum(worker.restarts for worker in workers),
        passes=sum(worker.passes for worker in workers),
        proposed_tokens=sum(worker.draft.proposed_tokens for worker in workers),
        accepted_tokens=sum(worker.draft.accepted_tokens for worker in workers),
    )
