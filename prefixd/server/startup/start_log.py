"""The first lines of the log: version, machine, sizes, paths, and what was chosen."""

from __future__ import annotations

import ipaddress
import logging
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import prefixd
from prefixd.base.sizes import as_size
from prefixd.server.access.disk_keys import key_file_setting
from prefixd.settings import Settings
from prefixd_swap import SlabStore
from prefixd_swap.sealing.rest_keys import RestKeys

log = logging.getLogger("prefixd.start")

_MOST_WORDS = 16


def log_start(settings: Settings, device: str, store: SlabStore | None, models: dict[str, Path]) -> None:
    """Logs what was chosen, once the daemon takes calls: a daemon that is ended before that says nothing.

    Args:
        settings: the settings.
        device: where models run.
        store: the disk tier's store.
        models: their folders by name; none in a sidecar.
    """
    for line in start_lines(settings, device, store, models):
        log.info("%s", line)
    for why in filter(None, [why_public(settings), why_small_disk(settings)]):
        log.warning("%s", why)


def start_lines(settings: Settings, device: str, store: SlabStore | None, models: dict[str, Path]) -> Iterator[str]:
    """Yields the lines, without any secret: paths of files with secrets are named, not read."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield (
        f"prefixd {prefixd.__version__}, process {os.getpid()}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {len(os.sched_getaffinity(0))} CPUs, {as_size(memory)} of memory"
    )
    yield f"data directory: {settings.data_dir}"
    yield from _tier_lines(settings, device, store)
    yield (
        f"policies: cache {'on' if settings.cache.enabled else 'off'}, eviction {settings.cache.eviction}, queue "
        f"{settings.scheduler.policy}, loads {settings.scheduler.load}, look-ahead {settings.scheduler.look_ahead}, "
        f"preemption {settings.scheduler.preemption}"
    )
    for name, folder in models.items():
        yield f"model {name}: {folder} on {device}, KV {settings.worker.kv}"
    if not models:
        yield "no model: a sidecar for engines"
    if settings.tenants:
        yield f"tenants: {_first(sorted(settings.tenants))}"
    yield f"listens at unix:{settings.server.socket}{_tcp(settings)}"


def _tier_lines(settings: Settings, device: str, store: SlabStore | None) -> Iterator[str]:
    if settings.worker.enabled:
        gpu = settings.gpu
        size = "what the device has" if gpu.bytes == "auto" else as_size(gpu.bytes)
        if gpu.elastic:
            size = f"from {_size(gpu.least_bytes)} to {_size(gpu.most_bytes)}"
        yield f"gpu tier: {size} on {device}"
    cpu = settings.cpu
    if cpu.bytes:
        how = [*(["locked"] if cpu.lock else []), *([] if cpu.populate else ["not populated"])]
        yield f"cpu tier: {as_size(cpu.bytes)}" + (f" ({', '.join(how)})" if how else "")
    if store is None:
        yield "no disk tier: the cache is lost when the daemon ends"
    else:
        yield (
            f"disk tier: {as_size(settings.disk.bytes)} in {', '.join(map(str, settings.disk_paths.values()))}, "
            f"{as_size(store.used_bytes)} used, "
            f"I/O {store.io} by {settings.disk.io_threads} threads"
        )
        yield f"codecs: {_first(_codecs(settings))}"
        yield f"encryption at rest: {_first(_key_files(settings, store.keys)) or 'none, blocks are written in clear'}"
    if settings.remote.url is not None:
        yield f"shared store: {settings.remote.url}, sharing {settings.remote.share} blocks"


def _codecs(settings: Settings) -> list[str]:
    bound = settings.disk.codec_error
    chosen = [f"disk.codec = {settings.disk.codec}", *([] if bound is None else [f"disk.codec_error = {bound}"])]
    named = sorted((name, codec) for name, codec in settings.codecs.items() if codec is not None)
    return chosen + [f"tenants.{name}.codec = {codec}" for name, codec in named]


def _key_files(settings: Settings, keys: RestKeys) -> list[str]:
    """The key files, with the ids of the keys that encrypt: `prefixd doctor` counts blocks by these ids."""
    found = [(key_file_setting(None), settings.disk.encryption_key_file, keys.shared)]
    for name, tenant in sorted(settings.tenants.items()):
        found.append((key_file_setting(name), tenant.encryption_key_file, keys.key_for(name)))
    return [f"{name} = {path} (key {key.name})" for name, path, key in found if path is not None and key is not None]


def _first(words: Sequence[str]) -> str:
    return ", ".join(words[:_MOST_WORDS]) + (", ..." if len(words) > _MOST_WORDS else "")


def _size(nbytes: int | str | None) -> str:
    if nbytes is None:
        return "the least that works"
    return "what the device has" if isinstance(nbytes, str) else as_size(nbytes)


def _tcp(settings: Settings) -> str:
    server = settings.server
    if server.tcp is None:
        return ""
    return f" and {server.tcp} ({', '.join(_guards(settings)) or 'no TLS, open to all'})"


def _guards(settings: Settings) -> Iterable[str]:
    server = settings.server
    return [
        *(["TLS"] if server.tls_cert is not None else []),
        *(["client certificates"] if server.tls_client_ca is not None else []),
        *(["tokens"] if server.tokens is not None else []),
    ]


def why_small_disk(settings: Settings) -> str:
    """Returns a warning if the disk tier is smaller than the CPU tier whose blocks it is to keep; else an empty one."""
    disk, cpu = settings.disk.bytes, settings.cpu.bytes
    if not 0 < disk < cpu:
        return ""
    return (
        f"disk.bytes = {as_size(disk)} is less than cpu.bytes = {as_size(cpu)}: a restart keeps only what fits, and "
        "blocks that become durable take the place of others on disk; raise disk.bytes"
    )


def why_public(settings: Settings) -> str:
    """Returns a warning if every host that reaches the TCP port may use it; else an empty text."""
    server = settings.server
    if server.tcp is None or server.tls_client_ca is not None or server.tokens is not None:
        return ""
    host = server.tcp.rpartition(":")[0].strip("[]")
    try:
        if ipaddress.ip_address(host).is_loopback:
            return ""
    except ValueError:
        if host == "localhost":
            return ""
    return (
        f"server.tcp = {server.tcp}: everyone who reaches the port may use the daemon, and read and change what is "
        "cached; set server.tokens, or server.tls_client_ca, to let in only those whom you know"
    )
