"""To which tenant a caller belongs, and with which role: by token, certificate or user of this host."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from prefixd.base.tenants import DEFAULT, Role, Tenants
from prefixd.server.access.caller import Caller
from prefixd.server.access.local_credentials import SCHEME, LocalCredentials
from prefixd.server.access.token_file import TokenFile
from prefixd.settings import ServerSettings, TenantSettings

log = logging.getLogger(__name__)


class UnknownCallerError(Exception):
    """What a caller shows is not known here, or nothing was shown where something must be."""


class Identities:
    """Who is who. Replaced in parts by `update` while the daemon runs.

    Args:
        settings: of the server.
        named: the tenants of the settings.
        tenants: all tenants of the daemon.
        tokens: the tokens that count now; None where settings name no file.
        credentials: reads the credentials that local clients send.
    """

    def __init__(
        self,
        settings: ServerSettings,
        named: Mapping[str, TenantSettings],
        tenants: Tenants,
        tokens: TokenFile | None,
        credentials: LocalCredentials,
    ) -> None:
        self._tenants = tenants
        self._tokens = tokens
        self._credentials = credentials
        self._only_owner = True
        self._told: set[tuple[str, str]] = set()
        if tokens is not None:
            tokens.listeners.append(self._tell_of_strange_tokens)
        self.update(settings, named)

    def update(self, settings: ServerSettings, named: Mapping[str, TenantSettings]) -> None:
        """Uses these settings from now on. Tokens that do not fit them are told of when tokens are read next."""
        self._admin_uids = {0, os.geteuid(), *settings.admin_uids}
        self._admin_certificates = frozenset(settings.admin_certificates)
        self._mapping_uids = {*self._admin_uids, *settings.allow_uids}
        self._mapping_uids |= {uid for tenant in named.values() if tenant.map_memory for uid in tenant.uids}
        self._named = {*named, DEFAULT} if named else set()
        self._tenant_of_uid = {uid: name for name, tenant in named.items() for uid in tenant.uids}
        self._tenant_of_certificate = {each: name for name, tenant in named.items() for each in tenant.certificates}
        others = {*settings.allow_uids, *settings.admin_uids, *self._tenant_of_uid} - {0, os.geteuid()}
        # Connections outlast settings: where others could connect once, they may still be connected.
        self._only_owner &= not others and int(settings.socket_mode, 8) & 0o066 == 0

    def _tell_of_strange_tokens(self) -> None:
        """Logs the tokens whose tenants the settings do not name, each once: their holders may call much later."""
        tokens = () if self._tokens is None or not self._named else self._tokens.tokens
        strange = {(token.name, token.tenant) for token in tokens if token.tenant not in self._named}
        for name, tenant in sorted(strange - self._told):
            log.warning(
                "server.tokens: the token %s is of tenant %s, which the settings do not name: its calls are refused; "
                "add [tenants.%s] or mend the token's line",
                name,
                tenant,
                tenant,
            )
        self._told = strange

    # -- the unix socket ----------------------------------------------------------------------------------------

    def of_local(self, authorization: str) -> Caller:
        """Who calls at the unix socket. Without a ticket: the operator where nobody else can connect, else a client of
        the default tenant.

        Raises:
            UnknownCallerError: the ticket is none; or there is none, and users may be tenants', with quotas of theirs.
        """
        if not authorization:
            if self._tenant_of_uid:
                raise UnknownCallerError(
                    "no ticket: users of this host belong to tenants here; fetch one at the daemon's memory socket, as "
                    f"the SDK does, and send `authorization: {SCHEME} ...`"
                )
            role, who = (Role.ADMIN, "owner") if self._only_owner else (Role.CLIENT, "without ticket")
            return Caller(self._tenants.default, role, who, "unix")
        scheme, _, ticket = authorization.partition(" ")
        holder = self._credentials.read(ticket.strip()) if scheme == SCHEME else None
        if holder is None:
            raise UnknownCallerError(
                f"`authorization: {SCHEME} ...` is none of this daemon's tickets, or older than a day; fetch another "
                "at its memory socket, or send none"
            )
        return self.of_user(holder.uid, holder.pid)

    def of_user(self, uid: int, pid: int) -> Caller:
        """A user of this host: an operator, of a tenant, or of the default tenant."""
        name = f"uid {uid}"
        if uid in self._admin_uids:
            return Caller(self._tenants.default, Role.ADMIN, name, "unix", pid)
        tenant = self._tenants.known(self._tenant_of_uid.get(uid, self._tenants.default.name))
        return Caller(tenant, Role.CLIENT, name, "unix", pid)

    def may_map(self, uid: int) -> bool:
        """Whether a process of this user may have what cannot be taken back: the daemon's memory."""
        return uid in self._mapping_uids

    # -- the TCP port -------------------------------------------------------------------------------------------

    def of_token(self, authorization: str) -> Caller:
        """Who has this token. Raises UnknownCallerError."""
        scheme, _, secret = authorization.partition(" ")
        found = None if self._tokens is None else self._tokens.find(secret.strip())
        if found is None or scheme.lower() != "bearer":
            raise UnknownCallerError("the token is not known here")
        if self._named and found.tenant not in self._named:
            raise UnknownCallerError(
                f"the token {found.name} is of tenant {found.tenant}, which the settings do not name; have the "
                f"operator add [tenants.{found.tenant}] or mend the token's line"
            )
        return Caller(self._tenants.known(found.tenant), Role(found.role), found.name, "tcp")

    def refuse_scraper(self, authorization: str) -> str | None:
        """Why whoever sends this may not read the metrics; None: they may, as everybody where there are no tokens."""
        if self._tokens is None:
            return None
        try:
            caller = self.of_token(authorization)
        except UnknownCallerError:
            return (
                "send `Authorization: Bearer TOKEN`, with a token of server.tokens that has the role metrics or admin"
            )
        if caller.role is Role.CLIENT:
            return f"{caller.name} has the role client; use a token with the role metrics or admin"
        return None

    def of_certificate(self, names: Sequence[str], host: str = "") -> Caller:
        """Who shows a certificate with these names; of the default tenant where no setting has one of them.

        Without any name, nobody had to show anything: settings let everyone in who reaches the port, as clients. Then
        they are told apart by the host from where they call.

        Raises:
            UnknownCallerError: there are tokens, and the certificate is nobody's.
        """
        for name in names:
            if name in self._admin_certificates:
                return Caller(self._tenants.default, Role.ADMIN, name, "tcp")
        for name in names:
            if name in self._tenant_of_certificate:
                return Caller(self._tenants.known(self._tenant_of_certificate[name]), Role.CLIENT, name, "tcp")
        if self._tokens is not None:
            raise UnknownCallerError("the token is missing")
        if names:
            return Caller(self._tenants.default, Role.CLIENT, names[0], "tcp")
        return Caller(self._tenants.default, Role.CLIENT, "anybody", "tcp", host=host)
