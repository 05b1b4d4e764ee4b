"""Limits how many requests a second a tenant sends."""

from __future__ import annotations

from collections.abc import Callable

from prefixd.base.tenancy.tenants import Tenant


class RequestRates:
    """A token bucket for each tenant: a request takes one token, and `Quota.requests_per_s` come back each second. A
    bucket holds the tokens of one second, at least one.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # by tenant: tokens, and when they were counted

    def count(self, tenant: Tenant) -> None:
        """Counts a request. Raises ExhaustedError when the tenant has sent too many."""
        rate = tenant.quota.requests_per_s
        if rate is None:
            self._buckets.pop(tenant.name, None)
            return
        now_s, most = self._clock(), max(1.0, rate)
        left, since_s = self._buckets.get(tenant.name, (most, now_s))
        left = min(most, left + rate * (now_s - since_s))
        if left < 1:
            self._buckets[tenant.name] = left, now_s
            wait_s = (1 - left) / rate
            have = f"more than {rate:g} requests a second were sent"
            raise tenant.refusal("requests_per_s", have, f"send it again in {wait_s:.3f} s")
        self._buckets[tenant.name] = left - 1, now_s
