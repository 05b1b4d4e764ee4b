"""What deploy/ and the pages say to configure is what a daemon takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixd.settings import Settings

ROOT = Path(__file__).parents[2]


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    return content


def load(text: str, folder: Path) -> Settings:
    file = folder / "prefixd.toml"
    file.write_text(text)
    return Settings.load(file, environ={})


def test_the_sidecars_configuration_is_valid() -> None:
    assert Settings.load(ROOT / "deploy/prefixd.toml", environ={}).disk.bytes == 1 << 40


def test_the_sidecar_has_no_open_port_and_its_examples_are_valid(tmp_path: Path) -> None:
    text = (ROOT / "deploy/prefixd.toml").read_text()
    shipped, all_of_it = load(text, tmp_path), load(re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE), tmp_path)
    assert shipped.server.metrics is None and shipped.server.tcp is None and not shipped.tenants
    assert all_of_it.server.metrics == "127.0.0.1:9470" and all_of_it.server.tokens is not None
    assert all_of_it.tenants["example"].uids == (1001,) and all_of_it.quotas["example"].calls == 256
    assert compose()["configs"]["daemon"]["content"].count("port") == 0


def test_the_unit_reads_its_settings_again_when_told() -> None:
    unit = (ROOT / "deploy/prefixd.service").read_text()
    assert re.search(r"^ExecReload=\S*kill -HUP \$MAINPID$", unit, re.MULTILINE)


def test_the_composed_daemons_share_a_store_and_nothing_else(tmp_path: Path) -> None:
    content = compose()
    settings = load(content["configs"]["daemon"]["content"], tmp_path)
    assert settings.remote.url == "valkey://valkey:6379"
    services = content["services"]
    assert set(services) == {"valkey", "first", "second"}
    files = {f"/run/secrets/{name}" for name in services["first"]["secrets"]}
    assert {str(settings.remote.secret_file), str(settings.remote.password_file)} == files
    assert services["first"]["volumes"] != services["second"]["volumes"]
    assert all(str(settings.data_dir).startswith(each["volumes"][0].split(":")[1]) for each in (services["first"],))
    assert set(content["secrets"]) == {"prefixd", "valkey"}
    assert all("file" in each for each in content["secrets"].values()), "no secret in the file itself"


def _examples(page: Path) -> list[str]:
    return re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("text", [text for page in sorted((ROOT / "docs").rglob("*.md")) for text in _examples(page)])
def test_the_pages_examples_are_valid(text: str, tmp_path: Path) -> None:
    settings = load(text, tmp_path)
    assert settings.remote.url or settings.tenants or settings.events.endpoint or settings.disk.model_fields_set


def test_there_is_an_example_for_each_store() -> None:
    examples = _examples(ROOT / "docs/remote.md")
    stores = {re.search(r'url = "(\w+)://', text)[1] for text in examples}  # type: ignore[index]
    assert stores == {"valkey", "s3", "mooncake"}
