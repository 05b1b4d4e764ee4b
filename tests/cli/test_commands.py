"""What each command asks the daemon for, and what it prints."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.main import get_command

from prefixd.base.sampling import MOST_BEAMS, MOST_LOGPROBS
from prefixd.cli.app import app
from prefixd.serving.generation.params import MOST_SEQUENCES
from prefixd.v1 import cache_pb2

KEY = "9f86d081884c7d659a2feaa0c55ad015"
NAMESPACE = bytes(range(8))
Cli = Callable[..., Any]

COMMANDS = [
    "serve",
    "generate",
    "demo",
    "stats",
    "ls",
    "why",
    "inspect",
    "pin",
    "unpin",
    "evict",
    "flush",
    "drain",
    "undrain",
    "recover",
    "verify",
    "doctor",
    "config show",
    "tier resize",
    "what-if",
    "trace record",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_names_the_command(cli: Cli, command: str) -> None:
    result = cli(*command.split(), "--help")
    assert result.exit_code == 0
    examples = result.stdout.partition("Example")[2]
    assert f"prefixd {command}" in examples


def test_paragraphs_of_help_are_broken_where_the_terminal_ends(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    for line in (
        "each policy of the queue, each time to a new daemon.",
        "the three tiers and each policy",
        "an eighth of the prefixes, the CPU tier a quarter, the disk all. Then it restarts",
    ):
        assert line in cli("demo", "--help").stdout


def test_help_says_what_a_lower_quota_takes_away_and_what_does_not_count_as_a_call(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    out = cli("tenants", "set", "--help").stdout
    assert (
        "loses its own blocks there as it stores more" in out
        and "Most calls under way at once, not counting Generate" in out
    )


def test_brackets_in_help_are_text_and_no_markup(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    for command, words in (
        ("serve", "lines `name role token [tenant]`"),
        ("stats", ".tiers[].hit_tokens"),
        ("verify", ".damaged[].key"),
        ("config show --describe", "lines `name role token [tenant]`"),
    ):
        assert words in cli(*command.split(), *([] if "show" in command else ["--help"])).stdout, command


def test_every_command_for_a_daemon_can_reach_one_on_another_host() -> None:
    commands = get_command(app).commands
    with_address = {
        name: {flag for option in command.params for flag in option.opts} for name, command in commands.items()
    }
    with_address = {name: flags for name, flags in with_address.items() if "--address" in flags}
    assert with_address.keys() >= {"generate", "stats", "drain", "verify", "doctor"}
    for name, flags in with_address.items():
        assert flags >= {"--tls-ca", "--tls-cert", "--tls-key", "--token-file"}, name


def test_stats_of_more_than_a_day_are_refused_by_the_options_name(cli: Cli) -> None:
    result = cli("stats", "--last", "3d")
    assert result.exit_code == 2
    assert "--last 3d: the daemon remembers a day; write 1d or less" in " ".join(result.stderr.split())


def test_stats(cli: Cli, daemon: Any) -> None:
    out = " ".join(cli("stats", "--address", daemon.address).stdout.split())
    for words in (
        "0:01:30",
        "750 found in the cache (75%)",
        "embedded on cpu",
        "5 waiting (relaxed-fpf)",
        "blocks of 1,024 tokens",
        "block size: 16 tokens asked, 1024 used: a token takes 2 KiB",
        "worker's design: kv virtual, layout token, CUDA graphs not in use",
        "without CUDA graphs: the model has several groups of layers; CUDA graphs need one",
        "draft: small proposes 4 tokens at a time",
        "worker.draft.accepted_tokens",
        "tokens that the draft model proposed",
        "14.0 MiB bytes of these states",
        "scheduler.preempted_requests",
        "1,234 tokens that preempted requests had computed and compute again",
        "12,345",
        "1.0 GiB",
        "4.0 GiB",
        "25%",
        "tiny-llama",
        NAMESPACE.hex(),
        "vllm",
        "lost_blocks.checksum",
        "quarantine: 3.0 MiB",
        "gpu tier: from 1.0 GiB to 12.0 GiB, now 6.0 GiB, on its way to 8.0 GiB; last change: requests need it",
        "degraded for 0:01:30: disk tier: the file system is full free space",
        "48.0 MiB memory that namespaces take",
        "9,000 KV events published",
        "scrub.damaged_blocks",
        "3.0 GiB bytes of them",
        "64.0 MiB the most before it pushes back",
    ):
        assert words in out
    assert "worker.images" not in out and "remote." not in out, "this daemon has none"


def test_stats_say_why_the_worker_was_given_up(cli: Cli, daemon: Any) -> None:
    daemon.worker_error = "gpu.bytes = 1 holds 0 frames"
    assert "worker was given up: gpu.bytes = 1 holds 0 frames" in cli("stats", "--address", daemon.address).stdout
    stats = json.loads(cli("stats", "--json", "--address", daemon.address).stdout)
    assert stats["worker"]["error"] == "gpu.bytes = 1 holds 0 frames"


def test_stats_as_json(cli: Cli, daemon: Any) -> None:
    stats = json.loads(cli("stats", "--json", "--address", daemon.address).stdout)
    assert stats["tiers"][0]["tier"] == "disk"
    assert stats["tiers"][0]["capacity_bytes"] == 4 << 30
    assert stats["worker"]["state"] == "ready"
    assert (stats["worker"]["block_tokens"], stats["worker"]["block_tokens_asked"]) == (1024, 16)
    assert stats["worker"]["block_tokens_reason"].startswith("16 tokens asked, 1024 used")
    assert stats["namespaces"][0]["namespace_id"] == NAMESPACE.hex()
    assert stats["lost_blocks"] == {"checksum": 2}
    assert stats["draining"] is False


def test_ls_lists_prefixes_and_says_when_there_are_more(cli: Cli, daemon: Any) -> None:
    out = cli("ls", "--limit", "1", "--address", daemon.address).stdout
    assert daemon.last().limit == 1
    assert KEY[:12] in out and "pinned" in out and "8.0 MiB" in out
    assert "1 of 7 prefixes" in out
    listed = json.loads(cli("ls", "--json", "--address", daemon.address).stdout)
    assert (listed["total"], listed["prefixes"][0]["key"]) == (7, KEY)


@pytest.mark.parametrize("name", ["tiny-llama", NAMESPACE.hex()])
def test_ls_of_a_namespace_by_name_or_id(cli: Cli, daemon: Any, name: str) -> None:
    assert cli("ls", "--namespace", name, "--address", daemon.address).exit_code == 0
    assert daemon.last().namespace_id == NAMESPACE


def test_an_unknown_namespace_is_answered_with_the_known_ones(cli: Cli, daemon: Any) -> None:
    result = cli("ls", "--namespace", "llama", "--address", daemon.address)
    assert result.exit_code == 1
    assert result.stderr == "prefixd: no namespace 'llama'; the daemon has: tiny-llama\n"


def test_a_namespace_that_several_have_is_chosen_by_its_id(cli: Cli, daemon: Any) -> None:
    daemon.tenants = ["default", "acme"]
    ids = [f"0{number}{NAMESPACE.hex()[2:]}" for number in range(2)]
    failed = cli("evict", "--namespace", "tiny-llama", "--yes", "--address", daemon.address)
    assert failed.exit_code == 1 and "there are 2 namespaces 'tiny-llama'" in failed.stderr
    for tenant, namespace_id in zip(daemon.tenants, ids, strict=True):
        assert f"{namespace_id} (tenant {tenant}, 4,096 blocks)" in failed.stderr
    unknown = cli("ls", "--namespace", "llama", "--address", daemon.address)
    assert unknown.stderr == "prefixd: no namespace 'llama'; the daemon has: tiny-llama\n"
    assert cli("ls", "--namespace", "ab" * 8, "--address", daemon.address).exit_code == 0
    assert daemon.last().namespace_id.hex() == "ab" * 8, "the daemon may have more than it lists"
    rows = [
        line.split() for line in cli("stats", "--address", daemon.address).stdout.splitlines() if "tiny-llama" in line
    ]
    assert [row[:3] for row in rows] == [["tiny-llama", "default", ids[0]], ["tiny-llama", "acme", ids[1]]]


def test_inspect(cli: Cli, daemon: Any) -> None:
    out = cli("inspect", KEY[:6], "--address", daemon.address).stdout
    assert daemon.last().key == KEY[:6]
    assert "gpu disk" in out and "held 1x" in out and "256.0 KiB" in out
    assert "1000" not in out
    assert "1000 1001 1002" in cli("inspect", KEY, "--tokens", "--address", daemon.address).stdout
    inspected = json.loads(cli("inspect", KEY, "--json", "--address", daemon.address).stdout)
    assert inspected["blocks"][0]["tiers"] == ["gpu", "disk"]
    assert inspected["blocks"][0]["token_ids"] == [1000, 1001, 1002]


def test_pin_and_unpin(cli: Cli, daemon: Any) -> None:
    assert cli("pin", KEY, "--address", daemon.address).stdout == "32 blocks pinned\n"
    assert daemon.last().key == KEY
    assert cli("unpin", KEY, "--address", daemon.address).stdout == "31 blocks unpinned\n"
    pinned = json.loads(cli("pin", KEY, "--json", "--address", daemon.address).stdout)
    assert pinned == {"blocks": 32, "durable": True}


def test_a_pin_that_does_not_outlast_a_restart_says_why(cli: Cli, daemon: Any) -> None:
    daemon.no_disk = "there is no disk tier; set disk.bytes"
    out = cli("pin", KEY, "--address", daemon.address).stdout
    assert out == "32 blocks pinned, but only until the daemon ends: there is no disk tier; set disk.bytes\n"
    assert "31 blocks unpinned, but the daemon pins them again at its next start: there is no disk tier" in (
        cli("unpin", KEY, "--address", daemon.address).stdout
    )
    pinned = json.loads(cli("pin", KEY, "--json", "--address", daemon.address).stdout)
    assert pinned == {"blocks": 32, "durable": False, "reason": daemon.no_disk}


def test_what_is_pinned_and_wished_for_is_shown(cli: Cli, daemon: Any) -> None:
    assert "32 blocks pinned, 8.0 MiB" in cli("ls", "--address", daemon.address).stdout
    assert "priority 50 for 1:00:00" in cli("inspect", KEY, "--address", daemon.address).stdout


def test_generate_asks_for_retention_and_read_only(cli: Cli, daemon: Any) -> None:
    wishes = ("50/1h", "0:1024=-7", "1024:=+3/1.5m", ":16=0/2d", "8:9=1/90s")
    options = [word for wish in wishes for word in ("--retain", wish)]
    assert cli("generate", "x", "--read-only", *options, "--address", daemon.address).exit_code == 0
    request = daemon.last()
    asked = [(each.start_token, each.end_token, each.priority, each.ttl_s) for each in request.retention]
    assert asked == [(0, 0, 50, 3600), (0, 1024, -7, 0), (1024, 0, 3, 90), (0, 16, 0, 172_800), (8, 9, 1, 90)]
    assert request.read_only
    cli("generate", "x", "--address", daemon.address)
    assert not daemon.last().retention and not daemon.last().read_only


@pytest.mark.parametrize("wish", ["", "high", "50/", "50/1", "50/h", "0-5=50", "0:5", "0:5=", "-1:5=5", "\u0665\u0660"])
def test_generate_refuses_what_is_no_wish_in_one_line(cli: Cli, daemon: Any, wish: str) -> None:
    result = cli("generate", "x", f"--retain={wish}", "--address", daemon.address)
    assert result.exit_code == 2
    assert f"--retain {wish!r} is not valid; write [START:END=]PRIORITY[/TIME]" in result.stderr


def test_evict_one_prefix_without_asking(cli: Cli, daemon: Any) -> None:
    out = cli("evict", KEY, "--address", daemon.address).stdout
    assert daemon.last().key == KEY
    assert out == "40 blocks dropped, 2 kept (leased, pinned or before such blocks)\n"


def test_evict_everything_asks_first(cli: Cli, daemon: Any) -> None:
    refused = cli("evict", "--all", "--address", daemon.address, stdin="n\n")
    assert refused.exit_code == 1
    unasked = cli("evict", "--all", "--address", daemon.address, stdin="")
    assert unasked.exit_code == 2
    assert unasked.stderr.splitlines()[-1].endswith("standard input has no answer; give --yes to drop without asking")
    assert daemon.requests == []
    assert cli("evict", "--all", "--address", daemon.address, stdin="y\n").exit_code == 0
    assert daemon.last().all is True
    result = cli("evict", "--namespace", "tiny-llama", "--yes", "--json", "--address", daemon.address)
    assert daemon.last().namespace_id == NAMESPACE
    assert json.loads(result.stdout) == {"evicted_blocks": 40, "kept_blocks": 2}


def test_the_gpu_tier_is_resized(cli: Cli, daemon: Any) -> None:
    result = cli("tier", "resize", "gpu", "4GiB", "--wait", "5", "--address", daemon.address)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "the gpu tier has 4.0 GiB, it had 8.0 GiB; 30 blocks left it, 20 of them to a tier below\n"
    assert (daemon.last().tier, daemon.last().nbytes, daemon.last().wait_s) == (cache_pb2.TIER_GPU, 4 << 30, 5.0)
    daemon.held = "3 of 9 blocks are held"
    result = cli("tier", "resize", "gpu", "4GiB", "--json", "--address", daemon.address)
    assert result.exit_code == 1 and json.loads(result.stdout)["unfinished"] == daemon.held
    assert f"the gpu tier has {5 << 30} bytes instead of {4 << 30}: {daemon.held}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cpu", "4GiB"), "only the gpu tier can be resized"),
        (("gpu", "4 apples"), "write a size such as 8GiB"),
        (("gpu", "-1"), "-1"),
        (("gpu",), "SIZE"),
    ],
)
def test_a_resize_that_makes_no_sense_is_not_sent(
    cli: Cli, daemon: Any, arguments: tuple[str, ...], words: str
) -> None:
    result = cli("tier", "resize", *arguments, "--address", daemon.address)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())


def test_evict_wants_exactly_one_thing(cli: Cli, daemon: Any) -> None:
    for arguments in ([], [KEY, "--all"], ["--all", "--namespace", "x"]):
        result = cli("evict", *arguments, "--address", daemon.address)
        assert result.exit_code == 2
        assert result.stderr == "prefixd: give one of KEY, a prompt, --namespace or --all\n"


@pytest.mark.parametrize("command", ["inspect", "pin", "unpin", "evict"])
def test_a_prefix_can_be_named_by_a_prompt(cli: Cli, daemon: Any, tmp_path: Path, command: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon a time")
    named = f"{NAMESPACE.hex()}/{KEY}"
    for arguments, asked in (
        (["--prompt", "Once"], {"text": "Once"}),
        (["--prompt-file", str(file), "--model", "m"], {"text": "Once upon a time", "model": "m"}),
        (["--token-ids", "1,2", "--namespace", NAMESPACE.hex()], {"token_ids": b"\1\0\0\0\2\0\0\0"}),
    ):
        result = cli(command, *arguments, "--address", daemon.address)
        assert result.exit_code == 0, result.stderr
        assert "512 of the prompt's 530 tokens are cached" in result.stderr
        found = daemon.requests[-2]
        assert {field.name: value for field, value in found.ListFields() if field.name != "namespace_id"} == asked
        assert found.namespace_id == (NAMESPACE if "--namespace" in arguments else b"")
        assert daemon.last().key == named


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one of KEY, --prompt, --prompt-file and --token-ids"),
        ([KEY, "--prompt", "x"], "give one of KEY"),
        (["--token-ids", "one"], "write ids such as 1,2,3"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt cannot be read (No such file or directory)"),
    ],
)
def test_a_prefix_that_is_not_named_well_is_refused(cli: Cli, daemon: Any, arguments: list[str], words: str) -> None:
    result = cli("pin", *arguments, "--address", daemon.address)
    assert result.exit_code == 2 and words in result.stderr and not result.stdout


def test_inspect_shows_text_where_the_daemon_has_the_tokenizer(cli: Cli, daemon: Any) -> None:
    assert "Once upon" in cli("inspect", KEY, "--text", "--address", daemon.address).stdout
    assert daemon.last().text
    assert "Once upon" not in cli("inspect", KEY, "--address", daemon.address).stdout


@pytest.mark.parametrize("by", ["last-use", "size", "hits"])
def test_ls_in_each_order(cli: Cli, daemon: Any, by: str) -> None:
    result = cli("ls", "--by", by, "--address", daemon.address)
    assert result.exit_code == 0 and " 41 " in result.stdout
    assert daemon.last().order == ["last-use", "size", "hits"].index(by)
    refused = cli("ls", "--by", "name", "--address", daemon.address)
    assert refused.exit_code == 2 and "Value error" not in refused.stderr


def test_degraded_parts_are_the_first_that_stats_shows(cli: Cli, daemon: Any) -> None:
    daemon.worker_error = "its device was lost"
    lines = [line.strip() for line in cli("stats", "--address", daemon.address).stdout.splitlines()]
    assert lines[1:4] == [
        "degraded for 0:01:30: disk tier: the file system is full",
        "free space",
        "worker was given up: its device was lost",
    ]


def test_stats_again_and_again(cli: Cli, daemon: Any) -> None:
    daemon.failure, daemon.fails_after = (grpc.StatusCode.UNAVAILABLE, "the daemon ends"), 3
    result = cli("stats", "--watch", "0.1", "--json", "--address", daemon.address)
    assert result.exit_code == 1
    *lines, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert last["error"]["status"] == "UNAVAILABLE"
    assert len(lines) == 3 and all(line["version"] == "0.1.0" for line in lines)
    refused = cli("stats", "5", "--address", daemon.address)
    assert refused.exit_code == 2 and "prefixd stats --watch 5" in refused.stderr


def test_undrain(cli: Cli, daemon: Any) -> None:
    assert cli("undrain", "--address", daemon.address).stdout == "the daemon takes new work again\n"


def test_flush_and_drain(cli: Cli, daemon: Any) -> None:
    assert cli("flush", "--address", daemon.address).stdout == (
        "12 blocks (3.0 MiB) written to disk\n"
        "5 blocks (1.0 MiB) are in memory alone: the disk tier has no room for them (disk.bytes), "
        "or they came meanwhile\n"
    )
    out = cli("drain", "--address", daemon.address).stdout
    assert out == "1 requests finished, 5 blocks written to disk; the daemon takes no new work\n"
    assert daemon.last().shutdown is False
    assert cli("drain", "--shutdown", "--json", "--address", daemon.address).exit_code == 0
    assert daemon.last().shutdown is True


def test_generate_streams_text_alone_to_stdout(cli: Cli, daemon: Any) -> None:
    result = cli(
        "generate", "Once upon", "--max-tokens", "2", "--temperature", "0.5", "--top-p", "0.9", "--seed", "7",
        "--address", daemon.address,
    )  # fmt: skip
    assert result.stdout == "Hello ☃\n"
    assert "16 from disk" in result.stderr and "2 tokens (length)" in result.stderr
    request = daemon.last()
    assert (request.text, request.sampling.max_tokens, request.sampling.seed) == ("Once upon", 2, 7)
    assert request.sampling.temperature == 0.5 and request.sampling.top_p == 0.9


def test_generate_asks_for_all_that_the_contract_has(cli: Cli, daemon: Any) -> None:
    cli(
        "generate", "x", "--temperature", "1", "--top-k", "40", "--min-p", "0.25", "--repetition-penalty", "1.5",
        "--presence-penalty", "0.5", "--frequency-penalty", "-0.5", "--stop", "one", "--stop", "two",
        "--logprobs", "0", "--n", "2", "--best-of", "3", "--address", daemon.address,
    )  # fmt: skip
    request, sampling = daemon.last(), daemon.last().sampling
    assert (request.n, request.best_of, sampling.top_k, sampling.min_p) == (2, 3, 40, 0.25)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.5, 0.5, -0.5)
    assert (list(sampling.stop), sampling.HasField("logprobs"), sampling.logprobs) == (["one", "two"], True, 0)
    cli("generate", "x", "--address", daemon.address)
    assert not daemon.last().sampling.HasField("logprobs") and not daemon.last().best_of
    assert not daemon.last().HasField("beam_search")
    cli("generate", "x", "--beams", "4", "--length-penalty", "0.5", "--early-stopping", "--address", daemon.address)
    search = daemon.last().beam_search
    assert (search.width, search.length_penalty, search.early_stopping) == (4, 0.5, True)


def test_generate_prints_several_sequences_one_below_the_other(cli: Cli, daemon: Any) -> None:
    result = cli("generate", "x", "--n", "2", "--temperature", "1", "--address", daemon.address)
    assert result.stdout == "".join(f"[{i}: 2 tokens, stop, logprob -1.250]\nHello ☃\n" for i in range(2))
    ids = cli("generate", "--token-ids", "1", "--n", "2", "--temperature", "1", "--address", daemon.address)
    assert ids.stdout.splitlines()[1::2] == ["104 111", "104 111"]


def test_generate_as_json_has_sequences_and_logprobs(cli: Cli, daemon: Any) -> None:
    arguments = ["--n", "2", "--temperature", "1", "--logprobs", "2", "--json", "--address", daemon.address]
    events = [json.loads(line) for line in cli("generate", "x", *arguments).stdout.splitlines()]
    assert [event["event"] for event in events] == [
        "accepted", *["tokens"] * 4, "sequence_finished", "sequence_finished", "finished",
    ]  # fmt: skip
    assert events[1]["index"] == 1 and events[1]["logprobs"] == [{"logprob": -0.5, "top": {"104": -0.5, "7": -2.0}}]
    assert events[6]["reason"] == "stop" and events[6]["cumulative_logprob"] == -1.25


def test_generate_prints_an_empty_text_and_not_its_ids(cli: Cli, daemon: Any) -> None:
    daemon.silent = True
    assert cli("generate", "x", "--stop", "Hello", "--address", daemon.address).stdout == "\n"
    assert cli("generate", "--token-ids", "1", "--stop", "Hello", "--address", daemon.address).stdout == "\n"
    result = cli("generate", "x", "--n", "2", "--temperature", "1", "--address", daemon.address)
    assert result.stdout.splitlines()[1::2] == ["", ""]


def test_generate_shows_the_figures_of_the_best_one_itself(cli: Cli, daemon: Any) -> None:
    result = cli(
        "generate", "x", "--best-of", "8", "--temperature", "1", "--logprobs", "0", "--address", daemon.address
    )
    assert result.stdout == "Hello ☃\n"
    assert "[2 tokens (stop), logprob -1.250, first after 0.25 s" in result.stderr
    assert result.stderr.endswith("cached: 16 from disk; 16 tokens in all sequences]\n")


def test_generate_calls_the_figure_of_a_search_a_score(cli: Cli, daemon: Any) -> None:
    assert ", score -1.500," in cli("generate", "x", "--beams", "2", "--address", daemon.address).stderr
    several = cli("generate", "x", "--beams", "2", "--n", "2", "--address", daemon.address)
    assert several.stdout.startswith("[0: 2 tokens, stop, score -1.250]\n")


@pytest.mark.parametrize(
    ("option", "value", "possible"),
    [
        ("--max-tokens", "0", "1 to 4294967295"),
        ("--max-tokens", "99999999999", "1 to 4294967295"),
        ("--temperature", "-1.0", "0 or more"),
        ("--temperature", "nan", "0 or more"),
        ("--temperature", "inf", "0 or more"),
        ("--top-k", "99999999999", "0 to 4294967295"),
        ("--top-p", "1.5", "0 to 1"),
        ("--min-p", "-0.5", "0 to 1"),
        ("--repetition-penalty", "0.0", "0.01 to 100"),
        ("--presence-penalty", "nan", "-2 to 2"),
        ("--frequency-penalty", "3.0", "-2 to 2"),
        ("--seed", str(1 << 64), f"0 to {(1 << 64) - 1}"),
        ("--logprobs", str(MOST_LOGPROBS + 1), f"0 to {MOST_LOGPROBS}"),
        ("--n", "999999999999", f"1 to {MOST_SEQUENCES}"),
        ("--best-of", str(MOST_SEQUENCES + 1), f"1 to {MOST_SEQUENCES}"),
        ("--beams", "0", f"1 to {MOST_BEAMS}"),
        ("--beams", str(MOST_BEAMS + 1), f"1 to {MOST_BEAMS}"),
        ("--length-penalty", "11.0", "-10 to 10"),
    ],
)
def test_generate_refuses_a_number_out_of_its_range_in_one_line(
    cli: Cli, daemon: Any, option: str, value: str, possible: str
) -> None:
    result = cli("generate", "x", option, value, "--address", daemon.address)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"prefixd: {option} is {value}; it must be {possible}\n"
    assert daemon.requests == []


@pytest.mark.parametrize("option", [("--length-penalty", "3"), ("--early-stopping",)])
def test_generate_refuses_options_of_a_search_without_one(cli: Cli, daemon: Any, option: tuple[str, ...]) -> None:
    result = cli("generate", "x", *option, "--address", daemon.address)
    said = f"prefixd: {option[0]} is for a beam search; give --beams too, or leave it out\n"
    assert (result.exit_code, result.stderr, daemon.requests) == (2, said, [])


def test_generate_refuses_what_is_no_text_in_one_line(cli: Cli, daemon: Any) -> None:
    result = cli("generate", "\udcff", "--address", daemon.address)
    assert (result.exit_code, daemon.requests) == (2, [])
    assert result.stderr == "prefixd: text is '\\udcff'; it must be a string that UTF-8 can encode\n"


def test_the_help_says_which_values_are_off(cli: Cli) -> None:
    assert "0 or 1: among all" in cli("generate", "--help").stdout
    assert "auto: the device's free memory" in cli("serve", "--help").stdout


def test_generate_takes_token_ids_and_standard_input(cli: Cli, daemon: Any) -> None:
    result = cli("generate", "--token-ids", "1, 2 300", "--address", daemon.address)
    assert result.stdout == "104 111\n"
    assert daemon.last().token_ids.ids == b"\1\0\0\0\2\0\0\0\x2c\1\0\0"
    assert not daemon.last().sampling.HasField("seed")
    cli("generate", "-", "--address", daemon.address, stdin="from a pipe")
    assert daemon.last().text == "from a pipe"


def test_generate_as_json_prints_an_object_an_event(cli: Cli, daemon: Any) -> None:
    lines = cli("generate", "x", "--json", "--address", daemon.address).stdout.splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["accepted", "tokens", "tokens", "finished"]
    assert events[1]["token_ids"] == [104] and events[2]["text"] == "o ☃"
    assert events[3]["hit_tokens"] == {"gpu": 0, "cpu": 0, "disk": 16, "remote": 0} and events[3]["reason"] == "length"


@pytest.mark.parametrize("arguments", [[], ["text", "--token-ids", "1"], ["--token-ids", "one"]])
def test_generate_refuses_no_prompt_two_prompts_and_nonsense(cli: Cli, arguments: list[str]) -> None:
    assert cli("generate", *arguments).exit_code == 2


def test_without_a_daemon_the_error_says_what_to_do(cli: Cli, tmp_path: Any) -> None:
    for command in (["stats"], ["ls"], ["flush"], ["generate", "x"]):
        result = cli(*command, "--address", f"unix:{tmp_path}/none.sock")
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        assert f"{tmp_path}/none.sock" in result.stderr and "`prefixd serve`" in result.stderr


@pytest.mark.parametrize("address", [[], ["--address", "unix:/run/prefixd.sock"], ["--address", "/run/prefixd.sock"]])
def test_a_token_file_at_a_unix_socket_is_an_error(cli: Cli, tmp_path: Any, address: list[str]) -> None:
    (tmp_path / "token").write_text("secret")
    result = cli("stats", "--token-file", str(tmp_path / "token"), *address)
    assert result.exit_code == 2 and "give --address HOST:PORT, or leave --token-file out" in result.stderr


def test_a_token_variable_at_a_unix_socket_is_ignored(cli: Cli, daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_TOKEN", "secret")
    assert cli("stats", "--address", daemon.address).exit_code == 0


def test_the_configured_socket_is_the_default_address(cli: Cli, tmp_path: Any) -> None:
    (tmp_path / "prefixd.toml").write_text('[server]\nsocket = "mine.sock"\n')
    assert f"{tmp_path}/mine.sock" in cli("stats").stderr


def test_a_file_that_cannot_be_opened_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "secret"))

    monkeypatch.setattr("prefixd.cli.connect.find_socket", refuse)
    result = cli("stats")
    assert (result.exit_code, result.stderr) == (1, f"prefixd: Permission denied: {tmp_path}/secret\n")


def test_the_daemons_refusal_is_one_line(cli: Cli, daemon: Any) -> None:
    daemon.failure = (grpc.StatusCode.NOT_FOUND, "no prefix abcd;\n`prefixd ls` lists them")
    result = cli("inspect", "abcd", "--address", daemon.address)
    assert (result.exit_code, result.stderr) == (1, "prefixd: no prefix abcd; `prefixd ls` lists them\n")
    daemon.failure = (grpc.StatusCode.UNIMPLEMENTED, "this daemon has no model")
    assert "prefixd serve --model" in cli("generate", "x", "--address", daemon.address).stderr


def test_only_a_daemon_that_did_not_answer_may_not_be_running(cli: Cli, daemon: Any) -> None:
    daemon.failure = (grpc.StatusCode.UNAVAILABLE, "the worker was given up: gpu.bytes = 1")
    for command in (("stats",), ("generate", "x")):
        result = cli(*command, "--address", daemon.address)
        said = f"prefixd: the daemon at {daemon.address} answers: the worker was given up: gpu.bytes = 1\n"
        assert (result.exit_code, result.stderr) == (1, said)
    daemon.answers = False  # gRPC's own UNAVAILABLE, such as of a connection that broke
    assert "Is it running?" in cli("stats", "--address", daemon.address).stderr


class OldHttp(socketserver.BaseRequestHandler):
    """Answers as a server that knows HTTP/1 alone."""

    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


def test_an_http_port_is_told_from_a_daemon_that_does_not_run(cli: Cli) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OldHttp) as server:
        answering = threading.Thread(target=server.serve_forever)
        answering.start()
        try:
            result = cli("stats", "--address", f"127.0.0.1:{server.server_address[1]}")
        finally:
            server.shutdown()
            answering.join()
    assert result.exit_code == 1
    assert "An HTTP port is there; give the socket, or the port of server.tcp" in result.stderr
    assert "Is it running?" not in result.stderr


@pytest.mark.parametrize("address", ["nonsense", "http://gpu-1:7070", "[::1", "::1:7070", "gpu-1:0"])
def test_an_address_that_is_none_is_refused(cli: Cli, address: str) -> None:
    result = cli("stats", "--address", address)
    assert result.exit_code == 2
    assert address in result.stderr and "host:port" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["tenants", "set", "acme"],
        ["stats", "--token-file", "/nowhere", "--address", "gpu-1:7070"],
        ["stats", "--tls-ca", "/nowhere", "--address", "gpu-1:7070"],
        ["pin", "--prompt-file", "/nowhere"],
        ["trace", "record", __file__],
        ["what-if", "--plot", "/nowhere/plot.txt"],
    ],
)
def test_what_is_called_wrongly_ends_with_2(cli: Cli, arguments: list[str]) -> None:
    assert cli(*arguments).exit_code == 2


def test_a_value_that_the_daemon_calls_wrong_ends_with_2_and_one_that_it_has_not_with_1(cli: Cli, daemon: Any) -> None:
    others = (
        "NOT_FOUND ALREADY_EXISTS RESOURCE_EXHAUSTED FAILED_PRECONDITION PERMISSION_DENIED UNAUTHENTICATED INTERNAL"
    )
    for status, code in (
        (grpc.StatusCode.INVALID_ARGUMENT, 2),
        *((grpc.StatusCode[name], 1) for name in others.split()),
    ):
        daemon.failure = status, "the key is wrong"
        failed = cli("inspect", "xyz", "--address", daemon.address, "--json")
        assert failed.exit_code == code == json.loads(failed.stdout)["error"]["exit_status"]
        assert json.loads(failed.stdout)["error"]["status"] == status.name


def test_config_show_names_sources(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_CPU__BYTES", "2GiB")
    out = cli(
        "config", "show", "--set", "cache.eviction=fifo", "--set", "worker.embedded=true", "--set", "gpu.bytes=auto"
    ).stdout
    assert "2147483648 (2.0 GiB)" in out and "PREFIXD_CPU__BYTES" in out and "the command line" in out
    shown = json.loads(cli("config", "show", "--json").stdout)
    assert shown["cpu.bytes"] == {"value": 2 << 30, "source": "PREFIXD_CPU__BYTES"}
    assert shown["disk.bytes"]["source"] == "default"
    assert "The block that a full tier evicts first" in cli("config", "show", "--describe").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cpu-bytes", "12QiB"], "cpu.bytes = '12QiB'"),
        (["--policy", "sjf"], "'shortest-ready' or 'deadline'"),
        (["--eviction", "mru"], "'s3-fifo' or 'weighing'"),
        (["--gpu-bytes", "1GiB"], "without a model there is no GPU tier"),
        (["--embedded", "--model", "/nowhere"], "keep one"),
        (["--model", "/nowhere"], "/nowhere is not a directory"),
        (["--tcp", "localhost"], "host:port"),
        (["--metrics", "70000"], "server.metrics = '70000': write host:port"),
        (["--set", "server.metrics_port=9470"], 'server.metrics = "127.0.0.1:PORT"'),
        (["--http", "0.0.0.0:8000"], "server.insecure_http = true"),
        (["--look-ahead", "many"], "scheduler.look_ahead = 'many'"),
        (["--config", "missing.toml"], "missing.toml: No such file"),
        (["--data-dir", "/dev/null"], "/dev/null is not a directory"),
        (["--set", "cpu.bytes"], "--set section.setting=value"),
        (["--set", "cpu.bites=1"], "did you mean cpu.bytes?"),
        (["--cpu-bytes", "1GiB", "--set", "cpu.bytes=2GiB"], "by its flag and by --set"),
    ],
)
def test_serve_refuses_what_cannot_work_in_one_line(cli: Cli, arguments: list[str], words: str) -> None:
    result = cli("serve", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_demo_whose_figures_cannot_be_written_ends_before_it_begins(cli: Cli, tmp_path: Any) -> None:
    for path in (tmp_path, tmp_path / "none" / "demo.json"):
        result = cli("demo", "--out", str(path))
        assert result.exit_code == 2
        assert result.stderr.startswith(f"prefixd: cannot write to {path}") and result.stderr.count("\n") == 1
