"""Finds a caller's tenant and role by its token, its certificate or its user on this host."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefixd.base.tenancy.tenants import DEFAULT, Role, Tenant, Tenants
from prefixd.server.access.local_credentials import SCHEME, LocalCredentials
from prefixd.server.access.token_file import TokenFile
from prefixd.settings import ServerSettings, TenantSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """One caller.

    Attributes:
        tenant: the tenant that it belongs to.
        role: the services that it may use.
        name: a name for logs: `uid 1001`, or the name of a token or certificate.
        door: `unix`, `tcp` or `http`.
        pid: process id of a local caller that sent a credential, else 0.
        host: address of a caller that sent no token or certificate to an open TCP port, else empty.
    """

    tenant: Tenant
    role: Role
    name: str
    door: str
    pid: int = 0
    host: str = ""

    @property
    def origin(self) -> tuple[Tenant, str, str, str]:
        """Identifies the user, token or certificate; or the host, if the caller sent none of them."""
        return self.tenant, self.door, self.name, self.host


class UnknownCallerError(Exception):
    """The caller sent a token or credential that the daemon does not know, or none where one is needed."""


class Identities:
    """Identifies callers. `update` replaces the settings while the daemon runs.

    Args:
        settings: the settings of the server.
        named: the tenants that the settings name.
        tenants: all tenants of the daemon.
        tokens: the valid tokens; None if the settings name no file.
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
        self._logged: set[tuple[str, str]] = set()
        if tokens is not None:
            tokens.listeners.append(self._log_tokens_of_unnamed_tenants)
        self.update(settings, named)

    def update(self, settings: ServerSettings, named: Mapping[str, TenantSettings]) -> None:
        """Uses these settings from now on. Tokens that do not fit them are logged when the tokens are next read."""
        self._admin_uids = {0, os.geteuid(), *settings.admin_uids}
        self._admin_certificates = frozenset(settings.admin_certificates)
        self._metrics_certificates = frozenset(settings.metrics_certificates)
        self._mapping_uids = {*self._admin_uids, *settings.allow_uids}
        self._mapping_uids |= {uid for tenant in named.values() if tenant.map_memory for uid in tenant.uids}
        self._named = {*named, DEFAULT} if named else set()
        self._tenant_of_uid = {uid: name for name, tenant in named.items() for uid in tenant.uids}
        self._tenant_of_certificate = {each: name for name, tenant in named.items() for each in tenant.certificates}
        others = {*settings.allow_uids, *settings.admin_uids, *self._tenant_of_uid} - {0, os.geteuid()}
        # A connection outlasts a change of the settings: users that could connect earlier may still be connected.
        self._only_owner &= not others and int(settings.socket_mode, 8) & 0o066 == 0

    def _log_tokens_of_unnamed_tenants(self) -> None:
        """Logs each token of a tenant that the settings do not name, once: its holder may call much later."""
        tokens = () if self._tokens is None or not self._named else self._tokens.tokens
        refused = {(token.name, token.tenant) for token in tokens if token.tenant not in self._named}
        for name, tenant in sorted(refused - self._logged):
            log.warning(
                "server.tokens: the token %s is of tenant %s, which the settings do not name: its calls are refused; "
                "add [tenants.%s] or mend the token's line",
                name,
                tenant,
                tenant,
            )
        self._logged = refused

    # -- the unix socket ----------------------------------------------------------------------------------------

    def of_local(self, authorization: str) -> Caller:
        """Returns the caller at the unix socket that sent this metadata.

        A caller without a credential is the operator if only the daemon's user and root can connect; otherwise it is a
        client of the default tenant.

        Raises:
            UnknownCallerError: the credential is not valid; or there is none, and users of this host belong to tenants.
        """
        if not authorization:
            if self._tenant_of_uid:
                raise UnknownCallerError(
                    "no ticket: users of this host belong to tenants here; fetch one at the daemon's memory socket, as "
                    f"the SDK does, and send `authorization: {SCHEME} ...`"
                )
            role, name = (Role.ADMIN, "owner") if self._only_owner else (Role.CLIENT, "without ticket")
            return Caller(self._tenants.default, role, name, "unix")
        scheme, _, credential = authorization.partition(" ")
        holder = self._credentials.read(credential.strip()) if scheme == SCHEME else None
        if holder is None:
            raise UnknownCallerError(
                f"`authorization: {SCHEME} ...` is none of this daemon's tickets, or older than a day; fetch another "
                "at its memory socket, or send none"
            )
        return self.of_user(holder.uid, holder.pid)

    def of_user(self, uid: int, pid: int) -> Caller:
        """Returns the caller for a user of this host: an operator, or a client of its tenant or the default tenant."""
        name = f"uid {uid}"
        if uid in self._admin_uids:
            return Caller(self._tenants.default, Role.ADMIN, name, "unix", pid)
        tenant = self._tenants.known(self._tenant_of_uid.get(uid, self._tenants.default.name))
        return Caller(tenant, Role.CLIENT, name, "unix", pid)

    def may_map(self, uid: int) -> bool:
        """True if processes of this user may map the daemon's memory, which cannot be taken back."""
        return uid in self._mapping_uids

    # -- the TCP port and the HTTP ports --------------------------------------------------------------------------

    @property
    def has_tokens(self) -> bool:
        """True if the settings name a file of tokens."""
        return self._tokens is not None

    def of_token(self, authorization: str) -> Caller:
        """Returns the holder of the token that `authorization` carries. Raises UnknownCallerError."""
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

    def of_certificate(self, names: Sequence[str], host: str = "") -> Caller:
        """Returns the caller whose certificate has these names. Its tenant is the default one if no setting names them.

        `names` is empty if the settings ask for no certificate: everyone who reaches the port is then a client, and
        callers are told apart by `host`, the address from which they call.

        Raises:
            UnknownCallerError: the settings have tokens, and none of them names the certificate.
        """
        for name in names:
            if name in self._admin_certificates:
                return Caller(self._tenants.default, Role.ADMIN, name, "tcp")
        for name in names:
            if name in self._metrics_certificates:
                return Caller(self._tenants.default, Role.METRICS, name, "tcp")
        for name in names:
            if name in self._tenant_of_certificate:
                return Caller(self._tenants.known(self._tenant_of_certificate[name]), Role.CLIENT, name, "tcp")
        if self._tokens is not None:
            raise UnknownCallerError("the token is missing")
        if names:
            return Caller(self._tenants.default, Role.CLIENT, names[0], "tcp")
        return Caller(self._tenants.default, Role.CLIENT, "anybody", "tcp", host=host)
