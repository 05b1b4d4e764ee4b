"""The documentation names settings and metrics that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.server.figures.metrics import METRIC, METRICS
from prefixd.settings.settings import Settings, dotted_names
from prefixd.v1 import admin_pb2

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def metrics(message: Any = admin_pb2.StatsResponse.DESCRIPTOR, prefix: str = "prefixd_") -> Iterator[str]:
    for field in message.fields:
        options = field.GetOptions()
        if options.HasExtension(METRIC):
            metric = options.Extensions[METRIC]
            yield prefix + (metric.name or field.name) + ("_total" if metric.counter else "")
        elif options.HasExtension(METRICS):
            yield from metrics(field.message_type, prefix + options.Extensions[METRICS].prefix)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics(page: Path) -> None:
    known = set(metrics())
    named = set(re.findall(r"`(prefixd_(?!swap|scheduler)\w+)", page.read_text()))  # `prefixd_remote_*` is a beginning
    assert [name for name in named if name not in known and not any(each.startswith(name) for each in known)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings(page: Path) -> None:
    sections = "|".join(section for section in Settings.model_fields if section != "tenants")
    named = set(re.findall(rf"`((?:{sections})\.(?!py\b|json\b|proto\b)[a-z_]+)(?: = [^`]*)?`", page.read_text()))
    assert named - set(dotted_names()) == set()
