"""What belongs to a tenant and what it may have: `[tenants.NAME]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from prefixd.base.tenants import Quota, TierQuota
from prefixd.base.tiers import QUOTA_TIERS
from prefixd.settings.field_types import Bytes, Count, Section, UserId, listed_numbers


class TenantSettings(Section):
    """`[tenants.NAME]`: who belongs to a tenant, and how much of the daemon it may have.

    Read again on SIGHUP. A tenant within what it is guaranteed of a tier loses no block there for another's sake.
    """

    uids: Annotated[tuple[UserId, ...], BeforeValidator(listed_numbers)] = ()
    """Users of this host, by id, who belong to it; let in at the unix socket, but not to the memory."""
    map_memory: bool = False
    """Whether these users may map the memory: whoever does can read and write all tenants' blocks."""
    certificates: tuple[str, ...] = ()
    """Names in client certificates (subject's common name, or a DNS or URI alternative name) that belong to it."""
    gpu_guaranteed: Bytes = 0
    """Bytes of the GPU tier below which none of its blocks goes for another tenant's sake."""
    gpu_most: Bytes | None = None
    """The most bytes of the GPU tier that its blocks may have. With more, after it was lowered, it loses its own blocks
    as it stores more."""
    cpu_guaranteed: Bytes = 0
    """As gpu_guaranteed, of the CPU tier."""
    cpu_most: Bytes | None = None
    """As gpu_most, of the CPU tier; its reservations count."""
    disk_guaranteed: Bytes = 0
    """As gpu_guaranteed, of the disk tier."""
    disk_most: Bytes | None = None
    """As gpu_most, of the disk tier."""
    sessions: Count | None = None
    """Sessions open at once."""
    grants: Count | None = None
    """Leases and reservations at once."""
    namespaces: Count | None = None
    """Namespaces (a model and a salt each) that are open in a session or have blocks."""
    waiting_requests: Count | None = None
    """Requests that wait in the queue."""
    requests_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Calls of Generate a second."""
    calls: Count | None = None
    """Calls under way at once; Generate, which has waiting_requests, and the streams of sessions do not count."""
    retained_bytes: Bytes | None = None
    """Bytes of blocks with a priority above 0, for which its clients may ask; without it, all tenants together may have
    half of this host's tiers."""

    @property
    def quota(self) -> Quota:
        """What of this is its quota."""
        return Quota(
            tiers=tuple(
                TierQuota(getattr(self, f"{tier}_guaranteed"), getattr(self, f"{tier}_most")) for tier in QUOTA_TIERS
            ),
            sessions=self.sessions,
            grants=self.grants,
            namespaces=self.namespaces,
            waiting_requests=self.waiting_requests,
            requests_per_s=self.requests_per_s,
            calls=self.calls,
            retained_bytes=self.retained_bytes,
        )
