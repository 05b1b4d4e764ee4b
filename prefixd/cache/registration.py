"""Registering namespaces, and forgetting those that have no blocks and no user."""

from __future__ import annotations

from prefixd.base.tenancy.tenants import Tenant, Tenants
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespace_room import NamespaceRoom
from prefixd.cache.namespaces import Namespace, NamespaceRegistry, NamespaceSpec
from prefixd.cache.sessions.sessions import LeaseTable, Session
from prefixd.cache.tries import Tries

_EXAMINED = 1024  # namespaces that are examined, at a limit, for those that have no user: a millisecond,
_EXAMINED_WITH_A_NEW_ONE = 2  # and whenever one is new: there are never many more than are used


class Registration:
    """Registers namespaces for sessions and for the daemon's own worker.

    Args:
        registry: all namespaces.
        tries: have their blocks.
        tenants: to whom they belong.
        leases: the sessions that have some open.
        mover: knows which namespaces are named on disk.
        room: bounds their memory.
        share_at_once: blocks are common to all tenants at once, so all register one namespace.
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
        self._unsaved: list[bytes] = []  # ids of namespaces that were forgotten and are to leave the disk
        room.on_forgotten = self._forgotten

    def register(self, spec: NamespaceSpec) -> Namespace:
        """The namespace for `spec`, which is new or known. Raises as `TieredCache.register`."""
        if self._share_at_once and spec.may_be_common:
            spec = spec.common
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
        """Registers a namespace and opens it to a session, with room made for it. Raises as `register`."""
        if self._registry.find(spec) is None:
            spec.check()  # before anything is forgotten for its sake
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
        """Gives a namespace that was not known its trie and its tenant."""
        for each in self._tries.assign(namespace):
            self._mover.use.assign(each.ordinal, self._tenants.known(each.spec.tenant))
        return namespace

    def tenant_at(self, ordinal: int) -> Tenant:
        """To whom the namespace with this ordinal belongs."""
        return self._tenants.known(self._registry.at(ordinal).spec.tenant)

    def forget_unused(self, most: int = _EXAMINED) -> None:
        """Forgets those that have no user and no blocks, among the `most` that were not examined for longest."""
        for ordinal, identity in self._registry.forget_unused(self._tries.has_blocks, most):
            self._forgotten(ordinal, identity)

    def _forgotten(self, ordinal: int, identity: bytes) -> None:
        self._tries.forget(ordinal)
        if identity in self._mover.disk.metadata.saved:
            self._unsaved.append(identity)
            if len(self._unsaved) == 1:  # the others of this turn go with it
                self._mover.spawn(self._forget_saved())

    async def _forget_saved(self) -> None:
        unsaved, self._unsaved = self._unsaved, []
        await self._mover.disk.metadata.forget_namespaces(unsaved)
