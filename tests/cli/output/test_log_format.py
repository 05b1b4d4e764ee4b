"""The log as lines for people, and as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from prefixd.cli.output.log_format import log_to_stderr
from prefixd.observability.actor import DaemonTask, acting


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("prefixd", "prefixd_swap", "prefixd_scheduler"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_json_has_a_line_a_record_with_the_requests_id(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info", "json")
    log = logging.getLogger("prefixd.x")
    log.info("request %s\nends", "r1", extra={"request_id": "r1", "fields": {"ttft_s": 0.5}})
    try:
        raise ValueError("évil\x1b")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "prefixd.x",
        "message": "request r1\nends",
        "request_id": "r1",
        "ttft_s": 0.5,
    }
    assert "ValueError: évil\x1b" in second["exception"] and "request_id" not in second


def test_json_names_the_request_in_which_a_line_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info", "json")
    log = logging.getLogger("prefixd.x")
    with acting("r1"):
        log.error("block 9f86 dropped")
        log.error("of another", extra={"request_id": "r2"})
        with acting(DaemonTask.WRITE_BACK):
            log.error("not written")
    lines = map(json.loads, capsys.readouterr().err.splitlines())
    assert [line.get("request_id") for line in lines] == ["r1", "r2", None]


def test_text_has_a_line_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("warning", "text")
    logging.getLogger("prefixd.x").info("not shown")
    logging.getLogger("prefixd.x").warning("shown\nagain")
    assert capsys.readouterr().err.endswith("WARNING prefixd.x: shown\\nagain\n")


def test_debug_is_for_our_own_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("debug", "text")
    for name in ("asyncio", "grpc._cython.cygrpc", "prefixd.x", "prefixd_swap.slab"):
        logging.getLogger(name).debug("said")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[3] for line in lines] == ["prefixd.x:", "prefixd_swap.slab:"]
