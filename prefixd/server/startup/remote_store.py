"""Opens the shared store that the settings name, as a tier."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from urllib.parse import unquote, urlsplit

from prefixd.base.errors import ConfigError
from prefixd.base.extras import require
from prefixd.server.access.secret_files import read_secret
from prefixd.settings import RemoteSettings
from prefixd_swap import CpuArena, StorageError
from prefixd_swap.sealing.derived_keys import LEAST_SECRET_BYTES
from prefixd_swap.stores import MooncakeOptions, S3Options, StoreOptions, ValkeyOptions, open_store
from prefixd_swap.tiers import RemoteTier
from prefixd_swap.transfers import Transfers


def open_remote(settings: RemoteSettings, arena: CpuArena | None, transfers: Transfers) -> RemoteTier:
    """Returns the tier, which connects at its first call.

    Args:
        settings: the settings; `remote.url` is set.
        arena: the memory that most transfers read or write; registered with the store.
        transfers: runs the tier's transfers.

    Raises:
        ConfigError: a file cannot be used, or a package is missing.
    """
    require("remote", f"remote.url = {settings.url}", "cryptography")
    from prefixd_swap.stores.sealed import Seal

    assert settings.secret_file is not None  # the settings were checked
    secret = read_secret("remote.secret_file", settings.secret_file, LEAST_SECRET_BYTES)
    key = None
    if settings.encryption_key_file is not None:
        key = read_secret("remote.encryption_key_file", settings.encryption_key_file, LEAST_SECRET_BYTES)
    _check_tls(settings)
    try:
        store = open_store(_store_options(settings))
    except (StorageError, ValueError) as error:
        raise ConfigError(f"remote.url = {settings.url}: {error}") from error
    if arena is not None:
        store.register(arena.span(0, arena.capacity_bytes).address, arena.capacity_bytes)
    return RemoteTier(
        store,
        transfers,
        Seal(secret, key),
        timeout_s=settings.timeout_s,
        ttl_s=settings.ttl_s,
        in_flight=settings.connections,
    )


def _store_options(settings: RemoteSettings) -> StoreOptions:
    url = urlsplit(settings.url or "")
    path = unquote(url.path)
    if url.scheme == "s3":
        return S3Options(
            bucket=url.netloc,
            prefix=f"{path.strip('/') or 'prefixd'}/",
            endpoint=settings.endpoint,
            region=settings.region,
            allow_http=settings.insecure_http,
            refresh_s=settings.refresh_s,
        )
    if url.scheme == "mooncake":
        return MooncakeOptions(
            master=url.netloc,
            hostname=settings.hostname,
            segment_bytes=settings.segment_bytes,
            protocol=settings.protocol,
            device=settings.device,
            threads=settings.connections,
            native_timeout_s=settings.timeout_s,
        )
    password = None
    if settings.password_file is not None:
        password = read_secret("remote.password_file", settings.password_file, 1).decode()
    return ValkeyOptions(
        host=url.hostname or "127.0.0.1",
        port=url.port or 6379,
        unix_socket=None if url.netloc else path,
        username=settings.username,
        password=password,
        db=int(path.strip("/") or 0) if url.netloc else 0,
        tls=url.scheme == "valkeys",
        ca_file=_text(settings.tls_ca),
        cert_file=_text(settings.tls_cert),
        key_file=_text(settings.tls_key),
        cluster=settings.cluster,
        connections=settings.connections,
    )


def _check_tls(settings: RemoteSettings) -> None:
    """Reads the TLS files once, so that an error is found before the first connection.

    Raises:
        ConfigError: a file cannot be read, is no certificate or key, or the key does not fit the certificate.
    """
    ca, cert, key = settings.tls_ca, settings.tls_cert, settings.tls_key
    for name, path in (("tls_ca", ca), ("tls_cert", cert), ("tls_key", key)):
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"remote.{name} = {path}: {error.strerror}; give a PEM file that the daemon can read"
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise ConfigError(f"remote.tls_ca = {ca} has no certificate in PEM ({error.reason or error})") from error
        if not context.cert_store_stats()["x509"]:
            raise ConfigError(f"remote.tls_ca = {ca} has no certificate in PEM, only lists of revoked ones")
    try:
        if cert is not None:
            context.load_cert_chain(cert, key, password="")  # without a password it would ask at the terminal
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"remote.tls_cert = {cert} and remote.tls_key = {key} are not a certificate in PEM and its key without a "
            f"password ({getattr(error, 'reason', None) or error})"
        ) from error


def _text(path: Path | None) -> str | None:
    return None if path is None else os.fspath(path)
