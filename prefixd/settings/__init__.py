"""The settings: the tree with its defaults, where values come from, and what must be true of them together."""

from __future__ import annotations

from prefixd.settings.settings import (
    EVENT_NAMESPACE,
    EVENT_TENANT,
    MEMORY_SOCKET_SUFFIX,
    CacheSettings,
    EventSettings,
    RemoteSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    TenantSettings,
    default_data_dir,
    dotted_names,
    dotted_values,
)

__all__ = [
    "EVENT_NAMESPACE",
    "EVENT_TENANT",
    "MEMORY_SOCKET_SUFFIX",
    "CacheSettings",
    "EventSettings",
    "RemoteSettings",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "TenantSettings",
    "default_data_dir",
    "dotted_names",
    "dotted_values",
]
