"""A limit that tenants share, with a part reserved for each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any


class SharedLimit:
    """Counts how much of a limited resource each tenant has.

    One half is divided evenly: each of T tenants has 1 / 2T of the limit to itself, and at least one if the limit is at
    least T. The other half is for those that come first. A single tenant may have the whole limit.

    ```
    limit 80, T = 4     [ 10 | 10 | 10 | 10 ][         40         ]
                          A    B    C    D      whoever comes first
    ```

    Args:
        limit: the most that all tenants may have together.
        tenants: returns the number of tenants; if more have something, these count.
        had: amounts that tenants have at first.
    """

    def __init__(
        self, limit: int, tenants: Callable[[], int] = lambda: 1, had: Mapping[Any, int] | None = None
    ) -> None:
        self.limit = limit
        self._tenants = tenants
        self._had: dict[Hashable, int] = {tenant: amount for tenant, amount in (had or {}).items() if amount}
        self.total = sum(self._had.values())

    def __getitem__(self, tenant: Hashable) -> int:
        """The amount that a tenant has."""
        return self._had.get(tenant, 0)

    @property
    def reserved(self) -> int:
        """The amount reserved for each tenant."""
        return self._reserved(self._sharers())

    def left(self, tenant: Hashable) -> int:
        """How much more a tenant may have now. Time O(tenants that have something)."""
        tenants = self._sharers()
        reserved = self._reserved(tenants)
        above = sum(max(0, had - reserved) for had in self._had.values())
        open_to_all = max(0, self.limit - tenants * reserved - above)
        return max(0, min(self.limit - self.total, max(0, reserved - self[tenant]) + open_to_all))

    def try_add(self, tenant: Hashable, amount: int) -> bool:
        """Adds `amount` for a tenant if it may have as much; returns whether it may."""
        if amount > self.left(tenant):
            return False
        self.add(tenant, amount)
        return True

    def add(self, tenant: Hashable, amount: int) -> None:
        """Adds `amount` for a tenant without a check; a negative one gives back."""
        self.total += amount
        had = self[tenant] + amount
        if had:
            self._had[tenant] = had
        else:
            self._had.pop(tenant, None)

    def _sharers(self) -> int:
        return max(1, self._tenants(), len(self._had))

    def _reserved(self, sharers: int) -> int:
        return max(self.limit // (2 * sharers), int(self.limit >= sharers))
