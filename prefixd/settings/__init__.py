"""The settings: the tree with its defaults, the sources of values, and checks of values that must fit together."""

from __future__ import annotations

from prefixd.settings.field_types import MEMORY_SOCKET_SUFFIX, default_data_dir
from prefixd.settings.http_address import HttpAddress
from prefixd.settings.inference import SchedulerSettings
from prefixd.settings.server import EVENT_NAMESPACE, EVENT_TENANT, EventSettings, ServerSettings
from prefixd.settings.settings import Settings, dotted_names, dotted_values
from prefixd.settings.tenants import TenantSettings
from prefixd.settings.tiers import CacheSettings, RemoteSettings

__all__ = [
    "EVENT_NAMESPACE",
    "EVENT_TENANT",
    "MEMORY_SOCKET_SUFFIX",
    "CacheSettings",
    "EventSettings",
    "HttpAddress",
    "RemoteSettings",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "TenantSettings",
    "default_data_dir",
    "dotted_names",
    "dotted_values",
]
