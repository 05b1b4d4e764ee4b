"""The table of blocks in docs/models.md is what the rule gives for the known models."""

from __future__ import annotations

from pathlib import Path

from prefixd.planner.planned_models import MODELS, LayerGroup
from prefixd_swap.block_size import SHORT_BLOCK, choose_blocks, padding_share
from prefixd_swap.group_shape import KvGeometry

_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_FURTHER = {
    "qwen2.5-1.5b": (LayerGroup(28, 2, 128),),
    "qwen2.5-32b with qwen2.5-0.5b as a draft": (LayerGroup(64, 8, 128), LayerGroup(24, 2, 64)),
    "qwen3-0.6b": (LayerGroup(28, 8, 128),),
    "gemma-2-27b": (LayerGroup(23, 16, 128), LayerGroup(23, 16, 128)),
    "gemma-3-1b": (LayerGroup(4, 1, 256), LayerGroup(22, 1, 256)),
    "gpt-oss-20b": (LayerGroup(12, 8, 64), LayerGroup(12, 8, 64)),
    "gpt-oss-120b": (LayerGroup(18, 8, 64), LayerGroup(18, 8, 64)),
    "jamba-1.5-mini": (LayerGroup(4, 8, 128),),
    "qwen3-next-80b": (LayerGroup(12, 2, 256),),
    "bamba-9b": (LayerGroup(3, 8, 128),),
    "gemma-3-270m": (LayerGroup(3, 1, 256), LayerGroup(15, 1, 256)),
    "gemma-3n-e2b": (LayerGroup(4, 2, 256), LayerGroup(16, 2, 256)),
    "lfm2-1.2b": (LayerGroup(6, 8, 64),),
    "llama-3.2-11b-vision": (LayerGroup(32, 8, 128),),
    "llama-4-scout": (LayerGroup(12, 8, 128), LayerGroup(36, 8, 128)),
    "nemotron-h-8b": (LayerGroup(4, 8, 128),),
    "recurrentgemma-2b": (LayerGroup(8, 1, 256),),
}
_ALL = {model.name: model.groups for model in MODELS.values() if model.element_bytes == 2} | _FURTHER


def _row(name: str, groups: tuple[LayerGroup, ...]) -> str:
    asked = [KvGeometry(group.layers, group.kv_heads, group.head_dim, "bfloat16", 16) for group in groups]
    auto, none = (choose_blocks(asked, 2 << 20, padding) for padding in ("auto", "none"))
    assert 16 <= auto[0].block_tokens <= SHORT_BLOCK
    sizes = " + ".join(str(one.token_bytes >> 10) for one in auto)
    strides = " + ".join(str(one.stride >> 10) for one in auto)
    padding = f"{padding_share(auto):.0%}"
    return f"| {name} | {sizes} | {auto[0].block_tokens} | {strides} | {padding} | {none[0].block_tokens} |"


def test_the_table_has_what_the_rule_gives_and_no_listed_model_has_blocks_of_more_than_64_tokens() -> None:
    rows = [_row(name, groups) for name, groups in sorted(_ALL.items())]
    heads = "|---|---|---|---|---|---|\n"
    found = _PAGE.read_text().partition(heads)[2].partition("\n\n")[0].splitlines()
    assert found == rows, "put these rows there:\n" + "\n".join(rows)
