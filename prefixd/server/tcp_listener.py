"""The TCP listener: TLS, and the check of bearer tokens with the role that each has.

Peers of the unix socket are checked by the kernel, so none of this concerns them: the TCP port has a gRPC server of its
own.
"""

from __future__ import annotations

import hmac
import logging
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc

from prefixd.errors import ConfigError
from prefixd.server.rpc import Context
from prefixd.server.tokens import Token, TokenFile, digest
from prefixd.settings import ServerSettings

log = logging.getLogger(__name__)

_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_ADMIN_SERVICES = ("/prefixd.v1.Admin/",)


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Lets a call through whose `authorization: Bearer TOKEN` is known and has the role that the service needs.

    Health is open to everyone; Admin needs the role admin; everything else either role.
    """

    def __init__(self, file: TokenFile) -> None:
        self._file = file

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call, or one that refuses it."""
        method = _text(handler_call_details.method)
        if method.startswith(_OPEN_SERVICES):
            return await continuation(handler_call_details)
        given = [_text(value) for name, value in handler_call_details.invocation_metadata if name == "authorization"]
        token = self._find(given[0]) if len(given) == 1 else None
        if token is None:
            why = "is not known here" if given else "is missing"
            log.info("refused %s: its token %s", method, why)
            return _refuse(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the token {why}; send `authorization: Bearer TOKEN`, with a token from the daemon's server.tokens "
                "(the prefixd command: --token-file, PREFIXD_TOKEN)",
            )
        if method.startswith(_ADMIN_SERVICES) and token.role != "admin":
            log.info("refused %s: the token of %s is no admin's", method, token.name)
            return _refuse(
                grpc.StatusCode.PERMISSION_DENIED,
                f"Admin needs a token with the role admin, and that of {token.name} has the role {token.role}; "
                "use another token, or the daemon's unix socket",
            )
        return await continuation(handler_call_details)

    def _find(self, header: str) -> Token | None:
        scheme, _, secret = header.partition(" ")
        given = digest(secret.strip())
        found = None
        for token in self._file.tokens:  # all of them: how long it takes says nothing about which
            if hmac.compare_digest(token.digest, given):
                found = token
        return found if scheme.lower() == "bearer" else None


def _refuse(code: grpc.StatusCode, message: str) -> grpc.RpcMethodHandler[Any, Any]:
    # Whatever the method's kind: nothing is read before the call is over.
    async def refuse(_requests: object, context: Context) -> NoReturn:
        await context.abort(code, message)
        raise AssertionError("abort does not return")

    return grpc.stream_stream_rpc_method_handler(refuse)  # type: ignore[arg-type, unused-ignore]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")


def tls_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """What the TCP port proves itself with and asks of its clients; None for one without TLS.

    Raises:
        ConfigError: a file cannot be read, is no certificate or key, or the key is another certificate's.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    files = {"tls_cert": settings.tls_cert, "tls_key": settings.tls_key, "tls_client_ca": settings.tls_client_ca}
    content = {name: _read(name, path) for name, path in files.items() if path is not None}
    # gRPC would say what is wrong with them at the first handshake only, and to the client only.
    check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        check.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"server.tls_cert = {settings.tls_cert} and server.tls_key = {settings.tls_key} are not a certificate in "
            f"PEM and its key without a password ({_reason(error)})"
        ) from error
    if settings.tls_client_ca is not None:
        try:
            check.load_verify_locations(settings.tls_client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"server.tls_client_ca = {settings.tls_client_ca} has no certificate in PEM ({_reason(error)})"
            ) from error
    return grpc.ssl_server_credentials(
        [(content["tls_key"], content["tls_cert"])],
        root_certificates=content.get("tls_client_ca"),
        require_client_auth=settings.tls_client_ca is not None,
    )


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"server.{name} = {path}: {error.strerror}; choose another file") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
