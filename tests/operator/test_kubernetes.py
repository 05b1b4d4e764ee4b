"""The chart and the plain manifests: what Helm and Kubernetes' schemas say, and the DaemonSet's daemon as a process
under its limits, with two clients as pods of their own."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixd.settings import Settings
from prefixd.settings.checks import memory_needed
from tests.operator.pod import Container, MemoryGroup, Node, daemon_words
from tests.operator.programs import ROOT
from tests.remote.processes import free_port
from tests.waiting import wait_until

CHART = ROOT / "deploy/helm/prefixd"
FOLDER = ROOT / "deploy/kubernetes"
CLIENT = ROOT / "tests/client/version_client.py"
VERSIONS = ("1.31", "1.34", "1.37")
EVERYTHING: dict[str, Any] = {
    "engineUids": [1000, 2000],
    "hostPID": True,
    "image": {"pullSecrets": [{"name": "registry"}]},
    "metrics": {"tokensSecret": "prefixd-tokens", "serviceMonitor": {"enabled": True}},
    "tracing": {"endpoint": "http://collector:4317", "ratio": 0.25},
    "extraConfig": '[tenants.a]\nuids = [1000]\ncpu_most = "8GiB"\n',
    "nodeSelector": {"nvidia.com/gpu.present": "true"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-node-critical",
    "podAnnotations": {"a": "b"},
}

_spec = spec_from_file_location("render_prefixd", FOLDER / "render.py")
assert _spec is not None and _spec.loader is not None
render = module_from_spec(_spec)
_spec.loader.exec_module(render)


def manifests(values: dict[str, Any] | None = None) -> dict[str, Any]:
    """The chart's objects by kind."""
    pytest.importorskip("helm_python", reason="`make install-operator` brings helm-python-sdk from PyPI")
    return {each["kind"]: each for each in map(yaml.safe_load, render.render(values).values())}


def config(objects: dict[str, Any]) -> str:
    text: str = objects["ConfigMap"]["data"]["prefixd.toml"]
    return text


def settings_of(objects: dict[str, Any], folder: Path) -> Settings:
    file = folder / "prefixd.toml"
    file.write_text(config(objects))
    return Settings.load(file, environ={})


def gib(text: str) -> int:
    assert text.endswith("Gi")
    return int(text[:-2]) << 30


# -- what others say ---------------------------------------------------------------------------------------------------


def test_helm_finds_no_fault() -> None:
    helm = pytest.importorskip("helm_python", reason="`make install-operator` brings helm-python-sdk from PyPI")
    found = helm.lint(CHART)
    assert found["errors"] == []
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_kubernetes_takes_the_charts_objects(version: str, values: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="`make install-operator` brings it from PyPI").validate
    objects = manifests(values)
    monitor = objects.pop("ServiceMonitor", None)  # the Prometheus operator's, which Kubernetes' schemas do not have
    assert (monitor is not None) == bool(values)
    assert set(objects) == {"ConfigMap", "DaemonSet", "Service"}
    for each in objects.values():
        validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", ["prefixd.yaml", "vllm.yaml"])
def test_kubernetes_takes_the_plain_manifests(version: str, file: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="`make install-operator` brings it from PyPI").validate
    objects = list(yaml.safe_load_all((FOLDER / file).read_text()))
    assert objects
    for each in objects:
        validate(each, version, strict=True)


def test_the_plain_manifest_is_the_chart_with_its_defaults() -> None:
    manifests()
    assert (FOLDER / "prefixd.yaml").read_text() == render.plain(), "run deploy/kubernetes/render.py"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"cpuTier": {"gib": "16Gi"}}, "gib"),
        ({"cpuTeir": {"gib": 16}}, "cpuTeir"),
        ({"metrics": {"port": 80}}, "port"),
        ({"tracing": {"endpoint": "collector"}}, "endpoint"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(values: dict[str, Any], named: str) -> None:
    helm = pytest.importorskip("helm_python", reason="`make install-operator` brings helm-python-sdk from PyPI")
    with pytest.raises(helm.HelmError, match=named):
        render.render(values)


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_configuration_is_valid_and_fits_the_limit(values: dict[str, Any], tmp_path: Path) -> None:
    objects = manifests(values)
    settings = settings_of(objects, tmp_path)
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    needed, _ = memory_needed(settings)
    assert needed + (1 << 30) <= gib(container["resources"]["limits"]["memory"])
    assert settings.server.metrics is not None
    assert settings.server.metrics.endswith(f":{container['ports'][0]['containerPort']}")
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(settings.server.socket.parent), str(settings.data_dir), "/etc/prefixd"} <= mounts
    assert pod["terminationGracePeriodSeconds"] > settings.server.drain_timeout_s
    if values:
        assert settings.server.allow_uids == (1000, 2000) and settings.tracing.ratio == 0.25
        assert str(settings.server.tokens).startswith("/run/secrets/prefixd/") and "a" in settings.tenants


def test_engines_find_the_socket_that_the_chart_makes() -> None:
    socket = manifests()["DaemonSet"]["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"]
    vllm = yaml.safe_load((FOLDER / "vllm.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = vllm["containers"]
    (argument,) = (each for each in container["args"] if each.startswith("--kv-transfer-config="))
    connector = json.loads(argument.partition("=")[2])
    assert connector["kv_connector_extra_config"]["address"] == f"unix:{socket}/prefixd.sock"
    assert vllm["volumes"][0]["hostPath"]["path"] == socket == container["volumeMounts"][0]["mountPath"]


# -- as processes ------------------------------------------------------------------------------------------------------


class Pod:
    """The DaemonSet's pod on a node of this test."""

    def __init__(self, folder: Path, **values: Any) -> None:
        if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
            pytest.skip("containers need root, and unshare and setpriv of Debian's package util-linux")
        self.port = free_port()
        sizes = {"cpuTier": {"gib": 1}, "diskTier": {"gib": 1}, "metrics": {"port": self.port}}
        self.objects = manifests(sizes | values)
        self.spec = self.objects["DaemonSet"]["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.folder = folder
        self.node = Node(folder, config(self.objects))
        self.volumes = self.node.volumes(self.spec, self.container)
        (init,) = self.spec["initContainers"]
        log = folder / "init.log"
        assert Container(init, self.node.volumes(self.spec, init), init["command"], log).wait(60) == 0, log.read_text()
        self.group = MemoryGroup(gib(self.container["resources"]["limits"]["memory"]))
        self.daemon: Container | None = None

    def start(self) -> Container:
        log = self.folder / "daemon.log"
        self.daemon = Container(self.container, self.volumes, daemon_words(self.container), log, self.group)
        return self.daemon

    def probe(self, name: str) -> bool:
        """Whether a probe succeeds now."""
        get = self.container[f"{name}Probe"]["httpGet"]
        assert get["port"] == "metrics"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{get['path']}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait_until_ready(self) -> None:
        assert self.daemon is not None
        log, daemon = self.daemon.log, self.daemon
        wait_until(lambda: self.probe("startup") or not daemon.alive, log.read_text)
        assert daemon.alive, log.read_text()
        wait_until(lambda: self.probe("readiness"), log.read_text)
        assert self.probe("liveness")

    def client(self, action: str, name: str) -> dict[str, Any]:
        """What an engine's pod says that has nothing of the node but the folder of the socket."""
        vllm = yaml.safe_load((FOLDER / "vllm.yaml").read_text())["spec"]["template"]["spec"]
        (container,) = vllm["containers"]
        log = self.folder / f"{name}.log"
        words = [sys.executable, CLIENT, "unix:/run/prefixd/prefixd.sock", action, "shared"]
        pod = Container({}, self.node.volumes(vllm, container), words, log)
        assert pod.wait(60) == 0, log.read_text()
        said: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return said

    def close(self) -> None:
        if self.daemon is not None:
            self.daemon.kill()
        self.group.close()


@pytest.fixture
def node(folder: Path) -> Iterator[Path]:
    folder.chmod(0o755)
    yield folder


def test_pods_share_the_daemons_memory_within_its_limit(node: Path) -> None:
    pod = Pod(node)
    try:
        daemon = pod.start()
        pod.wait_until_ready()
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        assert "Uid:\t10001\t10001" in status and "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
        wait_until(lambda: pod.group.used_bytes > 1 << 30, "the CPU tier is not charged to the daemon")
        assert pod.client("store", "a")["done"] == [12, 12]
        assert pod.client("load", "b")["done"] == [[12, 12], 12, [12, 12], 12]
        daemon.terminate()
        assert daemon.wait(pod.spec["terminationGracePeriodSeconds"]) == 0, daemon.log.read_text()
        assert not pod.probe("readiness")
        pod.start()  # the next one has what the drain wrote to the node's disk
        pod.wait_until_ready()
        assert pod.client("load", "c")["done"] == [[12, 12], 12, [12, 12], 12]
    finally:
        pod.close()


def test_a_tier_above_the_limit_is_refused_with_the_name_of_the_limit(node: Path) -> None:
    pod = Pod(node, overheadGiB=1)
    try:
        file = node / "config/prefixd.toml"
        file.write_text(file.read_text().replace('bytes = "1GiB"', 'bytes = "3GiB"', 1))
        daemon = pod.start()
        assert daemon.wait(60) == 2
        assert "resources.limits.memory of Kubernetes" in daemon.log.read_text()
    finally:
        pod.close()
