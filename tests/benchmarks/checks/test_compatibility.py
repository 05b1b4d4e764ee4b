"""What became of a release's features, and the table that says so."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmarks.checks.compatibility import RESULTS, TABLE, _outcomes, _worst, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.vllm.test_hits" file="tests/vllm/test_hits.py" name="test_cold_then_warm"/>
<testcase classname="tests.vllm.test_hits" file="tests/vllm/test_hits.py" name="test_more[a]"/>
<testcase classname="tests.vllm.test_hits" name="test_more[b]"><failure message="wrong">wrong</failure></testcase>
<testcase classname="tests.vllm.test_media" name="test_images"><skipped message="has none"/></testcase>
<testcase classname="tests.vllm.test_media" name="test_broken"><error message="setup">setup</error></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("tests", "outcome"),
    [
        (["test_hits.py::test_cold_then_warm"], "passed"),
        (["test_hits.py::test_more"], "failed"),
        (["test_hits.py"], "failed"),
        (["test_media.py::test_images"], "skipped"),
        (["test_media.py::test_images", "test_hits.py::test_cold_then_warm"], "passed"),
        (["test_media.py::test_broken"], "failed"),
        (["test_media.py::test_that_was_not_collected"], "failed"),
    ],
)
def test_a_feature_is_as_good_as_its_worst_test(tests: list[str], outcome: str) -> None:
    assert _worst(tests, _outcomes(ElementTree.fromstring(REPORT))) == outcome


def test_the_table_is_what_the_last_run_says() -> None:
    assert TABLE.read_text() == table(json.loads(RESULTS.read_text())["rows"])
