"""Who sends an HTTP request, and whether that caller may have the answer."""

from __future__ import annotations

import logging
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from prefixd.base.tenancy.tenants import Role
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.identities import Caller, Identities, UnknownCallerError
from prefixd.server.rpc.call_limits import Refusals

log = logging.getLogger(__name__)

_PATH_CHARACTERS = 100  # of a request's path in the audit log
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="prefixd"'}
"""Header of an answer 401."""


class HttpCallers:
    """Identifies the callers of one HTTP port, by the same tokens and certificates as the TCP port does for gRPC.

    Args:
        identities: tells callers' tenants and roles.
        refusals: paces refusals.
        audit: logs callers that are let in or refused.
        asks_certificates: whether the port asks its clients for certificates.
    """

    def __init__(
        self, identities: Identities, refusals: Refusals, audit: AuditLog, *, asks_certificates: bool = False
    ) -> None:
        self._identities = identities
        self._refusals = refusals
        self._audit = audit
        self._asks_certificates = asks_certificates

    @property
    def open(self) -> bool:
        """True if everyone who reaches the port is let in: neither tokens nor certificates tell callers apart."""
        return not self._asks_certificates and not self._identities.has_tokens

    def identify(self, request: Request) -> Caller:
        """Returns the caller that sent a request.

        - `Authorization: Bearer TOKEN`: the token's tenant and role. Where the daemon has no tokens the header is
          ignored, since OpenAI's clients always send one.
        - else a client certificate (`server.tls_client_ca`): an operator if `server.admin_certificates` names it, may
          read figures if `server.metrics_certificates` does, else a client of the tenant that names it, or of the
          default tenant.
        - neither: a client of the default tenant, told apart by its address, if the port is `open`.

        The caller's door is "http". The answer takes microseconds. Before the request's body is read, check the role
        (`Role.CLIENT` or `Role.ADMIN` for inference), and count the call: `CallLimits.begin` with the method that gRPC
        has for it, such as "/prefixd.v1.Inference/Generate".

        Raises:
            UnknownCallerError: the caller is not known, or shows nothing where the port is not open. Answer 401 with
                the error's text and `CHALLENGE`, after `await refuse_turn(request, error)`.
        """
        given = request.headers.getlist("authorization")
        if len(given) > 1:
            raise UnknownCallerError("the token is not known here: several were sent")
        names: tuple[str, ...] = getattr(request.state, "certificate_names", ())
        host = "" if request.client is None else request.client.host
        if given and self._identities.has_tokens:
            caller = self._identities.of_token(given[0])
        elif self._asks_certificates and not names:
            raise UnknownCallerError("no certificate was sent")
        else:
            caller = self._identities.of_certificate(names, host)
        return replace(caller, door="http")

    def let_in(self, caller: Caller) -> None:
        """Logs a caller that is let in."""
        if self._audit.enabled:
            self._audit.log_let_in(caller)

    async def refuse_turn(self, request: Request, why: object, caller: Caller | None = None) -> None:
        """Waits until a caller (None: an unknown one) may be told of a refusal, and logs it."""
        if await self.pace_refusal(request, caller):
            peer = "" if request.client is None or caller is not None else f"{request.client.host}"
            path = f"{request.method} {request.url.path}"[:_PATH_CHARACTERS]
            self._audit.log_refused(caller, path, str(why), door="" if caller else "http", peer=peer)
            log.info("refused %s%s: %s", path, f" from {peer}" if peer else "", why)

    async def pace_refusal(self, request: Request, caller: Caller | None) -> bool:
        """Waits until a caller may be told of a refusal. Returns False when too many wait: then do not log it.

        Meanwhile the request's connection may be closed to make room for others.
        """
        request.state.note_refusal()
        return await self._refusals.turn(None if caller is None else caller.tenant)

    async def refuse_operator(self, request: Request, needed: Role = Role.METRICS) -> Response | None:
        """Returns the refusal of a request for an operator's page; None if its sender may have the page.

        Figures need the role metrics or admin, and are for everyone at an open port. What shows prompts or changes
        something (`needed` is ADMIN) needs that role at every port.
        """
        if self.open and needed is Role.METRICS:
            return None
        allowed = (Role.ADMIN,) if needed is Role.ADMIN else (Role.METRICS, Role.ADMIN)
        roles = " or ".join(sorted(allowed, reverse=True))
        how = f"send `Authorization: Bearer TOKEN`, with a token of server.tokens that has the role {roles}"
        try:
            caller = self.identify(request)
        except UnknownCallerError as error:
            await self.refuse_turn(request, error)
            return PlainTextResponse(f"{error}; {how}\n", 401, CHALLENGE)
        if caller.role in allowed:
            self.let_in(caller)
            return None
        why = f"{caller.name} has the role {caller.role}; {how}"
        if self.open:
            why = f"this needs the role {roles}, which nobody has at a port without tokens; set server.tokens"
        await self.refuse_turn(request, why, caller)
        return PlainTextResponse(f"{why}\n", 403)
