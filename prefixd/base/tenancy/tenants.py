"""Tenants and their quotas.

A tenant is a customer, a team or an application. Each session, namespace (with its blocks) and request belongs to one
tenant, and no tenant reads, fills, cancels or sees those of another. Without settings all callers belong to the tenant
`default`, which has no quotas; the server's own limits apply.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prefixd.base.codec_names import CodecName
from prefixd.base.errors import ExhaustedError
from prefixd.base.tiers import QUOTA_TIERS

DEFAULT = "default"
"""The tenant of callers that no setting maps to another one."""
COMMON = "(common)"
"""The tenant of blocks that are common to all tenants; no caller can be mapped to it."""
LONGEST_NAME = 64
_NAMED = 4  # the most tenants that an error names, those with the largest guarantees
_NAME = re.compile(rf"[a-z0-9][a-z0-9_-]{{0,{LONGEST_NAME - 1}}}")


class Role(StrEnum):
    """A caller's rights: METRICS may use the metrics page; CLIENT PrefixCache and Inference; ADMIN everything."""

    METRICS = "metrics"
    CLIENT = "client"
    ADMIN = "admin"


def check_tenant_name(name: str) -> str:
    """Returns the name if it is valid, else raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:100]!r} is no name of a tenant; use 1 to {LONGEST_NAME} of a-z, 0-9, '_' and '-', beginning with "
            "a letter or a digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class TierQuota:
    """Bytes of a tier. A tenant within `guaranteed_bytes` loses no block to another tenant. None: no upper limit."""

    guaranteed_bytes: int = 0
    most_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that a tenant may have; None: as much as the server's own limits allow.

    Attributes:
        tiers: bytes of cached blocks and of reservations, by level.
        sessions: sessions open at once.
        grants: leases, reservations and claims at once, all sessions.
        namespaces: namespaces at once that are open in a session, or have blocks.
        waiting_requests: requests (sequences) that wait in the queue.
        requests_per_s: calls of Generate a second; as many may come at once as in one second.
        calls: calls under way at once, without the streams of sessions and Generate.
        retained_bytes: bytes of blocks with a priority above 0 (`cache/placement/retention.py` has the default).
    """

    tiers: tuple[TierQuota, ...] = (TierQuota(),) * len(QUOTA_TIERS)
    sessions: int | None = None
    grants: int | None = None
    namespaces: int | None = None
    waiting_requests: int | None = None
    requests_per_s: float | None = None
    calls: int | None = None
    retained_bytes: int | None = None


def check_guarantees(quotas: Mapping[str, Quota], tier: str, size: int, larger: str = "") -> None:
    """Raises ValueError if the tenants are guaranteed more bytes of a tier than its size.

    `larger`: text that says how to make the tier larger; by default, by its setting.
    """
    level = QUOTA_TIERS.index(tier)
    given = {name: nbytes for name, quota in quotas.items() if (nbytes := quota.tiers[level].guaranteed_bytes)}
    if (total := sum(given.values())) > size:
        largest = sorted(given.items(), key=lambda each: -each[1])
        named = ", ".join(f"{name} {nbytes}" for name, nbytes in largest[:_NAMED])
        more = f" and {len(largest) - _NAMED} more" if len(largest) > _NAMED else ""
        raise ValueError(
            f"tenants are guaranteed {total} bytes of the {tier} tier, which has {size} ({named}{more}); lower "
            f"tenants.*.{tier}_guaranteed or {larger or f'raise {tier}.bytes'}"
        )


@dataclass(eq=False, slots=True)
class Tenant:
    """One tenant.

    Attributes:
        name: the name in settings, tokens and `prefixd tenants`.
        ordinal: its number in this process, from 0 on; the default tenant is 0.
        quota: replaced when its settings change while the daemon runs.
        refused: number of refusals, by the limit's name.
        codec: how tiers store its blocks where the namespace does not say it; None: as the tier's setting says.
            Replaced as `quota`.
    """

    name: str
    ordinal: int
    quota: Quota = Quota()
    refused: Counter[str] = field(default_factory=Counter)
    codec: CodecName | None = None

    def refusal(self, limit: str, have: str, remedy: str, operator: str = "") -> ExhaustedError:
        """Counts a refusal by a limit of this tenant, and returns its error.

        Args:
            limit: a field of `Quota`, such as "sessions", or of a tier: "cpu_most".
            have: the tenant's use and its limit: "64 of 64 sessions are open".
            remedy: a remedy for the caller: "close one".
            operator: a remedy for the operator; by default: raise the limit.
        """
        self.refused[limit] += 1
        operator = operator or f"raise the limit (`prefixd tenants set {self.name}`)"
        return ExhaustedError(
            f"tenant {self.name}: {have} (limit tenants.{self.name}.{limit}); {remedy}, or have the operator {operator}"
        )

    def check(self, limit: str, have: int, things: str, remedy: str, more: int = 1) -> None:
        """Raises ExhaustedError if `have + more` is above a limit. `things` names them: "sessions are open"."""
        most: int | None = getattr(self.quota, limit)
        if most is not None and have + more > most:
            asked = "" if more == 1 else f", and {more} more are asked for"
            raise self.refusal(limit, f"{have} of {most} {things}{asked}", remedy)


class Tenants:
    """All tenants that this daemon knows: those of the settings, and those with restored blocks.

    A tenant that the settings no longer name stays, because it may have blocks, but has no guarantee.
    """

    def __init__(self, quotas: Mapping[str, Quota] | None = None) -> None:
        self._by_name: dict[str, Tenant] = {}
        self.all: list[Tenant] = []
        """By ordinal."""
        self._named: frozenset[str] = frozenset()
        self.calling = 0
        """Number of tenants that may send calls: the default tenant and those that the settings name; if they name
        none, all tenants except the owner of common blocks."""
        self.default = self.known(DEFAULT)
        self.set_quotas(quotas or {})

    def known(self, name: str) -> Tenant:
        """Returns the tenant of this name; makes one without quotas if there is none."""
        tenant = self._by_name.get(name)
        if tenant is None:
            tenant = self._by_name[name] = Tenant(name, len(self._by_name))
            self.all.append(tenant)
            self._count_calling()
        return tenant

    def at(self, ordinal: int) -> Tenant:
        """Returns the tenant with this ordinal."""
        return self.all[ordinal]

    def get(self, name: str) -> Tenant | None:
        """Returns the tenant of this name; None if there is none."""
        return self._by_name.get(name)

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Sets the quota of every tenant; tenants that `quotas` does not name have none from now on."""
        for tenant in self._by_name.values():
            tenant.quota = quotas.get(tenant.name, Quota())
        for name, quota in quotas.items():
            self.known(name).quota = quota
        named = frozenset(quotas) - {COMMON}
        self._named = named | {DEFAULT} if named else named
        self._count_calling()

    def set_codecs(self, codecs: Mapping[str, CodecName | None]) -> None:
        """Sets the codec of every tenant; tenants that `codecs` does not name have none from now on.

        It counts for blocks that are written from now on; others stay as they are.
        """
        for name in codecs:
            self.known(name)
        for tenant in self._by_name.values():
            tenant.codec = codecs.get(tenant.name)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self._by_name)

    def _count_calling(self) -> None:
        self.calling = len(self._named) or len(self._by_name) - (COMMON in self._by_name)
