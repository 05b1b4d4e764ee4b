"""SIGHUP: reads the settings again and applies what needs no restart: callers' identities, quotas, tenants' codecs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from prefixd.base.errors import ConfigError
from prefixd.cache import TieredCache, Troubles
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.disk_keys import read_disk_keys
from prefixd.server.figures.tenant_figures import check_tiers_hold
from prefixd.server.rpc.sockets.listeners import Listeners
from prefixd.server.startup.codec_warm_up import codecs_in_use, warm_up_codecs
from prefixd.settings import Settings, dotted_values
from prefixd.settings.checks import check_codecs
from prefixd_swap import StorageError
from prefixd_swap.sealing.rest_keys import RestKeys, key_name

log = logging.getLogger(__name__)

PART = "settings"
"""The part that `Troubles` names while the settings cannot be used."""
_READ_AGAIN = (
    "server.allow_uids",
    "server.admin_uids",
    "server.admin_certificates",
    "server.metrics_certificates",
    "disk.encryption_key_file",
)


class SettingsReload:
    """Reads the settings again on request.

    Args:
        settings: the settings of the start; those that only a restart changes stay in force.
        read: reads the settings; runs in a thread. None: the settings never change.
        doors: gets the new settings by which it identifies callers.
        cache: its tenants get the new quotas.
        troubles: has one while the settings cannot be used.
        audit: opens its file again.
    """

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings] | None,
        doors: Listeners,
        cache: TieredCache,
        troubles: Troubles,
        audit: AuditLog,
    ) -> None:
        self._settings = settings
        self._named = set(settings.tenants)
        self._compiled = set(codecs_in_use(settings, None))
        self._read = read
        self._doors = doors
        self._cache = cache
        self._troubles = troubles
        self._audit = audit
        self._wanted = False
        self._reading: asyncio.Task[None] | None = None

    def begin(self, done: Callable[[], None] = lambda: None) -> None:
        """Starts reading the settings. If they are being read, they are read once more: the file may have changed.

        Args:
            done: called when no reading is wanted any more, whether or not the settings could be used.
        """
        self._wanted = True
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_while_wanted(), name="reload")
            self._reading.add_done_callback(lambda _: done())

    async def idle(self) -> None:
        """Waits until all requested readings are done."""
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def _read_while_wanted(self) -> None:
        while self._wanted:
            self._wanted = False
            await self._reload()

    async def _reload(self) -> None:
        self._audit.reopen()
        try:
            fresh = self._settings if self._read is None else await asyncio.to_thread(self._read)
            tokens = None if self._doors.tokens is None else await self._doors.tokens.read()
            keys = await asyncio.to_thread(read_disk_keys, fresh)
            await self._check_keys(keys)
            self._check(fresh)
            self._doors.update(fresh)  # the last step that can fail, so that settings change together or not at all
        except Exception as error:
            if not isinstance(error, ConfigError):
                log.exception("the settings could not be read again")
            why = f"{error}: the settings that were read before stay in force; repair this, and send SIGHUP"
            self._troubles.begin(PART, why, tell=True)
            return
        self._troubles.end(PART)
        if self._doors.tokens is not None and tokens is not None:
            self._doors.tokens.use(tokens)
        await self._use_keys(keys)
        self._cache.tenants.set_quotas(fresh.quotas)
        if new := set(codecs_in_use(fresh, None)) - self._compiled:
            await warm_up_codecs(fresh, None)  # before the first block asks for them on the event loop
            self._compiled |= new
        self._cache.tenants.set_codecs(fresh.codecs)
        self._log_removed_tenants(self._named - set(fresh.tenants))
        self._named = set(fresh.tenants)
        self._cache.mover.changed.set()  # blocks that a former limit kept back may be written now
        ours, theirs = dotted_values(self._settings), dotted_values(fresh)
        changed = [name for name in theirs if not name.startswith("tenants.") and ours.get(name) != theirs[name]]
        later = [name for name in changed if name not in _READ_AGAIN]
        log.info("settings were read again: %d tenants", len(fresh.tenants))
        if later:
            log.warning("%s changed; only a restart brings the change into force", ", ".join(later))
        self._audit.log_event("settings read again", None)

    async def _check_keys(self, keys: RestKeys) -> None:
        """Raises ConfigError if a key is missing that blocks on disk need: they could not be read any more."""
        if (disk := self._cache.tiers.durable) is None or (disk.keys.empty and keys.empty):
            return
        used = await disk.encryption()
        if missing := keys.missing({*used.records, *used.bytes, *used.namespaces} - {0}):
            raise ConfigError(
                f"blocks on disk are encrypted with keys that no key file has ({', '.join(map(key_name, missing))}); "
                "put each of these keys back, as a line after the first of disk.encryption_key_file or of a tenant's"
            )

    async def _use_keys(self, keys: RestKeys) -> None:
        if (disk := self._cache.tiers.durable) is None or (disk.keys.empty and keys.empty):
            return
        disk.keys.replace(keys)
        try:
            await asyncio.to_thread(disk.reseal_namespaces, self._cache.mover.disk.metadata.encryption())
        except StorageError as error:
            log.error("the namespaces on disk keep their former keys until the next start: %s", error)

    def _log_removed_tenants(self, names: Iterable[str]) -> None:
        """Logs tenants that the settings no longer name and that still have blocks."""
        tiers, use = self._cache.tiers.own, self._cache.mover.use
        for name in sorted(names):
            if (tenant := self._cache.tenants.get(name)) is None:
                continue
            has = ", ".join(
                f"{used} bytes of the {tier.name} tier" for tier in tiers if (used := use.used_bytes(tenant, tier))
            )
            if has:
                log.warning(
                    "the settings do not name tenant %s any more, which has %s: they stay until they are evicted, "
                    "without a guarantee; `prefixd evict --namespace` drops them at once",
                    name,
                    has,
                )

    def _check(self, fresh: Settings) -> None:
        """Raises ConfigError if the tiers, whose sizes only a restart changes, cannot hold the guaranteed bytes, or the
        packages of a tenant's codec are missing."""
        check_codecs(fresh)
        try:
            check_tiers_hold(self._cache, fresh.quotas, gpu=self._settings.worker.enabled)
        except ValueError as error:
            raise ConfigError(str(error)) from error
