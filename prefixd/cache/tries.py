"""The tries of a cache: one for each geometry of blocks, given to another geometry when no namespace uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from prefixd.cache.index.trie import Observer, Rows, Trie
from prefixd.cache.namespaces import Namespace, NamespaceSpec
from prefixd.cache.tiers import Tiers


class Tries:
    """Which trie has the blocks of which namespace.

    Args:
        tiers: the memory; a new trie learns which stores can be read now.
        reshaped: called with a trie that has got another geometry.
    """

    def __init__(self, tiers: Tiers, reshaped: Callable[[Trie], None]) -> None:
        self.all: list[Trie] = []
        """All of them, by ordinal; the list grows as geometries are registered."""
        self.observers: tuple[Observer, ...] = ()
        self._tiers = tiers
        self.on_retained: Callable[[int, int], None] = lambda namespace, change: None
        """What every new trie calls when its bytes with a priority change, see `Trie.on_retained`."""
        self._reshaped = reshaped
        self._by_geometry: dict[tuple[object, ...], Trie] = {}
        self.by_namespace: dict[int, Trie] = {}
        """By the namespace's ordinal."""
        self._users: Counter[int] = Counter()  # namespaces that are known, by their trie's ordinal

    def has_blocks(self, namespace: Namespace) -> bool:
        """Whether any block of the namespace exists."""
        return self.by_namespace[namespace.ordinal].blocks_of(namespace.ordinal) > 0

    def assign(self, namespace: Namespace) -> list[Namespace]:
        """Gives a namespace, and the common one beside it, their trie; returns those that had none."""
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
        """The namespace with this ordinal is not known any more."""
        self._users[self.by_namespace.pop(ordinal).ordinal] -= 1

    def _new(self, spec: NamespaceSpec) -> Trie:
        """A trie for blocks like the namespace's: one that no namespace uses any more, if there is one."""
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
                trie.offer(store.level, store.gives)
        trie.observer = self._tell()
        trie.on_retained = self.on_retained
        self.all.append(trie)
        return trie

    # -- observers ----------------------------------------------------------------------------------------------

    def observe(self, observer: Observer) -> None:
        """Has `observer` told of changes in all tries from now on."""
        self._set_observers((*self.observers, observer))

    def unobserve(self, observer: Observer) -> None:
        """Has `observer` told of nothing any more."""
        self._set_observers(tuple(each for each in self.observers if each != observer))

    def _set_observers(self, observers: tuple[Observer, ...]) -> None:
        self.observers = observers
        tell = self._tell()
        for trie in self.all:
            trie.observer = tell

    def _tell(self) -> Observer | None:
        """Tells all observers; None without any."""
        observers = self.observers
        if len(observers) < 2:
            return observers[0] if observers else None

        def tell(trie: Trie, rows: int | Rows) -> None:
            for observer in observers:
                observer(trie, rows)

        return tell


def _geometry(spec: NamespaceSpec) -> tuple[object, ...]:
    """What blocks of one trie have in common."""
    return (spec.block_tokens, tuple((part.nbytes, part.rule) for part in spec.parts))
