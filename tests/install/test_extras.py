"""`pip install prefixd`: the client and the command line, and a line with the command where more is needed. With
`prefixd[daemon]` a daemon beside engines, without torch.

In one file, so that one process makes the environments, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.install.environments import Environment

pytestmark = pytest.mark.slow

CLIENT = Path(__file__).parents[1] / "client" / "version_client.py"
HELP = """if True:
    from typer.main import get_command
    from typer.testing import CliRunner
    from prefixd.cli.app import app

    def paths(command, *path):
        yield path
        for name, each in getattr(command, "commands", {}).items():
            yield from paths(each, *path, name)

    for path in paths(get_command(app)):
        done = CliRunner().invoke(app, [*path, "--help"])
        assert done.exit_code == 0 and "Usage" in done.output, (path, done.output, done.exception)
        print(*path)
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess({"cpu.bytes": "4MiB", "disk.bytes": "16MiB"}) as running:
        yield running


def test_it_stores_finds_and_loads(client: Environment, daemon: DaemonProcess) -> None:
    done = {}
    for action in ("store", "load"):
        ended = client.run("python", CLIENT, daemon.address, action, "shared")
        assert ended.returncode == 0, ended.stderr
        said = json.loads(ended.stdout)
        assert Path(said["version"]).is_relative_to(client.folder)
        done[action] = said["done"]
    found = [12, 12]
    assert done == {"store": found, "load": [found, 12, found, 12]}


@pytest.mark.parametrize("command", ["stats", "doctor", "verify"])
def test_commands_ask_a_daemon(client: Environment, daemon: DaemonProcess, command: str) -> None:
    done = client.run("prefixd", command, "--address", daemon.address)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_every_command_explains_itself(client: Environment) -> None:
    assert {"serve", "demo", "plan", "stats", "config show", "tier resize"} <= set(client.program(HELP).splitlines())


def test_the_wheel_has_every_file_of_the_packages(client: Environment) -> None:
    """Also those that are no Python: the kernel for pages, tables of attention's costs, `py.typed`."""
    root = Path(__file__).parents[2]
    (installed,) = client.folder.glob("lib/python*/site-packages")
    folders = [root / "prefixd", root / "swap" / "prefixd_swap", root / "scheduler" / "prefixd_scheduler"]
    ours = {
        file.relative_to(folder.parent)
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert Path("prefixd_swap/copies/page_moves.ptx") in ours
    assert not {str(file) for file in ours if not (installed / file).is_file()}


def test_it_has_nothing_that_only_daemons_need(client: Environment) -> None:
    (packages,) = client.folder.glob("lib/python*/site-packages")
    assert (packages / "numpy").is_dir()
    assert not {"torch", "transformers", "lmdb", "msgspec", "zmq", "aiofiles", "PIL", "cuda"} & {
        each.name for each in packages.iterdir()
    }


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("serve", "daemon"),
        ("demo", "worker"),
        ("plan --trace t.jsonl --model llama-3-8b --gpu 1GiB --cpu 1GiB", "daemon"),
        ("recover", "daemon"),
        ("doctor --calibrate machine.json", "daemon"),
    ],
)
def test_what_needs_more_says_how_to_get_it(client: Environment, command: str, extra: str) -> None:
    done = client.run("prefixd", *command.split())
    assert done.returncode == 2, (done.stdout, done.stderr)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"prefixd: prefixd {command.split()[0]}: the package ")
    assert line.endswith(f" is missing; pip install 'prefixd[{extra}]'")


# -- the sidecar -------------------------------------------------------------------------------------------------------


def test_what_a_sidecar_has_stored_it_serves_after_a_restart(client: Environment, sidecar: Environment) -> None:
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
def test_what_a_sidecar_lacks_says_how_to_get_it(
    sidecar: Environment, arguments: tuple[str, ...], what: str, module: str, extra: str
) -> None:
    done = sidecar.run("prefixd", "serve", *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"prefixd: {what}: the package {module} is missing; pip install 'prefixd[{extra}]'"
    )


def test_a_sidecar_plans_and_shows_its_configuration(sidecar: Environment) -> None:
    lines = [{"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [at, at + 1]} for at in range(4)]
    (sidecar.folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ("--gpu", "1GiB", "--cpu", "1GiB", "--no-curve")
    done = sidecar.run("prefixd", "plan", "--trace", "trace.jsonl", "--model", "llama-3-8b", *sizes)
    assert done.returncode == 0, done.stderr
    done = sidecar.run("prefixd", "config", "show", "--json")
    assert json.loads(done.stdout)["worker.embedded"]["value"] is False, done.stderr
