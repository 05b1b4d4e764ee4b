"""The settings of a tenant, `[tenants.NAME]`: its users and certificates, and its quotas."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from prefixd.base.codec_names import CodecName
from prefixd.base.tenancy.tenants import Quota, TierQuota
from prefixd.base.tiers import QUOTA_TIERS
from prefixd.settings.field_types import AbsolutePath, Bytes, Count, Section, UserId, listed_numbers


class TenantSettings(Section):
    """`[tenants.NAME]`: the users and certificates of a tenant, and its quotas.

    The daemon reads it again on SIGHUP. A tenant that has no more of a tier than it is guaranteed loses no block there
    to another tenant.
    """

    uids: Annotated[tuple[UserId, ...], BeforeValidator(listed_numbers)] = ()
    """User ids of this host that belong to the tenant. They may use the unix socket, but not map the memory."""
    map_memory: bool = False
    """Let the users in `uids` map the memory: they can then read and write all tenants' blocks."""
    certificates: tuple[str, ...] = ()
    """Client certificates that belong to the tenant, by name (subject's common name, or a DNS or URI alternative name).
    """
    gpu_guaranteed: Bytes = 0
    """Bytes of the GPU tier that the tenant is guaranteed: while its blocks have no more, none of them is evicted for
    another tenant."""
    gpu_most: Bytes | None = None
    """The most bytes of the GPU tier that the tenant's blocks may have. If they have more, since the limit was lowered,
    the tenant loses its own blocks as it stores more."""
    cpu_guaranteed: Bytes = 0
    """As gpu_guaranteed, of the CPU tier."""
    cpu_most: Bytes | None = None
    """As gpu_most, of the CPU tier; the tenant's reservations count too."""
    disk_guaranteed: Bytes = 0
    """As gpu_guaranteed, of the disk tier."""
    disk_most: Bytes | None = None
    """As gpu_most, of the disk tier."""
    sessions: Count | None = None
    """The most sessions open at once."""
    grants: Count | None = None
    """The most leases, reservations and claims at once."""
    namespaces: Count | None = None
    """The most namespaces (a model and a salt each) that are open in a session or have blocks."""
    waiting_requests: Count | None = None
    """The most requests that wait in the queue."""
    requests_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The most calls of Generate a second."""
    calls: Count | None = None
    """The most calls under way at once. Calls of Generate, which waiting_requests limits, and the streams of sessions
    do not count."""
    retained_bytes: Bytes | None = None
    """The most bytes of blocks to which the tenant's clients may give a priority above 0. Without it, all tenants
    together may have half of this host's tiers."""
    encryption_key_file: AbsolutePath | None = None
    """File with keys, as disk.encryption_key_file, that encrypt this tenant's blocks on disk instead of those."""
    codec: CodecName | None = None
    """How the disk and the shared store keep the tenant's blocks, instead of disk.codec and remote.codec. A namespace
    whose client names a codec has that one. A change counts for blocks that are written from then on; those that have
    lost precision by then stay so until they leave. By default as the tier's setting says."""

    @property
    def quota(self) -> Quota:
        """The quota part of these settings."""
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
