"""Collects a daemon's reports of its troubles in every form: Stats, health, metrics, log."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixd.client import Client, ClientError
from prefixd.v1 import admin_pb2

_INTERVAL_S = 0.1
_ANSWER_S = 30.0
_SCRAPE_S = 3.0
_HEALTH = "prefixd.tier."
_TIERS = {1: "gpu", 2: "cpu", 3: "disk"}


@dataclass(slots=True)
class Seen:
    """Reports between two moments."""

    troubles: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By part: what, and the remedy."""
    tiers: dict[str, str] = field(default_factory=dict)
    """TierStats.trouble, by tier."""
    unhealthy: set[str] = field(default_factory=set)
    """Health services that were not SERVING."""
    metrics: set[str] = field(default_factory=set)
    """Samples of gauges of trouble that were not 0."""
    silent_s: float = 0.0
    """The longest time without an answer."""

    @property
    def any(self) -> bool:
        return bool(self.troubles or self.tiers or self.unhealthy or self.metrics)

    def silent_about(self, part: str, log: Sequence[str]) -> list[str]:
        """Ways of reporting that said nothing of the trouble with `part`; `log` are the daemon's lines meanwhile."""
        missing = []
        if not all(self.troubles.get(part, ("", ""))):
            missing.append("stats")
        if not any(f'"{part}"' in sample for sample in self.metrics):
            missing.append("metrics")
        tier = part.removesuffix(" tier")
        if tier != part:
            if not self.tiers.get(tier):
                missing.append("tier")
            if f"{_HEALTH}{tier}" not in self.unhealthy:
                missing.append("health")
        said = [line for line in log if f"trouble with the {part}:" in line]
        if len(said) != 1 or "; " not in said[0]:
            missing.append(f"log ({len(said)} lines)")
        return missing


class Watch:
    """Asks a daemon again and again, on a connection that it opens at once and keeps."""

    def __init__(self, address: str, metrics_port: int) -> None:
        self._client = Client(address, name="watch", timeout_s=_ANSWER_S)
        self._channel = grpc.insecure_channel(address)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._ended = threading.Event()
        self._news = threading.Condition()
        self._seen = Seen()
        self._stats = self._client.stats()
        self._now = Seen()
        self._answered_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._channel.close()
        self._client.close()

    @property
    def stats(self) -> admin_pb2.StatsResponse:
        with self._news:
            return self._stats

    @property
    def now(self) -> Seen:
        with self._news:
            return self._now

    def begin(self) -> None:
        with self._news:
            self._seen = Seen()

    def end(self) -> Seen:
        with self._news:
            return self._seen

    def wait(self, until: Callable[[Seen, admin_pb2.StatsResponse], bool], timeout_s: float) -> bool:
        """Waits until what is said at the moment is so; False when it is not in time."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while not (done := until(self._now, self._stats)) and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)
            return done

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            try:
                stats = self._client.stats()
                now = self._take(stats)
            except (ClientError, grpc.RpcError, OSError):
                continue  # `silent_s` tells
            with self._news:
                self._stats, self._now, seen = stats, now, self._seen
                seen.troubles |= now.troubles
                seen.tiers |= now.tiers
                seen.unhealthy |= now.unhealthy
                seen.metrics |= now.metrics
                seen.silent_s = max(seen.silent_s, time.monotonic() - self._answered_s)
                self._answered_s = time.monotonic()
                self._news.notify_all()

    def _take(self, stats: admin_pb2.StatsResponse) -> Seen:
        now = Seen(
            troubles={trouble.part: (trouble.what, trouble.remedy) for trouble in stats.troubles},
            tiers={_TIERS[tier.tier]: tier.trouble for tier in stats.tiers if tier.trouble},
        )
        for service in (f"{_HEALTH}{tier}" for tier in ("cpu", "disk")):
            answer = self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=_ANSWER_S)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                now.unhealthy.add(service)
        with suppress(OSError), urllib.request.urlopen(self._metrics_url, timeout=_SCRAPE_S) as page:
            for line in page.read().decode().splitlines():
                if line.startswith("prefixd_") and "trouble" in line.partition("{")[0] and not line.endswith(" 0.0"):
                    now.metrics.add(line.rpartition(" ")[0])
        return now


class Log:
    """The lines that a daemon adds to its log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        with self._path.open("rb") as log:
            log.seek(self._at)
            return log.read().decode(errors="replace").splitlines()
