"""The page of all results: of the committed ones, and what is refused."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.common.harness import BenchmarkError
from benchmarks.report import SECTIONS, main
from benchmarks.report_parts import plan, served
from benchmarks.report_parts import text_analysis_rows as text_analysis
from benchmarks.report_parts.results import Result, read_results

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


class Page(HTMLParser):
    """What a browser would show and fetch."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.images: list[str] = []
        self.addresses: list[str] = []
        self._text: list[str] = []
        self.source = file.read_text()
        self.feed(self.source)
        self.text = " ".join(" ".join(self._text).split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attributes)
        self.addresses += [address for name in ("src", "href") if (address := given.get(name)) is not None]
        if tag == "img":
            self.images.append(str(given["src"]))

    def handle_data(self, data: str) -> None:
        if self.get_starttag_text() != "<style>":
            self._text.append(data)


@pytest.mark.slow
def test_the_committed_results_are_a_page_that_fetches_nothing(tmp_path: Path) -> None:
    main([str(RESULTS), "--output", str(tmp_path / "report.html")])
    page = Page(tmp_path / "report.html")
    assert page.text.startswith("prefixd: results ")
    assert len(page.images) >= len(SECTIONS)
    for image in page.images:
        kind, _, data = image.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("}svg")
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert not page.tags & {"script", "link", "iframe"} and "@import" not in page.source and "url(" not in page.source
    # The answers come first, and every kind of result has its section.
    results = {result.benchmark: result for result in read_results(RESULTS)}
    assert results.keys() >= SECTIONS.keys()
    text = page.text
    assert "Which policy" in text[:300] and "How much memory" in text[:600]
    top = text[: text.index("Does the queue keep up?")]
    for words in ("Chat", "Search, agents", "Text analysis", "GiB CPU", "TiB disk", "Eviction"):
        assert words in top, words


def test_what_is_no_result_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="no folder; name one"):
        main([str(tmp_path / "none")])
    with pytest.raises(BenchmarkError, match=r"has no \*.json"):
        main([str(tmp_path)])
    file = tmp_path / "a.json"
    drawn = json.loads((RESULTS / "scheduler.json").read_text())
    drawn["decision_us"]["vllm"]["lpm"]["p99"] = "fast"  # only the picture adds them up
    del drawn["longest_wait_s"]["lpm"]
    for content, why in [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "no result"),
        ('{"benchmark": "chat"}', "run it again"),
        ('{"benchmark": "mine", "circumstances": "none"}', '"circumstances" is no object'),
        (json.dumps(drawn), "run it again"),
    ]:
        file.write_text(content)
        with pytest.raises(BenchmarkError, match=rf"a\.json.*{why}"):
            main([str(tmp_path)])
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(BenchmarkError):
        main([str(tmp_path), "--output", str(tmp_path / "new" / "report.html")])
    assert not (tmp_path / "new").exists()


def test_a_result_without_a_section_is_a_table_and_nothing_in_it_is_markup(tmp_path: Path) -> None:
    content = {
        "benchmark": "new",
        "name": "<b>&",
        "parts": {"ratio": 0.12345678, "on": True, "none": None},
        "list": [1],
    }
    (tmp_path / "new.json").write_text(json.dumps(content))
    main([str(tmp_path)])
    text = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;&amp;" in text and "<b>&" not in text
    assert "parts.ratio" in text and "0.1235" in text


def _way(name: str, rate: float, wait: float, share: float, **more: Any) -> dict[str, Any]:
    hits = {"gpu": 1, "cpu": 0, "disk": 0}
    waits = {"p50": wait, "p95": wait}
    return {"name": name, "requests_per_s": rate, "ttft_s": waits, "hit_tokens": hits, "hit_share": share, **more}


def _chat(*ways: tuple[str, str, float, float, float]) -> Result:
    """A result of chat with these ways: policy, tiers, requests a second, median wait, share found."""
    content = {
        "benchmark": "chat",
        "conversations": 12,
        "users": 16,
        "mean_turns": 4.4,
        "turns": 5.75,
        "source": "generator",
        "gpu_share": 0.0,
        "cpu_share": 0.3,
        "same_answers": True,
        "ways": [
            _way(f"{policy} {tiers}", rate, wait, share, policy=policy, tiers=tiers)
            for policy, tiers, rate, wait, share in ways
        ],
    }
    return Result("chat", content, "chat.json")


def test_chat_chooses_by_the_first_token_and_the_default_where_policies_are_alike() -> None:
    everything = "gpu+cpu+disk"
    ways = [("relaxed-fpf", "", 0.77, 0.8, 0.0), ("relaxed-fpf", "gpu", 0.9, 0.4, 0.87)]
    slow = served.chat(
        _chat(*ways, ("relaxed-fpf", everything, 0.93, 0.2, 1.0), ("shortest-ready", everything, 0.91, 0.06, 0.99))
    )
    (choice,) = slow.choices
    assert choice.policy == "shortest-ready", "although relaxed-fpf serves 2% more requests a second"
    assert choice.memory == "GPU for what runs, CPU for 30%, disk for all" and "gpu 87%" in choice.memory_why
    assert "12 conversations of 4.4 turns on average" in slow.finding and "up to 12 at once" in slow.finding
    alike = served.chat(
        _chat(*ways, ("relaxed-fpf", everything, 0.93, 0.062, 1.0), ("shortest-ready", everything, 0.91, 0.06, 0.99))
    )
    assert alike.choices[0].policy == "relaxed-fpf"
    enough = served.chat(_chat(*ways, ("relaxed-fpf", everything, 0.93, 0.2, 0.88)))
    assert enough.choices[0].memory == "GPU for what runs"


def test_text_analysis_with_a_header_is_about_the_first_token_and_chooses_no_policy_by_requests_a_second() -> None:
    content = json.loads((RESULTS / "text_analysis_header_16.json").read_text())
    section = text_analysis.section(Result("text_analysis", content, "text_analysis_header_16.json"))
    assert section.anchor == "text_analysis_header_16" and not section.choices
    assert "header of 16 of 512 tokens" in section.title
    waits = {way["name"]: way["ttft_s"]["p50"] for way in content["configs"]}
    assert all(f"{name} {wait:.3g} s" in section.finding for name, wait in waits.items())
    assert section.tables[0].best == list(waits).index(min(waits, key=lambda name: waits[name]))
    assert [row[2] for row in section.tables[1].rows] == [f"{goal['value']:.2f}" for goal in content["goals"]]


def test_text_analysis_compares_policies_at_one_length_only() -> None:
    def way(name: str, rate: float, length: int, **more: Any) -> dict[str, Any]:
        serving = {"name": name, "caching": name != "no-cache", "everything": name == "everything"}
        return _way(name, rate, 1.0, 1.0, prefix_tokens=length, serving=serving, disk_bytes_per_s=None, **more)

    sizes = {"prefixes": 128, "gpu_prefixes": 8, "cpu_prefixes": 32, "disk_prefixes": 128}
    ways = [
        *(way(name, rate, 512) for name, rate in [("no-cache", 3.0), ("fcfs", 30.0), ("fpf", 33.0)]),
        *(
            way(name, rate, 2048)
            for name, rate in [("no-cache", 0.5), ("fcfs", 10.0), ("fpf", 15.0), ("everything", 90)]
        ),
    ]
    content = {"requests": 512, "same_answers": True, "goals": [], "configs": ways, **sizes}
    section = text_analysis.section(Result("text_analysis", content, "text_analysis.json"))
    (choice,) = section.choices
    assert choice.policy == "fpf" and choice.memory == "GPU for 6%, CPU for 25%, disk for all"
    assert (
        choice.gain
        == "requests/s over no cache: 11 times with prefixes of 512 tokens, 30 times with prefixes of 2,048 tokens"
    )
    names = [row[0] for row in section.tables[0].rows]
    assert len(set(names)) == len(names), "bars of one name would lie on each other"
    cached = content | {"configs": ways[1:3]}
    (choice,) = text_analysis.section(Result("text_analysis", cached, "text_analysis.json")).choices
    assert choice.gain == "requests/s over no cache: not measured", "the suite `eviction` has no run without one"


def test_a_plan_chooses_the_policy_with_the_soonest_first_token_at_the_sizes_that_are_enough() -> None:
    def point(policy: str, cpu: int, wait: float) -> dict[str, Any]:
        return {
            "cpu_bytes": cpu << 30,
            "disk_bytes": 1 << 40,
            "policy": policy,
            "eviction": "lru",
            "hit_rate": 0.25,
            "hits": {"gpu": 0.25},
            "achievable_hit_rate": 0.4,
            "ttft_s": {"p50": wait, "p95": wait},
            "requests": 10,
            "requests_per_s": 1.0,
            "disk_written_bytes": 0,
            "gpu_busy": 0.5,
        }

    points = [point("fcfs", 64, 9.0), point("shortest-ready", 64, 2.0), point("lpm", 256, 1.0)]
    enough = {name: points[0][name] for name in ("cpu_bytes", "disk_bytes", "policy", "eviction")}
    content = {"points": points, "enough": enough, "model": "m", "trace": "t.jsonl", "planning_s": 1.0, "curve": None}
    (choice,) = plan.section(Result("plan", content | {"assumptions": []}, "plan.json")).choices
    assert (choice.policy, choice.memory) == ("shortest-ready", "64 GiB CPU, 1 TiB disk")
    assert "fcfs with lru 9 s" in choice.policy_why and "lpm" not in choice.policy_why


def test_a_name_with_dollar_signs_is_drawn_as_it_is(tmp_path: Path) -> None:
    plan = json.loads((RESULTS / "plan.json").read_text())
    for point in plan["points"]:
        point["eviction"] = plan["enough"]["eviction"] = "$x_{$ <script>"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    main([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "$x_{$ &lt;script&gt;" in page and "<script>" not in page
