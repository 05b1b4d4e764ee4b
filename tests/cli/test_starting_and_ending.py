"""Signals at every moment of a command's and the daemon's start and end: how soon, with which status and words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, ClientError, ExhaustedError, Finished, Sampling, ServerUnavailable
from prefixd.serving.models.worker_process import _STOP_S
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.slow

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
SERVE = ("serve", "--cpu-bytes", "1MiB", "--disk-bytes", "4MiB", "--data-dir", "data", "--socket", "s")
READY = "prefixd.cli.commands.serve:_ready_line"
"""The daemon takes calls."""
FLUSH = "prefixd.cache.background.write_back:WriteBack.flush"
"""It has been asked to end, and writes back."""
CLOSE = "prefixd.server.rpc.sockets.listeners:Listeners.close"
"""It takes no more calls."""
CLOSED = "prefixd_swap:SlabStore.close"
"""Nearly nothing is left of it."""

# A moment is when a module is imported, or when a function of it is called. Each signal is sent once.
_PROGRAM = """
import importlib, os, signal, sys

def send(moment):
    while (number := moments.pop(moment, None)) is not None:
        os.kill(os.getpid(), number)

def arm(moment):
    module, _, name = moment.partition(":")
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for each in path:
        owner = getattr(owner, each)
    found = vars(owner)[last]
    really = getattr(found, "__func__", found)
    def first(*args, **options):
        send(moment)
        return really(*args, **options)
    setattr(owner, last, type(found)(first) if really is not found else first)

moments = {moments}
for moment in moments:
    if ":" in moment:
        arm(moment)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
sys.addaudithook(lambda event, args: send(args[0]) if event == "import" else None)
sys.argv = ["prefixd", *{command}]
from prefixd.process import signals
signals.SAME_SIGNAL_S = -1.0  # two signals are two, however soon they come
from prefixd.cli import main
main()
"""


Signalled = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def signalled(folder: Path) -> Signalled:
    """`prefixd COMMAND`, which sends itself signals at moments; it has to end by itself."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFIXD_", "XDG_"))}

    def run(moments: dict[str, signal.Signals], command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        numbers = {moment: int(number) for moment, number in moments.items()}
        program = _PROGRAM.replace("{moments}", repr(numbers)).replace("{command}", repr(list(command)))
        return subprocess.run(
            [sys.executable, "-c", program],
            env=environment | {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    return run


# Both signals where a command and the daemon begin and where the daemon has begun; in between one after the other.
@pytest.mark.parametrize(
    ("moment", "command", "number"),
    [
        ("prefixd.cli.app", ("stats",), INT),
        ("prefixd.cli.app", ("stats",), TERM),
        ("typer", ("--help",), INT),
        ("prefixd.client", ("ls",), TERM),
        ("grpc", ("generate", "x"), INT),
        ("prefixd.cli.commands.plan", ("plan", "--help"), TERM),
        ("pydantic", SERVE, INT),
        ("pydantic", SERVE, TERM),
        ("lmdb", SERVE, INT),
        ("torch", (*SERVE, "--embedded", "--set=gpu.device=cuda"), TERM),
        ("prefixd_swap:SlabStore.open", SERVE, INT),
        ("prefixd.cache.cache:TieredCache.restore", SERVE, TERM),
        ("prefixd.server.rpc.sockets.memory_listener:MemoryListener.start", SERVE, INT),
        ("prefixd.server.rpc.sockets.memory_listener:MemoryListener.start", SERVE, TERM),
    ],
)
def test_a_signal_while_anything_starts_ends_it_without_a_word(
    signalled: Signalled, moment: str, command: Sequence[str], number: signal.Signals
) -> None:
    done = signalled({moment: number}, command)
    assert (done.returncode, done.stderr, done.stdout) == (128 + number, "", "")


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("moment", ["prefixd.server.rpc.sockets.listeners:Listeners.open", READY])
def test_a_daemon_that_takes_calls_is_ended_in_order(signalled: Signalled, moment: str, number: signal.Signals) -> None:
    done = signalled({moment: number}, SERVE)
    assert done.returncode == 0
    assert "drained: 0 requests finished" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("second", [INT, TERM])
@pytest.mark.parametrize("moment", [FLUSH, CLOSE, CLOSED])
def test_a_second_signal_ends_it_at_once(signalled: Signalled, moment: str, second: signal.Signals) -> None:
    done = signalled({READY: TERM, moment: second}, SERVE)
    assert done.returncode == 128 + second
    assert done.stderr.endswith("prefixd: a second signal: ending without finishing what runs\n")


def test_sighup_never_ends_the_daemon(signalled: Signalled) -> None:
    """Before it can read its settings again, it remembers that it was asked to."""
    read = "prefixd.server.settings_reload:SettingsReload._log_removed_tenants"
    early = {moment: HUP for moment in ("typer", "pydantic", "lmdb", "prefixd.cache.cache:TieredCache.restore")}
    done = signalled(early | {read: TERM, CLOSE: HUP, CLOSED: HUP}, SERVE)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "settings were read again" in done.stderr


def test_a_command_ends_with_its_terminal(signalled: Signalled) -> None:
    assert signalled({"typer": HUP}, ("stats",)).returncode == -HUP


# -- while a model loads, which takes as long as it likes ----------------------------------------------------------


def children(pid: int) -> list[int]:
    """The processes that the threads of a process have started and that live."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:  # the thread has ended meanwhile
            continue
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def is_tied(pid: int) -> bool:
    """Whether a process that loads a model is past `prctl(PR_SET_PDEATHSIG)`: what needs NumPy comes after that."""
    try:
        return "numpy" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def stopped(daemon: DaemonProcess) -> list[int]:
    """The processes that load the daemon's model, as soon as they end with it; they never get on."""
    wanted = ("prefixd.worker", "prefixd.serving.text.load_tokenizer")
    loading: set[int] = set()

    def all_stopped() -> bool:
        for pid in children(daemon.pid):
            if pid not in loading and any(name in command_of(pid) for name in wanted) and is_tied(pid):
                os.kill(pid, signal.SIGSTOP)
                loading.add(pid)
        return len(loading) == len(wanted)

    wait_until(all_stopped)
    return sorted(loading)


MODEL = {"worker.embedded": True, "gpu.bytes": "32MiB", "cpu.bytes": "1MiB", "disk.bytes": "4MiB"}
ONE_CALL = {"tenants.default.requests_per_s": 0.001}
"""Of Generate, in the first quarter of an hour: once another one is refused, that one waits for the model."""


@pytest.mark.parametrize(("number", "to_group"), [(TERM, False), (INT, True)])
def test_a_daemon_whose_model_loads_ends_at_once(number: signal.Signals, to_group: bool) -> None:
    """And the caller that waits for the model is told, and no process is left."""
    answers: list[ClientError] = []

    def ask() -> None:
        with Client(daemon.address) as client:
            try:
                list(client.generate([1, 2, 3], sampling=Sampling(max_tokens=4)))
            except ClientError as error:
                answers.append(error)

    with DaemonProcess(MODEL | ONE_CALL, log_level="info") as daemon:
        loading = stopped(daemon)
        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        wait_until(lambda: answers)
        began_s = time.monotonic()
        (os.killpg if to_group else os.kill)(daemon.pid, number)
        wait_until(lambda: not daemon.alive)
        took_s = time.monotonic() - began_s
        assert daemon.stop() == 0
        for thread in asking:
            thread.join(WAIT_S)
        log = daemon.log.read_text()
        wait_until(lambda: not any(map(command_of, loading)))
    assert took_s < _STOP_S, "it waits for a worker that was asked to end"
    assert "Traceback" not in log and "Error" not in log
    refused, told = answers
    assert isinstance(refused, ExhaustedError)
    assert isinstance(told, ServerUnavailable) and "the daemon is ending" in str(told)


def test_the_first_token_waits_for_the_model_and_a_worker_that_hangs_is_killed() -> None:
    with DaemonProcess(MODEL, log_level="info") as daemon:
        with Client(daemon.address) as client:
            began_s = time.monotonic()
            *_, finished = client.generate([1, 2, 3], sampling=Sampling(max_tokens=1))
            waited_s = time.monotonic() - began_s
        assert isinstance(finished, Finished) and waited_s / 2 < finished.ttft_s < waited_s
        (worker,) = children(daemon.pid)
        os.kill(worker, signal.SIGSTOP)
        assert daemon.stop() == 0
        wait_until(lambda: not command_of(worker))
        assert "Traceback" not in daemon.log.read_text()
