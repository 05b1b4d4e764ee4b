"""KV events for routers, over ZMQ.

A new subscriber has missed all earlier events, so the daemon then announces everything again, to all subscribers.

Clients choose the names of their namespaces, and a router sends a model's requests to the host that announces their
prefixes. A client could thus attract another model's requests. So the daemon announces a client's namespaces only if
`events.namespaces` names them; it always announces blocks that its own workers computed.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from fnmatch import translate

from prefixd.cache import Namespace, TieredCache
from prefixd.server.kv_events.announcer import Announcer
from prefixd.server.kv_events.event_messages import AllBlocksCleared, Event
from prefixd.server.kv_events.publishing.publisher import EventCounters, Publisher
from prefixd.settings import EVENT_NAMESPACE, EVENT_TENANT, EventSettings


class KVEvents(Announcer):
    """Announces the blocks of all tiers to routers.

    Args:
        cache: the cache, restored.
        settings: the sockets and the topic; `endpoint` is set.
        clock: seconds, monotonic.

    Raises:
        ConfigError: a socket cannot be opened.
    """

    def __init__(
        self, cache: TieredCache, settings: EventSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(cache, settings.block_tokens, settings.again_s, clock)
        self._topic = settings.topic
        self._named = pattern_of_names(settings.namespaces)
        self._publisher = Publisher(settings, self.announce_all)
        self._task: asyncio.Task[None] | None = None

    @property
    def counters(self) -> EventCounters:
        """Counts what was published."""
        return self._publisher.counters

    def start(self) -> asyncio.Task[None]:
        """Starts the background task that announces everything, then changes, until `stop`."""
        self.announce_all()
        self._cache.observe(self._mark_changed)
        self._task = asyncio.create_task(self._run(), name="kv-events")
        return self._task

    async def stop(self) -> None:
        """Announces that no block is here any more, and closes the sockets."""
        if self._task is not None:
            self._cache.unobserve(self._mark_changed)
            self._task.cancel()
            await asyncio.wait({self._task})
            for topic in sorted(self._topic_numbers):
                self._publish(topic, [AllBlocksCleared()])
        self._publisher.close()

    async def _run(self) -> None:
        while True:
            await self._wait_for_changes()
            if self._run_turn():
                self._wake.set()

    def _publish(self, topic: bytes, events: Sequence[Event]) -> None:
        self._publisher.publish(topic, events)

    def _topic_of(self, namespace: Namespace) -> bytes:
        topic = self._topic.replace(EVENT_TENANT, namespace.spec.tenant)  # first: a namespace's name may have braces
        return topic.replace(EVENT_NAMESPACE, namespace.spec.name).encode()

    def _is_announced(self, namespace: Namespace) -> bool:
        spec = namespace.spec
        if spec.of_images:  # their ids are drawn, so no prompt of a router has them
            return False
        return spec.worker or self._named.match(f"{spec.tenant}/{spec.name}") is not None

    @property
    def _fixed_topics(self) -> tuple[bytes, ...]:
        varies = EVENT_NAMESPACE in self._topic or EVENT_TENANT in self._topic
        return () if varies else (self._topic.encode(),)


def pattern_of_names(names: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern that matches TENANT/NAME of the named namespaces; only * and ? stand for other characters.

    Example: `default/*` names all namespaces of the tenant `default`.
    """
    return re.compile("|".join(translate(name.replace("[", "[[]")) for name in names) or "(?!)")
