"""Where a setting comes from, and what is refused with which words."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from prefixd.base.errors import ConfigError
from prefixd.base.sizes import parse_size
from prefixd.settings import Settings, dotted_names, dotted_values
from prefixd.settings.checks import check_start
from prefixd_scheduler import POLICIES


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)


def refusal(overrides: dict[str, object], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        Settings.load(None, overrides, environ or {})
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_defaults_work_and_follow_the_xdg_directories(tmp_path: Path) -> None:
    settings = Settings.load(environ={})
    assert settings.data_dir == tmp_path / "prefixd"
    assert settings.server.socket == tmp_path / "prefixd" / "prefixd.sock"
    assert settings.disk_path == tmp_path / "prefixd" / "blocks"
    assert settings.scheduler.policy == "relaxed-fpf"
    check_start(settings)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container that runs as a user whom /etc/passwd does not name."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no home directory; set data_dir"):
        Settings.load(environ={})
    assert Settings.load(overrides={"data_dir": tmp_path}, environ={}).data_dir == tmp_path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[cpu]\nbytes = "1MiB"\npopulate = true\n[disk]\nbytes = 4096\n[cache]\nseed = 7\n')
    settings, sources = Settings.load_with_sources(
        file,
        {"cpu.bytes": "3MiB"},
        {"PREFIXD_CPU__BYTES": "2MiB", "PREFIXD_DISK__BYTES": "8192", "PREFIXD_SERVICE_HOST": "10.0.0.1"},
    )
    assert (settings.cpu.bytes, settings.disk.bytes, settings.cache.seed) == (3 << 20, 8192, 7)
    assert settings.cpu.populate
    assert sources == {
        "cpu.bytes": "the command line",
        "disk.bytes": "PREFIXD_DISK__BYTES",
        "cache.seed": str(file),
        "cpu.populate": str(file),
    }


def test_the_file_is_found_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "prefixd.toml").write_text('[scheduler]\npolicy = "fpf"\n')
    assert Settings.load(environ={}).scheduler.policy == "fpf"


def test_overrides_may_be_nested_and_environment_values_are_parsed() -> None:
    settings = Settings.load(
        None,
        {"worker": {"embedded": True}},
        {
            "PREFIXD_SCHEDULER__QUEUE_LIMIT": "9090",
            "PREFIXD_CACHE__ENABLED": "false",
            "PREFIXD_SERVER__TCP": "",
        },
    )
    assert settings.worker.enabled
    assert (settings.scheduler.queue_limit, settings.cache.enabled, settings.server.tcp) == (9090, False, None)


def test_every_policy_can_be_chosen() -> None:
    assert [Settings.load(None, {"scheduler.policy": name}, {}).scheduler.policy for name in POLICIES] == [*POLICIES]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("1.5 mib", 3 << 19),
        ("500MB", 500_000_000),
        ("0", 0),
        (12, 12),
        ("64Gi", 64 << 30),
        ("2 ki", 2048),
        ("1.2PB", 1_200_000_000_000_000),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "-1", "8 GiBs", "12QiB", "1e9", "GiB", "64G", "0.1", "0.0001KiB", -1, True, 1.5, None]
)
def test_sizes_that_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="8GiB"):
        parse_size(text)


SIZES = [
    name
    for name, value in dotted_values(Settings.load(None, {"tenants.a.sessions": 1}, {})).items()
    if "_bytes" in name or name.endswith((".bytes", "_most", "_guaranteed"))
]


@pytest.mark.parametrize("name", SIZES)
def test_a_size_without_its_unit_is_refused_everywhere(name: str) -> None:
    """`--disk-bytes 200` from a user who means GB: no setting of a size takes what holds nothing."""
    others = (
        {"worker.embedded": True}
        if name.startswith("gpu")
        else {"remote.url": "mooncake://h:1"}
        if name.startswith("remote")
        else {}
    )
    with pytest.raises(ConfigError, match=rf"{name} = '200'.*200 bytes.*200GiB"):
        Settings.load(None, {name: "200", **others}, {})
    with pytest.raises(ConfigError, match=name):
        Settings.load(None, {name: "64G", **others}, {})


def test_the_least_size_of_a_tier() -> None:
    for tier in ("cpu", "disk"):
        assert "write a unit" in refusal({f"{tier}.bytes": "4095"})
        assert getattr(Settings.load(None, {f"{tier}.bytes": "4KiB"}, {}), tier).bytes == 4096


def test_who_may_use_the_sockets() -> None:
    settings = Settings.load(None, {"server.allow_uids": "1001, 1002", "server.socket_mode": "660"}, {})
    assert (settings.server.allow_uids, settings.server.socket_mode) == ((1001, 1002), "0660")
    assert Settings.load(None, {"server.allow_uids": [7]}, {}).server.allow_uids == (7,)


def test_the_gpu_tier_exists_only_with_a_model() -> None:
    assert Settings.load(environ={}).gpu.bytes == 0
    assert Settings.load(None, {"worker.embedded": True}, {}).gpu.bytes == 256 << 20
    assert "worker.model" in refusal({"gpu.bytes": "1GiB"})
    assert "gpu.bytes = 0" in refusal({"gpu.bytes": 0, "worker.embedded": True})
    assert "worker.model" in refusal({"gpu.bytes": "auto"})
    assert Settings.load(None, {"worker.embedded": True, "gpu.bytes": "auto"}, {}).gpu.bytes == "auto"
    assert "8GiB" in refusal({"worker.embedded": True, "gpu.bytes": "automatic"})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"gpu.bytes": "1GiB", "gpu.least_bytes": "1MiB"}, ["gpu.bytes = 1073741824", "gpu.least_bytes = 1048576"]),
        (
            {"gpu.bytes": "auto", "gpu.most_bytes": "auto"},
            ["gpu.bytes = auto is a fixed size", "leave one of them out"],
        ),
        ({"gpu.least_bytes": "2MiB", "gpu.most_bytes": "1MiB"}, ["gpu.least_bytes = 2097152 is above", "1048576"]),
        ({"gpu.most_bytes": 0}, ["gpu.most_bytes = 0", "raise it"]),
        ({"gpu.reserve_bytes": "1GiB"}, ["gpu.reserve_bytes = 1073741824", "has a fixed size", "gpu.most_bytes"]),
        ({"gpu.idle_s": 9}, ["gpu.idle_s = 9.0", "has a fixed size"]),
        ({"gpu.most_bytes": "1GiB", "worker.kv": "paged"}, ["with worker.kv = paged it has a fixed size"]),
        ({"gpu.most_bytes": "1GiB", "worker.embedded": False}, ["gpu.most_bytes = 1073741824, but without a model"]),
    ],
)
def test_a_gpu_tier_has_one_size_or_grows(overrides: dict[str, object], words: list[str]) -> None:
    line = refusal({"worker.embedded": True, **overrides})
    assert all(word in line for word in words), line


def test_tenants_are_guaranteed_what_an_idle_tier_has(tmp_path: Path) -> None:
    file = tmp_path / "prefixd.toml"
    file.write_text('[tenants.a]\ngpu_guaranteed = "2MiB"\n')
    grows = {"worker.embedded": True, "gpu.most_bytes": "8MiB"}
    assert Settings.load(file, {**grows, "gpu.least_bytes": "2MiB"}, {}).gpu.elastic
    with pytest.raises(
        ConfigError, match=r"guaranteed 2097152 bytes of the gpu tier, which has 1048576 .* or raise gpu.l"
    ):
        Settings.load(file, {**grows, "gpu.least_bytes": "1MiB"}, {})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"cpu.bytes": "12QiB"}, ["cpu.bytes = '12QiB'", "8GiB", "the command line"]),
        ({"disk.bytes": "-1"}, ["disk.bytes = '-1'", "not below 0"]),
        ({"scheduler.policy": "lru"}, ["scheduler.policy = 'lru'", "'shortest-ready' or 'deadline'"]),
        ({"disk.io": "io_uring"}, ["disk.io = 'io_uring'", "use 'mmap', 'direct' or 'buffered'", "the command line"]),
        ({"cache.eviction": "mru"}, ["cache.eviction = 'mru'", "'s3-fifo' or 'weighing'"]),
        ({"scheduler.look_ahead": "-1"}, ["scheduler.look_ahead = '-1'", "0"]),
        ({"server.tcp": "localhost"}, ["server.tcp = 'localhost'", "host:port"]),
        ({"server.tcp": "localhost:99999"}, ["server.tcp = 'localhost:99999'", "host:port"]),
        (
            {"server.tcp": "0.0.0.0:7070"},
            ["server.tcp = 0.0.0.0:7070 has no TLS", "server.tls_cert", "server.insecure_tcp = true"],
        ),
        ({"server.tcp": "127.0.0.1:0", "server.tokens": "/t"}, ["server.tcp = 127.0.0.1:0 has no TLS"]),
        ({"server.tls_cert": "/c"}, ["server.tls_cert = /c needs server.tls_key too"]),
        ({"server.tls_key": "/k"}, ["server.tls_key = /k needs server.tls_cert too"]),
        ({"server.tls_client_ca": "/a"}, ["server.tls_client_ca = /a needs server.tls_cert too"]),
        (
            {"server.tcp": "a:1", "server.insecure_tcp": "1", "server.tls_cert": "/c", "server.tls_key": "/k"},
            ["server.insecure_tcp = true and server.tls_cert = /c", "keep one"],
        ),
        ({"events.endpoint": "localhost:5557"}, ["events.endpoint = 'localhost:5557'", "tcp://host:port"]),
        ({"events.replay_endpoint": "ipc:///r"}, ["events.replay_endpoint = ipc:///r needs events.endpoint too"]),
        ({"events.connect": "true"}, ["events.connect = true needs events.endpoint too"]),
        (
            {"events.endpoint": "tcp://*:5557", "events.replay_endpoint": "tcp://*:5557"},
            ["events.endpoint and events.replay_endpoint are both tcp://*:5557", "choose two"],
        ),
        ({"events.topic": "kv@host@{model}"}, ["events.topic = 'kv@host@{model}'", "{namespace}"]),
        ({"events.namespaces": "llama"}, ["TENANT/NAME", "default/*"]),
        ({"events.namespaces": "Team A/*"}, ["'Team A' is no name of a tenant"]),
        (
            {"events.endpoint": "tcp://*:5557", "events.namespaces": "default/*,alice/*"},
            ["events.namespaces names the tenants alice, default", "put {tenant} into the topic"],
        ),
        ({"server.socket_mode": "0777"}, ["server.socket_mode = '0777'", '"0660"']),
        ({"server.socket_mode": "0060"}, ["server.socket_mode = '0060'"]),
        ({"server.socket_mode": 432}, ["server.socket_mode = '432'", "octal string"]),
        ({"server.allow_uids": "1001,-1"}, ["server.allow_uids"]),
        ({"server.allow_uids": "root"}, ["server.allow_uids"]),
        ({"server.allow_uids": 1001}, ["server.allow_uids = '1001'", "write a list such as [1001]"]),
        (
            {"server.admin_certificates": ["ops"]},
            ["server.admin_certificates names certificates", "set server.tls_client_ca too, or leave"],
        ),
        ({"server.socket": "/" + "s" * 100}, ["at most 100 bytes", "101"]),
        ({"server.lease_ttl_s": "nan"}, ["server.lease_ttl_s = 'nan'"]),
        ({"server.lease_ttl_s": 7200}, ["server.lease_ttl_s = 7200", "server.max_lease_ttl_s = 3600"]),
        ({"gpu.device": "tpu"}, ["gpu.device = 'tpu'", "cuda:N"]),
        ({"worker.model": "/models/x", "worker.embedded": True}, ["/models/x", "keep one"]),
        (
            {"scheduler.policy": "fcfs", "scheduler.starvation_bound_s": 5},
            ["starvation_bound_s = 5", "starves no"],
        ),
        ({"worker.max_step_tokens": 8}, ["worker.max_step_tokens = 8", "worker.block_tokens = 16"]),
        ({"worker.page_order": "jenga"}, ['worker.page_order = "jenga"', 'set worker.kv = "paged"']),
        ({"worker.draft_model": "/models/x"}, ["worker.draft_model = /models/x", "set worker.model too"]),
        (
            {"worker.embedded": True, "worker.draft_model": "/models/x", "worker.kv": "paged"},
            ["worker.draft_model = /models/x", 'needs worker.kv = "virtual", not "paged"'],
        ),
        (
            {"worker.embedded": True, "worker.draft_model": "/models/x", "worker.layout": "layer"},
            ['needs worker.layout = "token", not "layer"'],
        ),
        (
            {"worker.embedded": True, "worker.attention": "split", "worker.attention_costs": "/costs.json"},
            ["worker.attention_costs = /costs.json", 'worker.attention = "auto", not "split"'],
        ),
        (
            {"worker.embedded": True, "worker.attention": "extents", "worker.kv": "paged", "worker.layout": "layer"},
            ['worker.attention = "extents"', 'not "paged" and "layer"', "triton"],
        ),
        (
            {"worker.embedded": True, "worker.attention": "split", "worker.kv": "paged"},
            ['worker.attention = "split"', 'worker.kv is "paged"'],
        ),
        ({"worker.draft_tokens": 65}, ["worker.draft_tokens = '65'", "64"]),
        ({"cpu.byte": 1}, ["no setting cpu.byte", "did you mean cpu.bytes?"]),
        ({"worker.feature_bytes": 1}, ["images' embeddings lie in the tiers now", "remove it", "keep_embeddings"]),
        ({"cpu": 1}, ["cpu is a section", "cpu.bytes"]),
        ({"cpu.bytes": "x", "disk.bytes": "y"}, ["and 1 more"]),
    ],
)
def test_what_is_refused_names_the_value_and_the_remedy(overrides: dict[str, object], words: list[str]) -> None:
    line = refusal(overrides)
    for word in words:
        assert word in line


def test_misspelt_variables_are_refused() -> None:
    assert "PREFIXD_CPU__BYTES" in refusal({}, {"PREFIXD_CPU_BYTES": "1GiB"})
    assert "did you mean cpu.bytes?" in refusal({}, {"PREFIXD_CPU__BITES": "1GiB"})


def test_broken_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    with pytest.raises(ConfigError, match=r"my\.toml: No such file"):
        Settings.load(file, environ={})
    file.write_text("[cpu\n")
    with pytest.raises(ConfigError, match=r"my\.toml is not valid TOML"):
        Settings.load(file, environ={})
    file.write_text("[cpu]\nsize = 1\n")
    with pytest.raises(ConfigError, match=r"cpu\.size \(set by .*my\.toml\)"):
        Settings.load(file, environ={})


@pytest.mark.parametrize("name", ["data_dir", "disk.path"])
def test_a_directory_that_is_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings.load(None, {name: tmp_path / "file" / "below"}, {})
    with pytest.raises(ConfigError, match=rf"{name} = .*file is not a directory"):
        check_start(settings)


def test_a_directory_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The superuser may write everywhere, so the answer is given here.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"data_dir = .*cannot be written to"):
        check_start(Settings.load(None, {"data_dir": tmp_path / "data"}, {}))


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        check_start(Settings.load(None, {"worker.model": tmp_path / "llama"}, {}))
    (tmp_path / "llama").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_start(Settings.load(None, {"worker.model": tmp_path / "llama"}, {}))
    draft = {"worker.embedded": True, "worker.draft_model": tmp_path / "llama"}
    with pytest.raises(ConfigError, match=r"worker\.draft_model = .* has no config\.json"):
        check_start(Settings.load(None, draft, {}))


@pytest.mark.parametrize(
    "name", ["disk.codec", "remote.codec", "tenants.acme.codec"], ids=lambda name: name.partition(".")[0]
)
def test_a_codec_without_its_packages_is_refused_by_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store = {"remote.url": "valkey://h:1", "remote.secret_file": tmp_path / "s"} if name == "remote.codec" else {}
    settings = {codec: Settings.load(None, {name: codec, **store}, {}) for codec in ("exact", "int8")}
    check_start(settings["int8"])
    monkeypatch.setitem(sys.modules, "numba", None)
    check_start(settings["exact"])
    with pytest.raises(ConfigError) as refused:
        check_start(settings["int8"])
    assert str(refused.value) == f"{name} = int8: the package numba is missing; pip install 'prefixd[codecs]'"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"disk.codec": "zip"}, "disk.codec"),
        ({"tenants.acme.codec": "fp8"}, "tenants.acme.codec"),
        ({"disk.codec_error": 0}, "disk.codec_error"),
        ({"disk.codec_error": "nan"}, "disk.codec_error"),
        ({"disk.codec_error": 1.5}, "disk.codec_error"),
        ({"remote.codec": "int8"}, "remote.codec is set, but remote.url is not"),
    ],
    ids=str,
)
def test_a_codec_that_does_not_exist_or_may_err_by_anything_is_refused(values: dict[str, object], says: str) -> None:
    assert says in refusal(values)


def test_codecs_are_exact_until_somebody_says_otherwise() -> None:
    settings = Settings.load(None, {"tenants.acme.sessions": 1, "tenants.other.codec": "lossless"}, {})
    assert (settings.disk.codec, settings.disk.codec_error, settings.remote.codec) == ("exact", None, "exact")
    assert settings.codecs == {"acme": None, "other": "lossless"}


def test_a_socket_path_that_is_taken_by_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("")
    settings = Settings.load(None, {"server.socket": path}, {})
    with pytest.raises(ConfigError, match="is not a socket"):
        check_start(settings)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    check_start(settings)


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cpu\.bytes = \d+: this machine has \d+ bytes"):
        check_start(Settings.load(None, {"cpu.bytes": "1000TiB"}, {}))


def test_every_setting_is_described_and_shown() -> None:
    descriptions = dotted_names()
    values = dotted_values(Settings.load(None, {"tenants.name.uids": "7"}, environ={}))
    assert [name.replace("tenants.name", "tenants.NAME") for name in values] == list(descriptions)
    assert [name for name, text in descriptions.items() if not text] == []


def test_tenants_are_sections_with_names() -> None:
    settings, sources = Settings.load_with_sources(
        None, {"tenants.acme.cpu_guaranteed": "1MiB", "tenants.acme.uids": "1001,1002", "tenants.b-2.sessions": 3}, {}
    )
    acme = settings.tenants["acme"]
    assert (acme.cpu_guaranteed, acme.uids, settings.tenants["b-2"].sessions) == (1 << 20, (1001, 1002), 3)
    assert settings.quotas["acme"].tiers[1].guaranteed_bytes == 1 << 20
    assert sources["tenants.acme.uids"] == "the command line"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"tenants.acme.cpu_guarantee": "1"}, ["no setting tenants.acme.cpu_guarantee"]),
        ({"tenants.Acme.sessions": "1"}, ["'Acme' is no name of a tenant", "a-z"]),
        ({"tenants.a.sessions": "0"}, ["tenants.a.sessions = '0'"]),
        ({"tenants.a.cpu_guaranteed": "2GiB"}, ["guaranteed 2147483648 bytes of the cpu tier, which has 1073741824"]),
        (
            {
                f"tenants.{name}.disk_guaranteed": f"{size}GiB"
                for name, size in zip("abcdef", (1, 4, 0, 2, 3, 1), strict=True)
            },
            [f"which has {8 << 30} (b {4 << 30}, e {3 << 30}, d {2 << 30}, a {1 << 30} and 1 more)"],
        ),
        (
            {"tenants.a.gpu_guaranteed": "1MiB", "tenants.a.gpu_most": "1MiB"},
            ["of the gpu tier, which has 0 (a 1048576); lower", "set worker.model: without it there is no GPU tier"],
        ),
        (
            {"tenants.acme.cpu_guaranteed": "8KiB", "tenants.acme.cpu_most": "4KiB"},
            ["tenants.acme.cpu_guaranteed = 8192 is above tenants.acme.cpu_most = 4096"],
        ),
        ({"tenants.a.uids": 11001}, ["tenants.a.uids = '11001'", "write a list such as [11001]"]),
        ({"tenants.a.map_memory": "true"}, ["tenants.a.map_memory = true", "tenants.a.uids", "leave map_memory out"]),
        ({"tenants.a.certificates": ["x"]}, ["tenants.a.certificates names", "set server.tls_client_ca too"]),
        ({"tenants.a.uids": "7", "tenants.b.uids": "7"}, ["tenants.b.uids has 7, which tenants.a has, too"]),
    ],
)
def test_a_tenant_that_cannot_be_is_refused(overrides: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.load(None, overrides, {})
    for word in words:
        assert word in str(caught.value)
