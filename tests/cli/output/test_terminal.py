"""Names that clients choose reach neither the cursor of an operator's terminal nor a line of their own."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Coroutine

import pytest
from google.protobuf.message import Message
from typer.testing import CliRunner

from prefixd.cli.app import app
from prefixd.cli.failures import CommandFailed
from prefixd.cli.machine_checks import Check
from prefixd.cli.output import json_values as plain
from prefixd.cli.output.tables import answer_tables as render
from prefixd.cli.output.tables import prefix_tables
from prefixd.cli.output.terminal import LogFormatter, cleaned, shown
from prefixd.cli.output.transcript import Transcript
from prefixd.client import Finished, FinishReason, Tokens
from prefixd.v1 import admin_pb2 as pb

EVIL = "\x1b[2Jevil\n\u202eFORGED\r\x07"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain, é你 too", "plain, é你 too"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\u202e\x9b\ud800\U000e0001", "\\u202e\\x9b\\ud800\\U000e0001"),
    ],
)
def test_what_is_not_printable_is_shown_as_its_escape(text: str, safe: str) -> None:
    assert shown(text) == safe
    assert shown("a\nb\x1b", keep="\n\t") == "a\nb\\x1b"


def fill(message: Message, depth: int = 4) -> None:
    """Every text in it, however deep, is evil."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].type == field.TYPE_STRING:
                value.update({name: EVIL for name in ("tenant", "model", "tier", EVIL)})
            else:
                value[EVIL] = 7
        elif field.message_type is not None:
            if depth:
                fill(value.add() if field.is_repeated else value, depth - 1)
        elif field.type == field.TYPE_STRING:
            if field.is_repeated:
                value.append(EVIL)
            else:
                setattr(message, field.name, EVIL)
        elif field.type in (field.TYPE_UINT64, field.TYPE_UINT32, field.TYPE_DOUBLE) and not field.is_repeated:
            setattr(message, field.name, 3)


def evil(message: Message) -> Message:
    fill(message)
    return message


PRINTED: dict[str, Callable[[], object]] = {
    "stats": lambda: render.print_stats(evil(pb.StatsResponse())),  # type: ignore[arg-type]
    "prefixes": lambda: prefix_tables.print_prefixes([evil(pb.PrefixInfo())], 1),  # type: ignore[list-item]
    "inspection": lambda: prefix_tables.print_inspection(evil(pb.InspectResponse()), tokens=True),  # type: ignore[arg-type]
    "verification": lambda: render.print_verification(
        pb.VerifyProgress(),
        [evil(pb.DamagedBlock())],  # type: ignore[list-item]
        1.0,
    ),
    "diagnosis": lambda: render.print_diagnosis(
        evil(pb.CheckIntegrityResponse()),  # type: ignore[arg-type]
        [Check(EVIL, EVIL, EVIL), Check(EVIL, EVIL)],
    ),
    "tenants": lambda: render.print_tenants([evil(pb.TenantStats())]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("what", PRINTED)
def test_tables_obey_no_name(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    PRINTED[what]()
    out = capsys.readouterr().out
    assert "evil" in out
    assert not {each for each in out if not each.isprintable()} - {"\n"}
    assert not [line for line in out.splitlines() if line.startswith("FORGED")]


def test_a_cleaned_message_is_a_copy() -> None:
    stats = pb.StatsResponse(version=EVIL, lost_blocks={EVIL: 3})
    assert cleaned(stats).version == shown(EVIL)
    assert dict(cleaned(stats).lost_blocks) == {shown(EVIL): 3}
    assert stats.version == EVIL


def test_json_escapes_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    plain.print_json(plain.to_plain(pb.StatsResponse(version=EVIL)))
    plain.print_json_line({"text": EVIL})
    out = capsys.readouterr().out
    assert not {each for each in out if not " " <= each <= "~"} - {"\n"}
    assert json.loads(out.splitlines()[-1])["text"] == EVIL


def test_an_error_is_one_harmless_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: Coroutine[object, object, None]) -> None:
        command.close()
        raise CommandFailed(f"no namespace; the daemon has: {EVIL}")

    monkeypatch.setattr("prefixd.cli.commands.admin.run", fail)
    done = CliRunner().invoke(app, ["stats"])
    assert done.exit_code == 1
    assert done.stderr == "prefixd: no namespace; the daemon has: \\x1b[2Jevil \\u202eFORGED \\x07\n"


def record(message: str, *, error: Exception | None = None) -> str:
    made = logging.LogRecord("a", logging.WARNING, "f", 1, "%s asked", (message,), error and (type(error), error, None))
    return LogFormatter("%(levelname)s %(name)s: %(message)s").format(made)


def test_a_log_record_is_one_line_and_a_traceback_is_indented() -> None:
    assert record(EVIL) == f"WARNING a: {shown(EVIL)} asked"
    first, *others = record("x", error=ValueError(EVIL)).split("\n")
    assert first == "WARNING a: x asked"
    assert others and all(line.startswith("  ") and line.isprintable() for line in others)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "said"), [(Terminal(), "a\n\tb\\x1b[2J"), (io.StringIO(), "a\n\tb\x1b[2J")])
def test_generated_text_is_harmless_on_a_terminal(
    stream: io.StringIO, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    transcript = Transcript(1, has_text=True, searched=False)
    transcript.show(Tokens((1,), "a\n\tb\x1b[2J"))
    assert stream.getvalue() == said


def test_one_token_is_not_called_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    Transcript(1, has_text=True, searched=False).show(
        Finished(
            FinishReason.STOP, prompt_tokens=1, output_tokens=1, hit_tokens={}, queue_s=0.0, ttft_s=0.25, resumed=0
        )
    )
    assert capsys.readouterr().err == "[1 token (stop), first after 0.25 s; prompt of 1 token, cached: none]\n"
