"""Memory that calls have while they wait and run, bounded for all tenants together and for each of them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from prefixd.errors import ExhaustedError
from prefixd.tenants import Tenant
from prefixd_scheduler import SharedLimit


class SharedBytes:
    """Counts bytes and refuses what is too much; each tenant has its part (`SharedLimit`).

    Args:
        most_bytes: of all calls together.
        what: they are bytes of: "images".
        limit: what bounds them: "worker.images_bytes".
        tenants: how many tenants there are.
    """

    def __init__(self, most_bytes: int, what: str, limit: str, tenants: Callable[[], int] = lambda: 1) -> None:
        self._shared = SharedLimit(most_bytes, tenants)
        self._what = what
        self._limit = limit

    @property
    def nbytes(self) -> int:
        """Of all calls."""
        return self._shared.total

    @contextmanager
    def held(self, tenant: Tenant, nbytes: int) -> Generator[None]:
        """While a call has these. Raises ExhaustedError."""
        shared = self._shared
        if nbytes > shared.left(tenant.name):
            tenant.refused[self._limit] += 1
            raise ExhaustedError(
                f"the request has {nbytes} bytes of {self._what}, others have {self.nbytes}, and {self._limit} allows "
                f"{shared.limit}, of which {shared.reserved} are kept for each tenant; send it again later"
            )
        shared.add(tenant.name, nbytes)
        try:
            yield
        finally:
            shared.add(tenant.name, -nbytes)
