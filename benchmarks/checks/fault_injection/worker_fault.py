"""The worker without kernel mappings for one more request: fewer run at once, each answer is that of a quiet run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.checks.fault_injection.fault_result import Result
from benchmarks.checks.fault_injection.watch import Log, Watch
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, ClientError, Sampling, Tokens

NAME = "worker out of mappings"
PART = "worker memory"

_SETTINGS = {"worker.embedded": True, "gpu.bytes": "32MiB", "cpu.bytes": "16MiB", "disk.bytes": "64MiB"}
_AT_ONCE = 4
_MAPPINGS = 6  # enough for one request, whose blocks lie in a few runs, and too few for four
_SCARCE = Path(__file__).parent / "scarce_mappings"
_PROGRAM = """
import os
os.environ["PYTHONPATH"] = os.pathsep.join([{scarce!r}, os.environ.get("PYTHONPATH", "")])
os.environ["SCARCE_MAPPINGS"] = {limit!r}
from prefixd.cli.tethered import main
main()
"""
_PROMPT_TOKENS = 150
_NEW_TOKENS = 20  # so that four requests overlap on a busy machine, too
_NOTICED_S = 60.0
_BACK_S = 60.0


def run_worker_scenario(folder: Path, port: int) -> Result:
    """Makes the fault in `folder`, which must be empty, and has the daemon survive it."""
    begin = time.monotonic()
    result = Result(NAME)
    limit = folder / "mappings"
    program = _PROGRAM.format(scarce=str(_SCARCE), limit=str(limit))
    daemon = DaemonProcess(
        {**_SETTINGS, "server.metrics": f"127.0.0.1:{port}"}, directory=folder / "daemon", program=("-c", program)
    )
    with daemon, Client(daemon.address, name="load 1") as first, Client(daemon.address, name="load 2") as second:
        clients = (first, second)
        quiet = [_generate(first, number, result) for number in range(_AT_ONCE)]
        with Watch(daemon.address, port) as watch:
            log = Log(daemon.log)
            watch.begin()
            limit.write_text(str(_MAPPINGS))
            try:
                broken_s = time.monotonic()
                _crowd(clients, quiet, result)
                if watch.wait(lambda now, _: PART in now.troubles, _NOTICED_S):
                    result.noticed_s = round(time.monotonic() - broken_s, 2)
                _crowd(clients, quiet, result)
                watch.wait(lambda *_: not watch.end().silent_about(PART, log.lines()), _NOTICED_S)
                seen = watch.end()
                result.unreported += seen.silent_about(PART, log.lines())
                result.said = "; ".join(seen.troubles.get(PART, ()))
            finally:
                limit.unlink()
            healed_s = time.monotonic()
            if watch.wait(lambda now, _: not now.any, _BACK_S):
                result.back_s = round(time.monotonic() - healed_s, 2)
            else:
                result.not_back.append(f"trouble after {_BACK_S:g} s: {watch.now}")
            _crowd(clients, quiet, result)
            if watch.stats.worker.restarts:
                result.failures.append(f"the worker was started again {watch.stats.worker.restarts} times")
        result.crashes += not daemon.alive
        result.crashes += daemon.stop() != 0
    result.seconds = round(time.monotonic() - begin, 2)
    return result


def _crowd(clients: tuple[Client, Client], quiet: list[list[int]], result: Result) -> None:
    """All the prompts at once, with nothing cached; the answers have to be those of the quiet run."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = threads.map(lambda number: _generate(clients[number % 2], number, result), range(_AT_ONCE))
        for answer, expected in zip(answers, quiet, strict=True):
            result.wrong_bytes += 4 * sum(a != b for a, b in zip(answer, expected, strict=False))


def _generate(client: Client, number: int, result: Result) -> list[int]:
    prompt = [(number * 31 + at * 7) % 200 for at in range(_PROMPT_TOKENS)]
    begin = time.monotonic()
    result.calls += 1
    try:
        events = list(
            client.generate(prompt, sampling=Sampling(max_tokens=_NEW_TOKENS, ignore_eos=True), timeout_s=60.0)
        )
    except ClientError as error:
        result.unserved += 1
        result.failures.append(f"generate: {type(error).__name__}: {error}")
        return []
    result.slowest_call_s = round(max(result.slowest_call_s, time.monotonic() - begin), 3)
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
