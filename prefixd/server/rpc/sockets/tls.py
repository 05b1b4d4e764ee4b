"""TLS of the TCP port and the HTTP ports: the daemon's certificate, and the certificates of clients."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from prefixd.base.errors import ConfigError
from prefixd.settings import ServerSettings


def tls_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """Returns the TLS credentials of the TCP port; None if it has no TLS.

    Raises:
        ConfigError: a file cannot be read, is no certificate or key, or the key does not fit the certificate.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    content = _contents(settings)
    tls_context(settings)  # gRPC would find an error only at the first handshake, and report it to the client only
    return grpc.ssl_server_credentials(
        [(content["tls_key"], content["tls_cert"])],
        root_certificates=content.get("tls_client_ca"),
        require_client_auth=settings.tls_client_ca is not None,
    )


def tls_context(settings: ServerSettings) -> ssl.SSLContext:
    """Returns the TLS of the HTTP ports. It asks a client for a certificate if the settings name authorities, but also
    lets in one without: the probes of Kubernetes have none, and the routes check who may have what.

    Raises:
        ConfigError: a file cannot be read, is no certificate or key, or the key does not fit the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if settings.tls_cert is None or settings.tls_key is None:
        raise ConfigError("TLS needs server.tls_cert and server.tls_key; set both")
    _contents(settings)  # whose error names the file, as the library's does not
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"server.tls_cert = {settings.tls_cert} and server.tls_key = {settings.tls_key} are not a certificate in "
            f"PEM and its key without a password ({_reason(error)})"
        ) from error
    if settings.tls_client_ca is not None:
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"server.tls_client_ca = {settings.tls_client_ca} has no certificate in PEM ({_reason(error)})"
            ) from error
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _contents(settings: ServerSettings) -> dict[str, bytes]:
    files = {"tls_cert": settings.tls_cert, "tls_key": settings.tls_key, "tls_client_ca": settings.tls_client_ca}
    return {name: _read(name, path) for name, path in files.items() if path is not None}


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"server.{name} = {path}: {error.strerror}; choose another file") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
