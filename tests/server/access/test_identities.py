"""Who is who: users of this host, tickets, tokens and certificates."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefixd.base.tenancy.tenants import COMMON, Quota, Role, Tenants
from prefixd.server.access.identities import Identities, UnknownCallerError
from prefixd.server.access.local_credentials import GOOD_FOR_S, LocalCredentials, LocalProcess
from prefixd.server.access.token_file import TokenFile
from prefixd.settings import Settings

BOOT = b"this boot"
ME = os.geteuid()
ACME, OTHERS, OPERATOR = 64_001, 64_002, 64_003


class Clock:
    """Seconds since the host was started, as a test says."""

    def __init__(self) -> None:
        self.now_s = 5000.0

    def __call__(self) -> float:
        return self.now_s


def made(settings: dict[str, object], tokens: TokenFile | None = None) -> tuple[Identities, LocalCredentials, Clock]:
    clock = Clock()
    tickets = LocalCredentials(clock, BOOT)
    known = Settings.load(None, settings, {})
    return Identities(known.server, known.tenants, Tenants(known.quotas), tokens, tickets), tickets, clock


def ticket(tickets: LocalCredentials, uid: int) -> str:
    return f"Ticket {tickets.issue(LocalProcess(uid, 7))}"


def test_users_are_operators_of_a_tenant_or_of_the_default_one() -> None:
    identities, tickets, _ = made(
        {"tenants.acme.uids": str(ACME), "server.allow_uids": str(OTHERS), "server.admin_uids": str(OPERATOR)}
    )
    expected = {
        0: ("default", Role.ADMIN),
        ME: ("default", Role.ADMIN),
        OPERATOR: ("default", Role.ADMIN),
        ACME: ("acme", Role.CLIENT),
        OTHERS: ("default", Role.CLIENT),
        64_004: ("default", Role.CLIENT),
    }
    for uid, (tenant, role) in expected.items():
        caller = identities.of_local(ticket(tickets, uid))
        assert (caller.tenant.name, caller.role, caller.pid, caller.name) == (tenant, role, 7, f"uid {uid}")


def test_without_a_ticket_only_where_nobody_else_gets_in_is_one_the_operator() -> None:
    assert made({})[0].of_local("").role is Role.ADMIN
    for others in (
        {"server.socket_mode": "0660"},
        {"server.socket_mode": "0606"},
        {"server.allow_uids": str(OTHERS)},
        {"server.admin_uids": str(OPERATOR)},
    ):
        caller = made(others)[0].of_local("")
        assert (caller.role, caller.tenant.name) == (Role.CLIENT, "default")
    with pytest.raises(UnknownCallerError, match="no ticket: users of this host belong to tenants"):
        made({"tenants.acme.uids": str(ACME)})[0].of_local("")  # else a tenant's user would evade its quotas


def test_who_may_still_be_connected_is_not_the_operator() -> None:
    for others in (
        {"server.allow_uids": str(OTHERS)},
        {"tenants.acme.uids": str(ACME)},
        {"server.socket_mode": "0660"},
    ):
        identities, _, _ = made(others)  # type: ignore[arg-type]
        alone = Settings.load(None, {}, {})
        identities.update(alone.server, alone.tenants)
        assert identities.of_local("").role is Role.CLIENT


def test_a_ticket_is_good_for_a_day_and_from_this_daemon_alone(tmp_path: Path) -> None:
    identities, tickets, clock = made({})
    given = ticket(tickets, ACME)
    clock.now_s += GOOD_FOR_S - 1
    assert identities.of_local(given).name == f"uid {ACME}"
    clock.now_s += 2
    altered = ticket(tickets, ACME).replace("Ticket 01fa", "Ticket 00fa")
    assert altered != ticket(tickets, ACME)
    for wrong in (
        given,
        altered,
        ticket(LocalCredentials(clock, BOOT), 0),
        "Ticket",
        "Ticket zz",
        f"Bearer {given[7:]}",
        "x" * 1000,
    ):
        with pytest.raises(UnknownCallerError, match="none of this daemon's tickets"):
            identities.of_local(wrong)
    first, second, third = (
        LocalCredentials(clock, BOOT),
        LocalCredentials(clock, BOOT),
        LocalCredentials(clock, b"another boot"),
    )
    for each in (first, second, third):
        each.load_key(tmp_path)
    issued = first.issue(LocalProcess(5, 6))
    assert second.read(issued) == LocalProcess(5, 6)  # also after a restart
    assert third.read(issued) is None, "the host has counted its seconds anew since"
    clock.now_s -= 1
    assert first.read(issued) is None, "of a time that is yet to come"
    assert (tmp_path / "ticket.key").stat().st_mode & 0o077 == 0


def test_memory_goes_to_operators_and_to_whom_settings_name() -> None:
    identities, _, _ = made(
        {
            "tenants.acme.uids": str(ACME),
            "tenants.acme.map_memory": "true",
            "tenants.b.uids": "64009",
            "server.allow_uids": str(OTHERS),
        }
    )
    mapping = [uid for uid in (0, ME, ACME, OTHERS, 64_009, OPERATOR) if identities.may_map(uid)]
    assert mapping == [0, ME, ACME, OTHERS]


async def test_tokens_name_a_tenant_and_a_role(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    lines = ("engine client eeeeeeeeeeeeeeee acme", "scraper metrics mmmmmmmmmmmmmmmm", "op admin oooooooooooooooo")
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    tokens = TokenFile(path)
    await tokens.load()
    identities, _, _ = made({}, tokens)
    for secret, name, tenant, role in (
        ("e", "engine", "acme", Role.CLIENT),
        ("m", "scraper", "default", Role.METRICS),
        ("o", "op", "default", Role.ADMIN),
    ):
        caller = identities.of_token(f"Bearer {secret * 16}")
        assert (caller.name, caller.tenant.name, caller.role, caller.door) == (name, tenant, role, "tcp")
    with pytest.raises(UnknownCallerError):
        identities.of_certificate(())
    assert identities.has_tokens and not made({})[0].has_tokens
    tokens.close()


def test_certificates_name_a_tenant_or_an_operator() -> None:
    settings: dict[str, object] = {"tenants.acme.certificates": ["engine.acme"], "server.admin_certificates": ["ops"]}
    settings["server.metrics_certificates"] = ["prometheus"]
    settings |= {f"server.{name}": "/file.pem" for name in ("tls_client_ca", "tls_cert", "tls_key")}
    identities, _, _ = made(settings)
    found = [
        identities.of_certificate(names)
        for names in (["x", "engine.acme"], ["engine.acme", "ops"], ["prometheus"], ["x"], [])
    ]
    assert [(caller.tenant.name, caller.role, caller.name) for caller in found] == [
        ("acme", Role.CLIENT, "engine.acme"),
        ("default", Role.ADMIN, "ops"),
        ("default", Role.METRICS, "prometheus"),
        ("default", Role.CLIENT, "x"),
        ("default", Role.CLIENT, "anybody"),
    ]


def test_another_settings_file_is_used_at_once() -> None:
    identities, tickets, _ = made({"tenants.acme.uids": str(ACME)})
    fresh = Settings.load(None, {"tenants.b.uids": str(ACME)}, {})
    identities.update(fresh.server, fresh.tenants)
    assert identities.of_local(ticket(tickets, ACME)).tenant.name == "b"


async def test_a_token_of_a_tenant_that_the_settings_do_not_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(f"a client {'a' * 32} acme\nb client {'b' * 32} acne\nc client {'c' * 32}\n")
    tokens = TokenFile(file)
    try:
        await tokens.load()
        identities, _, _ = made({"tenants.acme.sessions": 3}, tokens)
        assert identities.of_token(f"Bearer {'a' * 32}").tenant.name == "acme"
        assert identities.of_token(f"Bearer {'c' * 32}").tenant.name == "default"
        with pytest.raises(UnknownCallerError, match=r"the token b is of tenant acne, .* add \[tenants\.acne\]"):
            identities.of_token(f"Bearer {'b' * 32}")
        assert made({}, tokens)[0].of_token(f"Bearer {'b' * 32}").tenant.name == "acne", "where there are no quotas"
    finally:
        tokens.close()


def test_tenants_that_settings_no_longer_name_do_not_count() -> None:
    """Limits that tenants share are divided by as many as may call."""
    tenants = Tenants({f"old{number}": Quota() for number in range(8)})
    assert (len(tenants), tenants.calling) == (9, 9)
    tenants.set_quotas({"acme": Quota()})
    assert (len(tenants), tenants.calling) == (10, 2), "acme and the default one"
    tenants.set_quotas({})
    assert tenants.calling == 10, "tokens of any may call"
    tenants.known(COMMON)
    assert tenants.calling == 10
