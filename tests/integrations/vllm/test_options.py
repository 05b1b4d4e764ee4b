from __future__ import annotations

import logging

import pytest

from prefixd.base.errors import ConfigError
from prefixd.client import PartShape
from prefixd.integrations.engine.options import codec_for
from prefixd.integrations.vllm.options import ConnectorOptions


def test_nothing_said_is_enough() -> None:
    options = ConnectorOptions.parse(None)
    assert options == ConnectorOptions.parse({})
    assert options.codec_on_device is None
    assert options.save and options.load == "async" and options.address is None


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"adress": "unix:/x"}, "no option 'adress'; there are address, save, timeout_s"),
        ({"timeout_s": 0}, "timeout_s = 0"),
        ({"block_tokens": "many"}, "block_tokens = 'many'"),
        ({"policy": "sjf"}, "policy = 'sjf'"),
        ({"codec": "fp8"}, "codec = 'fp8'"),
        ({"codec_on_device": "k8v4"}, "codec_on_device = 'k8v4'"),
        (
            {"codec_on_device": "int8", "codec": "exact"},
            "codec = exact and codec_on_device = int8 would code blocks twice",
        ),
        ({"codec_on_device": "int8", "load": "layerwise"}, 'use load = "async"'),
    ],
)
def test_a_wrong_option_is_named_with_its_value(extra: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as caught:
        ConnectorOptions.parse(extra)
    assert says in str(caught.value) and "\n" not in str(caught.value)


SHAPE = PartShape("bfloat16", 2, 16, 4, 8, ("layer", "token", "head", "kv", "channel"))


def test_a_lossy_codec_without_any_shape_becomes_lossless_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("prefixd.test")
    asked = ConnectorOptions.parse({"codec": "int8"}).codec
    assert codec_for(asked, [None, SHAPE], log) == "int8" and codec_for("exact", [None], log) == "exact"
    assert codec_for(ConnectorOptions.parse({}).codec, [], log) == "" and not caplog.records
    assert codec_for(asked, [None, None], log) == codec_for("k8v4", (), log) == "lossless"
    assert "codec = int8: how keys and values lie in this engine's pages is not known" in caplog.text
