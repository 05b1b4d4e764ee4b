"""What machines ask a daemon: health, reflection, Prometheus."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from prefixd.server.rpc.health_service import Health
from prefixd.v1 import cache_pb2
from tests.daemons import Remote

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = {"prefixd.v1.PrefixCache", "prefixd.v1.Inference", "prefixd.v1.Admin"}


@pytest.fixture(scope="module")
def remote(launch: Callable[..., Remote]) -> Remote:
    return launch({"cpu.bytes": "4MiB", "disk.bytes": "16MiB", "server.metrics": "127.0.0.1:0"})


def test_every_service_is_healthy(remote: Remote) -> None:
    health = health_pb2_grpc.HealthStub(remote.channel)
    for service in ("", *SERVICES):
        status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="prefixd.v1.Nothing"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_that_does_not_read_holds_nobody_up() -> None:
    health, stuck = Health(), asyncio.Event()
    health.set("", SERVING)

    class Deaf:
        async def write(self, _: object) -> None:
            stuck.set()
            await asyncio.Event().wait()

    watching = asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(), Deaf()))
    await stuck.wait()
    health.set("", NOT_SERVING)
    assert (await health.Check(health_pb2.HealthCheckRequest(), None)).status == NOT_SERVING
    watching.cancel()


async def test_a_watcher_that_leaves_costs_the_others_nothing() -> None:
    health, heard = Health(), asyncio.Queue[int]()
    health.set("", SERVING)

    class Listener:
        async def write(self, response: health_pb2.HealthCheckResponse) -> None:
            heard.put_nowait(response.status)

    watching = [asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(), Listener())) for _ in range(2)]
    assert [await heard.get(), await heard.get()] == [SERVING, SERVING]
    watching[0].cancel()
    await asyncio.wait(watching[:1])
    health.set("", NOT_SERVING)
    assert await heard.get() == NOT_SERVING
    watching[1].cancel()


def test_watchers_are_bounded(remote: Remote) -> None:
    watch = health_pb2_grpc.HealthStub(remote.channel).Watch
    calls = [watch(health_pb2.HealthCheckRequest()) for _ in range(64)]
    assert {next(call).status for call in calls} == {SERVING}
    with pytest.raises(grpc.RpcError) as caught:
        next(watch(health_pb2.HealthCheckRequest()))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()


def test_reflection_lists_the_services_and_has_their_contracts(remote: Remote) -> None:
    reflection = reflection_pb2_grpc.ServerReflectionStub(remote.channel)
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="prefixd.v1.PrefixCache"),
    ]
    services, contract = reflection.ServerReflectionInfo(iter(questions))
    listed = {service.name for service in services.list_services_response.service}
    assert listed >= {*SERVICES, "grpc.health.v1.Health"}
    assert b"ReserveRequest" in b"".join(contract.file_descriptor_response.file_descriptor_proto)


def scrape(remote: Remote) -> dict[tuple[str, str], float]:
    """(metric, its only label's value) -> value."""
    with urllib.request.urlopen(f"{remote.daemon.metrics}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, next(iter(sample.labels.values()), "")): sample.value
            for family in families
            for sample in family.samples
        }


def test_metrics_say_what_the_statistics_say(remote: Remote) -> None:
    with remote.session() as session:
        namespace = remote.register(session.session_id, "metrics", 500)
        remote.put(session.session_id, namespace, range(20), bytes(2500), durable=True)
        remote.get(session.session_id, namespace, range(24))
        figures = scrape(remote)
        stats = remote.stats()
    for tier in stats.tiers:
        label = {2: "cpu", 3: "disk"}[tier.tier]
        assert figures["prefixd_tier_capacity_bytes", label] == tier.capacity_bytes > 0
        assert figures["prefixd_tier_used_bytes", label] == tier.used_bytes == 5 * 4096
        assert figures["prefixd_tier_blocks", label] == tier.blocks == 5
        assert figures["prefixd_tier_in_flight_bytes", label] == 0
        assert figures["prefixd_tier_held_blocks", label] == 0
        assert figures["prefixd_tier_hit_tokens_total", label] == tier.hit_tokens
        assert figures["prefixd_tier_trouble", label] == 0
    assert figures["prefixd_asked_tokens_total", ""] == stats.asked_tokens == 24
    assert figures["prefixd_hit_tokens_total", ""] == stats.hit_tokens == 20
    assert figures["prefixd_sessions", ""] == 1
    assert figures["prefixd_leases", ""] == figures["prefixd_reservations", ""] == 0
    assert ("prefixd_tier_used_bytes", "gpu") not in figures
    assert ("prefixd_worker_up", "") not in figures


def test_a_prompt_is_counted_once_by_scheduler_and_ranks_and_a_miss_counts(remote: Remote) -> None:
    """As an engine with two ranks asks: a match, a lease of the scheduler, one of each rank."""

    def counted() -> tuple[int, int]:
        stats = remote.stats()
        assert stats.hit_tokens == sum(tier.hit_tokens for tier in stats.tiers) <= stats.asked_tokens
        assert stats.hit_tokens == sum(each.count for each in stats.traffic.hit_tokens)
        assert stats.asked_tokens == sum(each.count for each in stats.traffic.asked_tokens)
        return stats.asked_tokens, stats.hit_tokens

    with remote.session() as session:
        namespace = remote.register(session.session_id, "counted", 500)
        remote.put(session.session_id, namespace, range(100, 120), bytes(2500))
        fields = {"session_id": session.session_id, "namespace_id": namespace}
        asked, hit = counted()
        for tokens, found in ((range(100, 126), 20), (range(900, 940), 0)):
            raw = np.asarray(tokens, "<u4").tobytes()
            remote.cache.Match(cache_pb2.MatchRequest(**fields, token_ids=raw))
            assert counted() == (asked, hit), "a question that nobody counts"
            remote.cache.Match(cache_pb2.MatchRequest(**fields, token_ids=raw, counted=True))
            for _ in range(3):
                remote.cache.Acquire(cache_pb2.AcquireRequest(**fields, token_ids=raw, uncounted=True))
                remote.get(session.session_id, namespace, tokens, uncounted=True)
            asked, hit = asked + len(tokens) // 4 * 4, hit + found
            assert counted() == (asked, hit)
        remote.cache.Acquire(cache_pb2.AcquireRequest(**fields, token_ids=np.arange(900, 908, dtype="<u4").tobytes()))
        assert counted() == (asked + 8, hit), "a lease of nothing is a miss"


@pytest.mark.slow
def test_metrics_of_a_daemon_with_a_model(model_daemon: Remote) -> None:
    before = scrape(model_daemon)
    for _ in range(2):
        model_daemon.generate([5, 77, *range(200, 238)])
    after = scrape(model_daemon)
    grown = {
        name: after[name] - before.get(name, 0)
        for name in (
            ("prefixd_tier_hit_tokens_total", "gpu"),
            ("prefixd_asked_tokens_total", ""),
            ("prefixd_worker_restarts_total", ""),
            ("prefixd_running_requests", ""),
        )
    }
    assert list(grown.values()) == [32, 80, 0, 0]
    assert {"prefixd_traffic_requests_total", "prefixd_time_to_first_token_seconds_count"} <= {
        name for name, _ in after
    }
    stats = model_daemon.stats()
    assert stats.hit_tokens == sum(each.count for each in stats.traffic.hit_tokens)
    assert after["prefixd_worker_up", ""] == 1
    # Other tests have used this daemon: its GPU tier may be full, so that new blocks replace others.
    assert after["prefixd_tier_blocks", "gpu"] >= 3
