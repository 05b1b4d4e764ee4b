"""`pip install 'prefixd[daemon]'`: a daemon beside engines, in an environment without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.install.environments import Environment

pytestmark = pytest.mark.slow

CLIENT = Path(__file__).parents[1] / "client" / "version_client.py"


def test_what_it_has_stored_it_serves_after_a_restart(client: Environment, sidecar: Environment) -> None:
    settings = {"cpu.bytes": "4MiB", "disk.bytes": "16MiB"}
    # -P: not the version of the folder that the tests run in.
    program = ("-P", "-m", "prefixd.cli.tethered")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        daemon = DaemonProcess(settings, python=sidecar.python, program=program)
        with daemon:
            for action, done in (("store", [12, 12]), ("load", [[12, 12], 12, [12, 12], 12])):
                ended = client.run("python", CLIENT, daemon.address, action, "shared")
                assert ended.returncode == 0, ended.stderr
                assert json.loads(ended.stdout)["done"] == done
                daemon.restart()
            assert str(sidecar.folder) in Path(f"/proc/{daemon.pid}/maps").read_text()
    for module in ("torch", "transformers", "tokenizers", "PIL", "cuda"):
        assert not list(sidecar.folder.glob(f"lib/python*/site-packages/{module}"))


@pytest.mark.parametrize(
    ("arguments", "what", "module", "extra"),
    [
        (("--embedded",), "worker.embedded = true", "torch", "worker"),
        (
            ("--set=remote.url=valkey://127.0.0.1:1", "--set=remote.secret_file=secret"),
            "remote.url = valkey://127.0.0.1:1",
            "cryptography",
            "remote",
        ),
    ],
)
def test_what_needs_more_says_how_to_get_it(
    sidecar: Environment, arguments: tuple[str, ...], what: str, module: str, extra: str
) -> None:
    done = sidecar.run("prefixd", "serve", *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"prefixd: {what}: the package {module} is missing; pip install 'prefixd[{extra}]'"
    )


def test_it_plans_and_shows_its_configuration(sidecar: Environment) -> None:
    lines = [{"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [at, at + 1]} for at in range(4)]
    (sidecar.folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ("--gpu", "1GiB", "--cpu", "1GiB", "--no-curve")
    done = sidecar.run("prefixd", "plan", "--trace", "trace.jsonl", "--model", "llama-3-8b", *sizes)
    assert done.returncode == 0, done.stderr
    done = sidecar.run("prefixd", "config", "show", "--json")
    assert json.loads(done.stdout)["worker.embedded"]["value"] is False, done.stderr
