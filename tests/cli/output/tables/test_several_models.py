"""What the figures of a daemon with several models look like: each model named, and the totals those of all."""

from __future__ import annotations

from typing import Any

import pytest

from prefixd.cli.failures import CommandFailed
from prefixd.cli.named_prefix import namespace_id_of
from prefixd.cli.output.tables.answer_tables import print_stats
from prefixd.server.figures.metrics import MetricsCollector
from prefixd.server.figures.model_figures import total_worker
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import cache_pb2

READY, FAILED = pb.WorkerStats.STATE_READY, pb.WorkerStats.STATE_FAILED
NAMES = ("5f1e-a8", "77ab-a8", "5f1e-a8-images", "engine's-images")


def stats_of_two() -> pb.StatsResponse:
    """As a daemon gives them whose second model alone has states, and whose second worker was given up."""
    states = pb.StateStats(kept_states=7, kept_bytes=14 << 20, resumed_runs=3, resumed_tokens=4500)
    workers = [
        pb.WorkerStats(state=READY, model="/m/llama", kv="virtual", layout="token", passes=100, restarts=1),
        pb.WorkerStats(state=FAILED, model="/m/jamba", kv="virtual", layout="token", passes=20, restarts=3),
    ]
    workers[0].running_requests = 4
    workers[1].states.CopyFrom(states)
    workers[1].error = "signal 9"
    queues = [pb.SchedulerStats(policy="fcfs", waiting_requests=2, finished_requests=5), pb.SchedulerStats()]
    queues[1].finished_requests = 6
    names = [cache_pb2.Namespace(name=name, block_tokens=16) for name in NAMES]
    return pb.StatsResponse(
        worker=total_worker(workers),
        scheduler=pb.SchedulerStats(policy="fcfs", waiting_requests=2, finished_requests=11),
        namespaces=[
            pb.NamespaceStats(namespace_id=bytes([at]) * 8, namespace=name, worker=at < 3)
            for at, name in enumerate(names)
        ],
        models=[
            pb.ModelStats(name=name, namespace=namespace.name, worker=worker, scheduler=queue, held_bytes=3 << 20)
            for name, namespace, worker, queue in zip(("llama", "jamba"), names, workers, queues, strict=False)
        ],
    )


def test_stats_name_each_model_and_total_all(capsys: pytest.CaptureFixture[str]) -> None:
    print_stats(stats_of_two())
    lines = capsys.readouterr().out.splitlines()
    assert "workers: 1 of 2 ready, 4 running, 2 waiting (fcfs), 11 finished" in lines
    (llama,) = [line.split() for line in lines if line.strip().startswith("llama ")]
    (jamba,) = [line.split() for line in lines if line.strip().startswith("jamba ")]
    assert llama == ["llama", "ready", "4", "2", "5", "1", "3.0", "MiB"]
    assert jamba == ["jamba", "failed", "0", "0", "6", "3", "3.0", "MiB", "signal", "9"]
    assert "llama: worker's design: kv virtual, layout token, CUDA graphs not in use" in lines
    figures = {name: value for name, value, *_ in (line.split() for line in lines if "." in line[:9])}
    states = {name: value for name, value in figures.items() if "states" in name}
    assert states["worker.states.kept_states"] == states["models.jamba.worker.states.kept_states"] == "7"
    assert not any("llama" in name for name in states)
    names = [line.strip().split("  ")[0] for line in lines]
    assert {"5f1e-a8 (llama)", "77ab-a8 (jamba)", "5f1e-a8-images (llama)", "engine's-images"} <= set(names)


def test_metrics_total_all_models_and_name_each() -> None:
    figures = {
        (sample.name, sample.labels.get("model", "")): sample.value
        for family in MetricsCollector(stats_of_two()).collect()
        for sample in family.samples
        if "tier" not in sample.labels
    }
    expected = {
        "prefixd_worker_restarts_total": 4,
        "prefixd_worker_passes_total": 120,
        "prefixd_state_kept_states_total": 7,
        "prefixd_worker_up": 0,
        "prefixd_waiting_requests": 2,
    }
    assert {name: figures[name, ""] for name in expected} == expected
    for name, llama, jamba in (
        ("worker_up", 1, 0),
        ("worker_restarts_total", 1, 3),
        ("worker_passes_total", 100, 20),
        ("running_requests", 4, 0),
        ("finished_requests_total", 5, 6),
    ):
        assert (figures[f"prefixd_model_{name}", "llama"], figures[f"prefixd_model_{name}", "jamba"]) == (llama, jamba)
    assert figures["prefixd_model_state_resumed_tokens_total", "jamba"] == 4500
    assert ("prefixd_model_state_resumed_tokens_total", "llama") not in figures


class Daemon:
    async def stats(self) -> pb.StatsResponse:
        return stats_of_two()


@pytest.mark.parametrize(
    ("name", "at"),
    [("llama", 0), ("5f1e-a8", 0), ("llama-images", 2), ("01010101", 1), ("0101010101010101", 1), ("ab" * 8, 0xAB)],
)
async def test_a_namespace_is_named_as_ls_shows_it(name: str, at: int) -> None:
    daemon: Any = Daemon()
    assert await namespace_id_of(daemon, name) == bytes([at]) * 8


async def test_an_unknown_name_is_answered_with_those_that_ls_shows() -> None:
    daemon: Any = Daemon()
    with pytest.raises(CommandFailed, match="no namespace 'x'; the daemon has: llama, jamba, llama-images"):
        await namespace_id_of(daemon, "x")
