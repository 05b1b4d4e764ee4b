"""PrefixdConnector inside vLLM's MultiConnector: the same tokens, hits and metrics as alone, whatever is beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from benchmarks.engines.vllm_engine import EngineProcess
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.integrations.vllm.plugin import register
from tests.vllm.other_connectors import beside, multi
from tests.vllm.served import Expected, NewRequests, StartEngine, always, cacheable, run

LENGTHS = (700, 389, 512, 1000, 129)
OURS = "prefixd.integrations.vllm.FastestPrefixFirstScheduler"
NEUTRAL, SHAKING = beside("NeutralConnector"), beside("ShakingConnector")

pytestmark = pytest.mark.timeout(900)


def child(daemon: DaemonProcess, **options: Any) -> dict[str, Any]:
    """PrefixdConnector by its registered name. The failure policy is MultiConnector's."""
    config = always(daemon.address, **options)
    del config["kv_connector_module_path"], config["kv_load_failure_policy"]
    return config


def our_loads(engine: EngineProcess) -> int:
    """By the connector's own counter, which vLLM offers as a metric."""
    samples = engine.metrics().samples
    return int(sum(value for name, value in samples.items() if name.startswith("vllm:prefixd_loads")))


def test_vllm_finds_the_connector_by_its_name() -> None:
    (plugin,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "prefixd")
    for _ in range(2):
        plugin.load()()
    assert KVConnectorFactory.get_connector_class_by_name("PrefixdConnector").__name__ == "PrefixdConnector"


def test_a_release_whose_factory_is_elsewhere_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM guards a plugin's import, not its call."""
    monkeypatch.setattr(KVConnectorFactory, "register_connector", lambda name: None)
    register()
    monkeypatch.setitem(sys.modules, KVConnectorFactory.__module__, None)
    register()


@pytest.mark.parametrize(
    "children",
    [
        pytest.param(["ours"], id="alone"),
        pytest.param(["ours", NEUTRAL, SHAKING], id="first"),
        pytest.param([SHAKING, NEUTRAL, "ours"], id="last"),
    ],
)
def test_in_every_place(
    children: Sequence[Any],
    llama: Path,
    daemon: DaemonProcess,
    make_engine: StartEngine,
    expected: Expected,
    new_requests: NewRequests,
) -> None:
    ours = child(daemon, policy="lpm", starvation_bound_s=60.0)
    transfer = multi(*(ours if each == "ours" else each for each in children))
    requests = new_requests(*LENGTHS)
    with make_engine(llama, None, kv_transfer=transfer, scheduler_cls=OURS) as engine:
        cold, none = run(engine, requests)
        warm, hits = run(engine, requests)
        assert our_loads(engine) == len(LENGTHS)
        assert engine.metrics().cached_by_source["host"] == hits
    assert cold == warm == expected(requests)
    assert none == 0
    assert hits == cacheable(requests)
    log = engine.log.read_bytes()
    assert b"in the order of lpm" in log and b"there is no PrefixdConnector" not in log


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_beside_vllms_own_offloading(
    first: str,
    llama: Path,
    daemon: DaemonProcess,
    make_engine: StartEngine,
    expected: Expected,
    new_requests: NewRequests,
) -> None:
    """Where both have a prefix the first loads it. After a restart prefixd alone has it."""
    name = f"prefixd-multi-{uuid4().hex}"
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.vllm.cpu_offloading",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [],
        },
    }
    children = [child(daemon), offloading] if first == "ours" else [offloading, child(daemon)]
    requests = new_requests(*LENGTHS)
    with make_engine(llama, None, kv_transfer=multi(*children, engine_id=name)) as engine:
        cold, none = run(engine, requests)
        warm, _ = run(engine, requests)
        loads = our_loads(engine)
        assert loads == (len(LENGTHS) if first == "ours" else 0)
        engine.stop()
        engine.start()
        again, hits = run(engine, requests)
        assert our_loads(engine) == len(LENGTHS)
    assert cold == warm == again == expected(requests)
    assert none == 0
    assert hits == cacheable(requests)


def test_the_policy_that_counts_is_multi_connectors(
    llama: Path, daemon: DaemonProcess, make_engine: StartEngine
) -> None:
    transfer = multi(always(daemon.address), kv_load_failure_policy="fail")
    engine = make_engine(llama, None, kv_transfer=transfer)
    with pytest.raises(Exception, match="recompute"):
        engine.start()
