"""Who decides with which codec a block is stored."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.base.codec_names import CODEC_NAMES, LOSSY, CodecName
from prefixd.base.errors import PreconditionError
from prefixd.base.tenancy.tenants import COMMON, Tenants
from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.coding import codec_choice
from prefixd.cache.coding.codec_choice import codec_of
from prefixd_swap.codecs.codec import Codec
from prefixd_swap.codecs.registry import CODECS, find_codec
from prefixd_swap.errors import UnavailableCodecError
from tests.rig import Rig


def spec_of(tenant: str, codec: str = "") -> NamespaceSpec:
    return NamespaceSpec("model", 16, (PartSpec("kv", 0, 4096),), tenant=tenant, codec=codec)


@pytest.mark.parametrize(
    ("namespace", "tenant", "tier", "chosen"),
    [
        ("", None, "exact", "exact"),
        ("", None, "int8", "int8"),
        ("", "lossless", "int8", "lossless"),
        ("", "k8v4", "exact", "k8v4"),
        ("exact", "k8v4", "int8", "exact"),
        ("int8", "exact", "lossless", "int8"),
    ],
)
def test_the_namespace_comes_before_the_tenant_and_the_tenant_before_the_tier(
    namespace: str, tenant: CodecName | None, tier: CodecName, chosen: CodecName
) -> None:
    tenants = Tenants()
    tenants.set_codecs({"acme": tenant, "other": "lossless"})
    assert codec_of(spec_of("acme", namespace), tenants, tier) == chosen


def test_other_settings_of_tenants_count_from_then_on() -> None:
    tenants = Tenants()
    tenants.set_codecs({"acme": "int8"})
    assert codec_of(spec_of("acme"), tenants, "exact") == "int8"
    tenants.set_codecs({"other": "k8v4"})
    assert codec_of(spec_of("acme"), tenants, "exact") == "exact"
    assert codec_of(spec_of("other"), tenants, "exact") == "k8v4"


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.none() | st.sampled_from(CODEC_NAMES)),
    st.sampled_from(CODEC_NAMES),
)
def test_what_is_common_to_all_loses_no_more_than_its_most_careful_owner_allows(
    codecs: dict[str, CodecName | None], tier: CodecName
) -> None:
    tenants = Tenants()
    tenants.set_codecs(codecs)
    common = codec_of(spec_of(COMMON), tenants, tier)
    each = [codec_of(spec_of(name), tenants, tier) for name in codecs]
    assert common in {tier, *codecs.values()}
    assert CODEC_NAMES.index(common) <= min(map(CODEC_NAMES.index, [tier, *each]))
    assert codec_of(spec_of(COMMON, "k8v4"), tenants, tier) == "k8v4", "all owners have asked for it"


def test_names_are_those_of_the_codecs_and_ordered_by_what_they_alter() -> None:
    assert tuple(CODECS) == CODEC_NAMES
    assert {name for name in CODEC_NAMES if find_codec(name).lossy} == LOSSY == frozenset(CODEC_NAMES[2:])


async def test_the_codec_of_a_new_namespace_is_imported_while_the_event_loop_goes_on(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, found = make_rig(), list[tuple[str, bool]]()

    def find(name: str) -> Codec:
        found.append((name, threading.current_thread() is threading.main_thread()))
        return find_codec(name)

    monkeypatch.setattr(codec_choice, "find_codec", find)
    session = rig.cache.leases.open("engine", 1, 0.0, rig.cache.tenants.default)
    for codec in ("", "exact", "lossless"):
        await rig.cache.open_namespace(session, spec_of("default", codec))
    assert found == [("lossless", False)]


async def test_a_codec_that_cannot_be_imported_is_refused_before_a_block_comes(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> Codec:
        raise UnavailableCodecError(f"codec {name}: a package is missing")

    monkeypatch.setattr(codec_choice, "find_codec", refuse)
    rig = make_rig()
    session = rig.cache.leases.open("engine", 1, 0.0, rig.cache.tenants.default)
    with pytest.raises(
        PreconditionError, match="'model': codec lossless: a package is missing; or register it without"
    ):
        await rig.cache.open_namespace(session, spec_of("default", "lossless"))
    assert not session.namespaces
