from __future__ import annotations

import pytest

from prefixd.base.errors import ConfigError
from prefixd.integrations.vllm.options import ConnectorOptions


def test_nothing_said_is_enough() -> None:
    options = ConnectorOptions.parse(None)
    assert options == ConnectorOptions.parse({})
    assert options.save and options.load == "async" and options.address is None


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"adress": "unix:/x"}, "no option 'adress'; there are address, save, timeout_s"),
        ({"timeout_s": 0}, "timeout_s = 0"),
        ({"block_tokens": "many"}, "block_tokens = 'many'"),
        ({"policy": "sjf"}, "policy = 'sjf'"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(extra: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as caught:
        ConnectorOptions.parse(extra)
    assert says in str(caught.value) and "\n" not in str(caught.value)
