"""Registers namespaces, and forgets those without blocks and users."""

from __future__ import annotations

from prefixd.base.tenancy.tenants import Tenant, Tenants
from prefixd.cache.coding.codec_choice import check_codec_installed, import_codec
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespace_room import NamespaceRoom
from prefixd.cache.namespaces import Namespace, NamespaceRegistry, NamespaceSpec
from prefixd.cache.sessions.lease_table import LeaseTable
from prefixd.cache.sessions.sessions import Session
from prefixd.cache.tries import Tries

_EXAMINED = 1024  # namespaces that are checked for users when a limit is reached: a millisecond
_EXAMINED_WITH_A_NEW_ONE = 2  # and with each new namespace, so that there are never many more than are used


class Registration:
    """Registers namespaces for sessions and for the daemon's own worker.

    Args:
        registry: all namespaces.
        tries: the tries of their blocks.
        tenants: their owners.
        leases: the sessions that have them open.
        mover: knows which namespaces are on disk.
        room: limits their memory.
        share_at_once: blocks are common to all tenants at once, so all tenants register one namespace.
    """

    def __init__(
        self,
        registry: NamespaceRegistry,
        tries: Tries,
        tenants: Tenants,
        leases: LeaseTable,
        mover: Mover,
        room: NamespaceRoom,
        share_at_once: bool,
    ) -> None:
        self._registry = registry
        self._tries = tries
        self._tenants = tenants
        self._leases = leases
        self._mover = mover
        self._room = room
        self._share_at_once = share_at_once
        self._unsaved: list[bytes] = []  # ids of forgotten namespaces to remove from the disk
        room.on_forgotten = self._forgotten

    def register(self, spec: NamespaceSpec) -> Namespace:
        """The namespace for `spec`; registers it if it is new.

        Raises:
            InvalidArgumentError: the spec is invalid.
            AlreadyExistsError: another namespace has the same id.
            PreconditionError: the packages of its codec are not installed.
            ExhaustedError: the tenant, or all tenants together, may have no further namespace.
        """
        if self._share_at_once and spec.may_be_common:
            spec = spec.common
        check_codec_installed(spec)
        known = self._registry.find(spec)
        if known is not None:
            self._registry.touch(known)
            return known
        spec.check()
        self.forget_unused(_EXAMINED_WITH_A_NEW_ONE)
        tenant = self._tenants.known(spec.tenant)
        nbytes = spec.nbytes
        if not self._room.fits(tenant, nbytes):
            self.forget_unused()
        self._room.check(tenant, nbytes)
        return self.add(self._registry.register(spec))

    async def open_namespace(self, session: Session, spec: NamespaceSpec) -> Namespace:
        """Registers a namespace, after making room for it, and opens it to a session. Raises as `register`."""
        if self._registry.find(spec) is None:
            spec.check()  # before any namespace is forgotten for it
            check_codec_installed(spec)
            await import_codec(spec)
            await self._room.make(session.tenant, spec.nbytes)
            self._leases.session(session.id)
        namespace = self.register(spec)
        session.open_namespace(namespace)
        return namespace

    def unlisted(self, spec: NamespaceSpec) -> Namespace:
        """A namespace that no other caller can find."""
        spec.check()
        self.forget_unused(_EXAMINED_WITH_A_NEW_ONE)
        return self.add(self._registry.unlisted(spec))

    def add(self, namespace: Namespace) -> Namespace:
        """Assigns a trie and a tenant to a new namespace."""
        for each in self._tries.assign(namespace):
            self._mover.use.assign(each.ordinal, self._tenants.known(each.spec.tenant))
        return namespace

    def tenant_at(self, ordinal: int) -> Tenant:
        """The tenant of the namespace with this ordinal."""
        return self._tenants.known(self._registry.at(ordinal).spec.tenant)

    def forget_unused(self, most: int = _EXAMINED) -> None:
        """Examines the `most` namespaces that were not examined for longest; forgets those without users and blocks."""
        for ordinal, identity in self._registry.forget_unused(self._tries.has_blocks, most):
            self._forgotten(ordinal, identity)

    def _forgotten(self, ordinal: int, identity: bytes) -> None:
        self._tries.forget(ordinal)
        if identity in self._mover.disk.metadata.saved:
            self._unsaved.append(identity)
            if len(self._unsaved) == 1:  # the task removes the others of this turn, too
                self._mover.spawn(self._forget_saved())

    async def _forget_saved(self) -> None:
        unsaved, self._unsaved = self._unsaved, []
        await self._mover.disk.metadata.forget_namespaces(unsaved)
