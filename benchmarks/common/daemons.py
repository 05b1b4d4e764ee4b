"""Calls to a daemon that benchmarks make besides their measurement."""

from __future__ import annotations

from benchmarks.common import harness
from prefixd import cache
from prefixd.base.tenancy.tenants import DEFAULT
from prefixd.client import Client, NamespaceSpec
from prefixd.server.namespace_messages import namespace_spec
from prefixd.v1 import admin_pb2

START_S = 120.0
"""Most time until a worker takes requests."""


def as_the_daemon_has_it(spec: NamespaceSpec) -> cache.NamespaceSpec:
    """Returns the daemon's form of a namespace, for the default tenant."""
    return namespace_spec(spec.to_proto(), DEFAULT, spec.salt)


def violations_of(client: Client) -> list[str]:
    """Returns the violations that `Admin.CheckIntegrity` reports, one line each."""
    return list(client.check_integrity().violations)


def wait_for_worker(client: Client) -> int:
    """Returns the worker's process id once it takes requests. Raises BenchmarkError if it does not, or fails."""
    state = admin_pb2.WorkerStats.STATE_STARTING

    def settled() -> bool:
        nonlocal state
        state = client.stats().worker.state
        return state in (admin_pb2.WorkerStats.STATE_READY, admin_pb2.WorkerStats.STATE_FAILED)

    if not harness.wait_until(settled, START_S) or state != admin_pb2.WorkerStats.STATE_READY:
        raise harness.BenchmarkError(f"the worker did not start within {START_S:g} s; see the daemon's log")
    return client.stats().worker.pid
