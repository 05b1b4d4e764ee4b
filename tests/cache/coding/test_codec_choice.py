"""Who decides with which codec a block is stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.base.codec_names import CODEC_NAMES, LOSSY, CodecName
from prefixd.base.tenancy.tenants import COMMON, Tenants
from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.coding.codec_choice import codec_of
from prefixd_swap.codecs.registry import CODECS, find_codec


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
