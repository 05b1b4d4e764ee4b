"""A pass is planned by what was measured on the device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu_parts.rig.choice_table import costs_of, text_of
from benchmarks.gpu_parts.rig.kv import GQA
from prefixd.worker.attention.choice.cost_table import ALONE, TOGETHER, CostPoint, HeadCosts, read_costs
from prefixd.worker.attention.choice.pass_plan import CheapestPlan, PassPlan, may_split
from prefixd.worker_protocol.errors import ModelError

DEVICES = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]


def heads_of(*points: CostPoint) -> HeadCosts:
    return HeadCosts(32, 8, 128, "token", list(points))


def way_of(plan: PassPlan) -> str:
    """The way of a batch of equal sequences."""
    ways = {TOGETHER: bool(plan.together or plan.decodes), ALONE: bool(plan.alone)}
    ways[f"split {plan.pieces}"] = bool(plan.split)
    (way,) = (name for name, used in ways.items() if used)
    return way


@pytest.mark.parametrize("device", DEVICES)
def test_no_choice_costs_a_tenth_more_than_the_best_that_was_measured(device: str) -> None:
    table = read_costs(device)
    assert table.device == device
    seen = 0
    for heads in table.heads:
        plan = CheapestPlan(heads, can_split=True, can_alone=True)
        for point in heads.points:
            usable = {
                way: us
                for way, us in point.us.items()
                if not way.startswith("split") or may_split(point.queries, point.tokens + point.queries, int(way[6:]))
            }
            count = point.batch
            planned = plan([point.queries] * count, [point.tokens + point.queries] * count)
            assert point.us[way_of(planned)] <= 1.1 * min(usable.values()), (heads, point, planned)
            seen += 1
    assert seen > 80


def test_a_device_without_a_table_has_the_one_of_an_h100() -> None:
    assert read_costs("Example 9000").device == DEVICES[0]
    heads = read_costs("NVIDIA H200").of(28, 4, 128, "layer")
    assert (heads.query_heads // heads.kv_heads, heads.layout) == (4, "layer")


def test_long_prompts_are_planned_apart_from_short_ones_and_from_decodes() -> None:
    costs = heads_of(
        CostPoint(1, 8, 8192, {TOGETHER: 100.0, ALONE: 400.0}),
        CostPoint(128, 1, 32768, {TOGETHER: 994.0, ALONE: 247.0, "split 8": 300.0}),
        CostPoint(128, 8, 32768, {TOGETHER: 1561.0, ALONE: 1806.0, "split 8": 900.0}),
        CostPoint(128, 1, 1024, {TOGETHER: 76.0, ALONE: 125.0}),
        CostPoint(128, 8, 1024, {TOGETHER: 108.0, ALONE: 587.0}),
    )
    plan = CheapestPlan(costs, can_split=True, can_alone=True)
    short = [1024 + 128] * 3
    decodes = [1] * 4
    assert plan([*decodes, 128, *[128] * 3], [9000] * 4 + [32768 + 128, *short]) == PassPlan(
        together=(5, 6, 7), decodes=(0, 1, 2, 3), alone=(4,)
    )
    assert plan([128] * 11, [32768 + 128] * 8 + short) == PassPlan(together=(8, 9, 10), split=tuple(range(8)), pieces=8)
    assert plan([128], [32768 + 128], captured=True) == PassPlan(split=(0,), pieces=8), (
        "a replay fixes no place of keys"
    )
    without_split = CheapestPlan(costs, can_split=False, can_alone=True)
    assert without_split([128] * 8, [32768 + 128] * 8).one_call
    assert plan([1] * 64, [8193] * 64) == PassPlan(decodes=tuple(range(64)))
    assert plan([1] * 64, [8193] * 64).one_call
    assert plan([2], [2]).one_call, "a first prompt has nothing before it"


def test_captured_decodes_without_shared_heads_are_split_by_an_estimate() -> None:
    """One query keeps one thread block a head busy, as long as there are few sequences."""
    table = read_costs("NVIDIA H100 80GB HBM3")
    alone, shared = (
        CheapestPlan(table.of(32, heads, 128, "token"), can_split=True, can_alone=True) for heads in (32, 8)
    )
    assert alone([1], [32769], captured=True).pieces > 1
    assert alone([1] * 4, [8193] * 4, captured=True).pieces > 1
    for batch, keys in ((1, 1025), (8, 8193), (64, 1025), (64, 32769)):
        assert alone([1] * batch, [keys] * batch, captured=True).one_call
    for batch, keys in ((1, 32769), (8, 8193), (64, 1025)):
        assert shared([1] * batch, [keys] * batch, captured=True).one_call, "the kernel splits them"


def test_the_benchmark_writes_what_the_worker_reads(tmp_path: Path) -> None:
    points = [
        {"shape": "gqa", "layout": "token", "phase": "decode", "batch": 2, "tokens": 128, "contiguous_us": 9.0},
        {"shape": "gqa", "layout": "token", "phase": "prefill", "batch": 2, "tokens": 128, "split8_us": 5.0},
        {"shape": "gqa", "layout": "layer", "phase": "decode", "batch": 2, "tokens": 128, "paged_us": 9.0},
    ]
    table = costs_of(points, [GQA], 16, "Example 9000", "a run")
    assert table is not None
    (tmp_path / "table.json").write_text(text_of(table))
    assert read_costs("", str(tmp_path / "table.json")) == table
    assert table.heads == [
        heads_of(CostPoint(1, 2, 128, {TOGETHER: 9.0}), CostPoint(16, 2, 128, {"split 8": 5.0})),
    ]


def table_with(heads: Mapping[str, object] | None = None, **point: object) -> str:
    """A table of one point, as text."""
    points = [{"queries": 1, "batch": 8, "tokens": 1024, "us": {TOGETHER: 9.0}} | point]
    shape = {"query_heads": 8, "kv_heads": 8, "head_dim": 64, "layout": "token", "points": points} | dict(heads or {})
    return json.dumps({"device": "a", "source": "b", "heads": [shape]})


def test_a_table_of_one_point_is_read(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(table_with())
    costs = read_costs("NVIDIA H200", str(tmp_path / "table.json")).of(32, 8, 128, "layer")
    assert costs.cheapest(1, 64, 0, (ALONE, "split 8")) == costs.cheapest(128, 1, 9, (ALONE,)) == TOGETHER


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[",
        '{"device": "a", "source": "b", "heads": []}',
        table_with(batch=0),
        table_with(tokens=0),
        table_with(queries=-1),
        table_with(us={TOGETHER: -9.0}),
        table_with({"points": []}),
        table_with({"kv_heads": 0}),
        table_with({"kv_heads": 16}),
    ],
)
def test_a_file_that_has_no_table_is_refused_with_the_remedy(tmp_path: Path, content: str) -> None:
    file = tmp_path / f"{len(content)}.json"
    file.write_text(content)
    with pytest.raises(ModelError, match=r"worker.attention_costs = .*leave it out"):
        read_costs("NVIDIA H200", str(file))
    assert json.loads(msgspec.json.encode(read_costs("NVIDIA H200")))["device"] == "NVIDIA H200"
