"""How a prefix looks to people that has several KV groups, and that one with a single group looks as ever."""

from __future__ import annotations

import pytest

from prefixd.cli.output import json_values as plain
from prefixd.cli.output.tables import prefix_tables as render
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import cache_pb2

FULL = pb.GroupInfo(names=["full"], parts=1, rule="full attention", block_bytes=1 << 20, blocks=3)
STATES = pb.GroupInfo(names=["ssm:0", "ssm:1"], parts=2, rule="recurrent state", block_bytes=4 << 20, blocks=1)


def inspection(*groups: pb.GroupInfo) -> pb.InspectResponse:
    def there(state: bool) -> list[pb.TierGroups]:
        cpu = pb.TierGroups(tier=cache_pb2.TIER_CPU, groups=[0])
        return [cpu, pb.TierGroups(tier=cache_pb2.TIER_DISK, groups=[0, 1])] if state else [cpu]

    blocks = [pb.BlockInfo(index=index, key="ab" * 16, there=there(index == 2)) for index in range(3)]
    return pb.InspectResponse(prefix=pb.PrefixInfo(key="ab" * 16, blocks=3, groups=groups), blocks=blocks)


def test_each_group_has_a_line_and_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_inspection(inspection(FULL, STATES), tokens=False)
    out = capsys.readouterr().out
    assert "full: full attention, 1.0 MiB a block, 3 of 3 blocks" in out
    assert "ssm:0 +1: recurrent state, 4.0 MiB a block, 1 of 3 blocks" in out
    rows = [line.split()[2:-2] for line in out.splitlines() if line.split()[1:2] == ["ab" * 6]]
    assert [row[:3] for row in rows] == [["cpu", "-", "0"], ["cpu", "-", "0"], ["cpu", "disk", "disk"]]


def test_a_rule_is_named_where_it_is_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_inspection(inspection(STATES), tokens=False)
    out = capsys.readouterr().out
    assert "recurrent state" in out and "tiers" in out


def test_full_attention_alone_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_inspection(inspection(FULL), tokens=False)
    render.print_prefixes([pb.PrefixInfo(key="ab" * 16, groups=[FULL])], 1)
    out = capsys.readouterr().out
    assert "full" not in out and "groups" not in out


def test_the_list_counts_the_blocks_of_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_prefixes([pb.PrefixInfo(key="ab" * 16, groups=[FULL, STATES]), pb.PrefixInfo(groups=[FULL])], 2)
    out = capsys.readouterr().out
    assert "groups" in out and "full 3, ssm:0 +1 1" in out


def test_json_has_the_groups() -> None:
    shown = plain.to_plain(inspection(FULL, STATES))
    assert [group["rule"] for group in shown["prefix"]["groups"]] == ["full attention", "recurrent state"]
    assert shown["blocks"][2]["there"] == [{"tier": "cpu", "groups": [0]}, {"tier": "disk", "groups": [0, 1]}]
