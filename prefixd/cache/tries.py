"""The tries of a cache: one for each geometry of blocks, given to another geometry when no namespace uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from prefixd.cache.index.trie import Observer, Rows, Trie
from prefixd.cache.namespaces import Namespace, NamespaceSpec
from prefixd.cache.tiers import Tiers


class Tries:
    """The tries of a cache, by geometry and by namespace.

    Args:
        tiers: the memory; tells a new trie which stores can be read now.
        reshaped: called with a trie whose geometry has changed.
    """

    def __init__(self, tiers: Tiers, reshaped: Callable[[Trie], None]) -> None:
        self.all: list[Trie] = []
        """All tries, by ordinal; the list grows as geometries are registered."""
        self.observers: tuple[Observer, ...] = ()
        self._tiers = tiers
        self.on_retained: Callable[[int, int], None] = lambda namespace, change: None
        """Called by every new trie when its bytes with a priority change (`Trie.on_retained`)."""
        self._reshaped = reshaped
        self._by_geometry: dict[tuple[object, ...], Trie] = {}
        self.by_namespace: dict[int, Trie] = {}
        """Namespace ordinal -> its trie."""
        self._users: Counter[int] = Counter()  # trie ordinal -> number of its namespaces

    def has_blocks(self, namespace: Namespace) -> bool:
        """Whether any block of the namespace exists."""
        return self.by_namespace[namespace.ordinal].blocks_of(namespace.ordinal) > 0

    def assign(self, namespace: Namespace) -> list[Namespace]:
        """Assigns a trie to a namespace, and to the common one beside it; returns those that had none."""
        geometry = _geometry(namespace.spec)
        trie = self._by_geometry.get(geometry)
        if trie is None:
            trie = self._by_geometry[geometry] = self._new(namespace.spec)
        new = [
            each for each in (namespace, namespace.common) if each is not None and each.ordinal not in self.by_namespace
        ]
        for each in new:
            self.by_namespace[each.ordinal] = trie
            self._users[trie.ordinal] += 1
        return new

    def forget(self, ordinal: int) -> None:
        """Removes the namespace with this ordinal."""
        self._users[self.by_namespace.pop(ordinal).ordinal] -= 1

    def _new(self, spec: NamespaceSpec) -> Trie:
        trie = self._of_parts(spec)
        trie.part_rows = tuple(part.rows for part in spec.parts)
        if any(trie.part_rows):
            self._tiers.set_padded()
        return trie

    def _of_parts(self, spec: NamespaceSpec) -> Trie:
        """A trie for blocks like the namespace's; reuses one without namespaces if there is one."""
        part_bytes, rules = [part.nbytes for part in spec.parts], spec.group_rules()
        if unused := [trie for trie in self.all if not self._users[trie.ordinal]]:
            trie = min(unused, key=lambda each: each.rows)
            self._by_geometry = {geometry: each for geometry, each in self._by_geometry.items() if each is not trie}
            trie.reshape(spec.block_tokens, part_bytes, rules)
            self._reshaped(trie)
            return trie
        trie = Trie(spec.block_tokens, part_bytes, len(self.all), rules)
        for store in (self._tiers.durable, self._tiers.remote):
            if store is not None:
                trie.offer(store.level, store.readable)
        trie.observer = self._tell()
        trie.on_retained = self.on_retained
        self.all.append(trie)
        return trie

    # -- observers ----------------------------------------------------------------------------------------------

    def observe(self, observer: Observer) -> None:
        """Has all tries call `observer` after changes from now on."""
        self._set_observers((*self.observers, observer))

    def unobserve(self, observer: Observer) -> None:
        """Ends the calls of `observer`."""
        self._set_observers(tuple(each for each in self.observers if each != observer))

    def _set_observers(self, observers: tuple[Observer, ...]) -> None:
        self.observers = observers
        tell = self._tell()
        for trie in self.all:
            trie.observer = tell

    def _tell(self) -> Observer | None:
        """A function that calls all observers; None without any."""
        observers = self.observers
        if len(observers) < 2:
            return observers[0] if observers else None

        def tell(trie: Trie, rows: int | Rows) -> None:
            for observer in observers:
                observer(trie, rows)

        return tell


def _geometry(spec: NamespaceSpec) -> tuple[object, ...]:
    """The properties that all blocks of one trie share."""
    return (spec.block_tokens, tuple((part.nbytes, part.rule, part.rows) for part in spec.parts))
