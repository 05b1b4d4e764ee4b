"""Which file describes which release of vLLM."""

from __future__ import annotations

import pytest

from prefixd.errors import ConfigError
from prefixd.integrations.vllm.releases import file_of


@pytest.mark.parametrize(
    ("version", "file"),
    [("0.29.0", "v0_29"), ("0.30.1", "v0_30"), ("0.31.0+cpu", "v0_30"), ("0.32.0", "v0_32"), ("0.33.0rc1", "v0_32")],
)
def test_releases_that_it_was_tested_with(version: str, file: str, caplog: pytest.LogCaptureFixture) -> None:
    assert file_of(version) == file
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.1.dev1+gabcdef", "dev"])
def test_later_ones_are_taken_for_the_last(version: str, caplog: pytest.LogCaptureFixture) -> None:
    assert file_of(version) == "v0_32"
    (record,) = caplog.records
    assert version in record.getMessage() and "0.29 to 0.33" in record.getMessage()


def test_older_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"vLLM 0\.28\.0 is older .* install vLLM 0\.29 to 0\.33"):
        file_of("0.28.0")
