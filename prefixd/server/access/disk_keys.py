"""Reads the files with the keys that encrypt blocks on disk."""

from __future__ import annotations

from pathlib import Path

from prefixd.base.errors import ConfigError
from prefixd.base.extras import require
from prefixd.server.access.secret_files import read_secret
from prefixd.settings import Settings
from prefixd_swap.errors import KeyFileError
from prefixd_swap.sealing.derived_keys import LEAST_SECRET_BYTES
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys, parse_keys


def read_disk_keys(settings: Settings) -> RestKeys:
    """Returns the keys of all tenants; none if no setting names a key file.

    Raises:
        ConfigError: a file cannot be used, or the package for encryption is missing.
    """
    shared: tuple[RestKey, ...] = ()
    tenants: dict[str, tuple[RestKey, ...]] = {}
    if settings.disk.encryption_key_file is not None:
        shared = _read(key_file_setting(None), settings.disk.encryption_key_file)
    for name, tenant in settings.tenants.items():
        if tenant.encryption_key_file is not None:
            tenants[name] = _read(key_file_setting(name), tenant.encryption_key_file)
    try:
        return RestKeys(shared, tenants)
    except KeyFileError as error:
        raise ConfigError(f"disk.encryption_key_file and tenants.NAME.encryption_key_file: {error}") from error


def key_file_setting(tenant: str | None) -> str:
    """The setting that names a tenant's key file; of None the one for tenants without a file of their own."""
    return "disk.encryption_key_file" if tenant is None else f"tenants.{tenant}.encryption_key_file"


def _read(name: str, path: Path) -> tuple[RestKey, ...]:
    require("encryption", f"{name} = {path}")
    try:
        return parse_keys(read_secret(name, path, LEAST_SECRET_BYTES))
    except KeyFileError as error:
        raise ConfigError(f"{name} = {path}: {error}") from error
