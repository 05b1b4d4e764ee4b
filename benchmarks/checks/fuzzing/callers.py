"""Who calls: hostile clients of every role and tenant, and what they show of themselves that is not theirs."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.checks.tenancy.house import House
from prefixd.base.tenancy.tenants import Role

Metadata = tuple[tuple[str, str | bytes], ...]

TENANTS = ("a", "b")
"""Those of the hostile clients that come over TCP."""
UNUSED = "unused"
"""A tenant without clients, whose quotas hostile operators change."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One hostile client.

    Attributes:
        address: where it connects.
        role: what it may use.
        shows: with every call, to be let in.
        operator: what an operator would show, to prepare and to tidy up.
        other: what a client of another tenant shows; None at the unix socket.
    """

    address: str
    role: Role = Role.ADMIN
    shows: Metadata = ()
    operator: Metadata = ()
    other: Metadata | None = None

    def wrong_credentials(self, rng: random.Random) -> Metadata:
        ticket, bearer = f"Ticket {rng.randbytes(48).hex()}", f"Bearer {rng.randbytes(16).hex()}"
        return rng.choice(
            (
                (("authorization", ticket),),
                (("authorization", bearer),),
                (("authorization", f"Basic {rng.randbytes(12).hex()}"),),
                (("authorization", "Ticket nothing of this is hexadecimal"),),
                (("authorization", rng.choice(("Bearer", "Ticket", ",", "Bearer  ")) + " x"),),
                (("authorization", ticket), ("authorization", bearer)),
                (*(self.shows or (("authorization", ""),)), ("authorization", bearer)),
                (*self.operator, *(("authorization", "") for _ in range(rng.choice((2, 40))))),
                (("authorization", "Bearer " + "a" * rng.choice((1_000, 7_000, 20_000, 300_000))),),
            )
        )


def callers(address: str, tcp: str, house: House) -> list[Caller]:
    """Half of them at the unix socket, where they are operators; the others over TCP, of two tenants and all roles."""
    first, second = TENANTS

    def remote(tenant: str, role: Role) -> Caller:
        other = second if tenant == first else first
        tokens = (house.token(tenant, role), house.token(tenant, Role.ADMIN), house.token(other))
        shows, operator, others = ((("authorization", f"Bearer {token}"),) for token in tokens)
        return Caller(tcp, role, shows, operator, others)

    over_tcp = [
        remote(first, Role.CLIENT),
        remote(second, Role.CLIENT),
        remote(second, Role.ADMIN),
        remote(first, Role.METRICS),
    ]
    return [each for caller in over_tcp for each in (Caller(address), caller)]
