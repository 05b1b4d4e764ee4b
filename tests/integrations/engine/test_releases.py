"""Which file describes which release of an engine."""

from __future__ import annotations

import pytest

from prefixd.base.errors import ConfigError
from prefixd.integrations.engine.releases import Releases
from prefixd.integrations.sglang.releases import RELEASES as SGLANG
from prefixd.integrations.vllm.releases import RELEASES as VLLM


@pytest.mark.parametrize(
    ("releases", "version", "file"),
    [
        (VLLM, "0.29.0", "v0_29"),
        (VLLM, "0.30.1", "v0_30"),
        (VLLM, "0.31.0+cpu", "v0_30"),
        (VLLM, "0.32.0", "v0_32"),
        (VLLM, "0.33.0rc1", "v0_32"),
        (SGLANG, "0.5.22", "v0_5_22"),
        (SGLANG, "0.5.23.post1", "v0_5_23"),
    ],
)
def test_releases_that_it_was_tested_with(
    releases: Releases, version: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert releases.file_of(version) == file
    assert not caplog.records


@pytest.mark.parametrize(
    ("releases", "version", "file"),
    [
        (VLLM, "0.34.0", "v0_32"),
        (VLLM, "1.0.0", "v0_32"),
        (VLLM, "0.1.dev1+gabcdef", "v0_32"),
        (VLLM, "dev", "v0_32"),
        (SGLANG, "0.5.24", "v0_5_23"),
        (SGLANG, "0.6.0", "v0_5_23"),
        (SGLANG, "0.0.0.dev1+gabcdef", "v0_5_23"),
        (SGLANG, "unknown", "v0_5_23"),
    ],
)
def test_later_ones_are_taken_for_the_last(
    releases: Releases, version: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert releases.file_of(version) == file
    (record,) = caplog.records
    assert version in record.getMessage() and releases.works_with in record.getMessage()


@pytest.mark.parametrize(
    ("releases", "version", "text"),
    [
        (VLLM, "0.28.0", r"vLLM 0\.28\.0 is older .* install vLLM 0\.29 to 0\.33, .* without --kv-transfer-config"),
        (SGLANG, "0.5.21", r"SGLang 0\.5\.21 is older .* install SGLang 0\.5\.22 or 0\.5\.23, .* --hicache-storage"),
    ],
)
def test_older_ones_are_refused(releases: Releases, version: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        releases.file_of(version)
