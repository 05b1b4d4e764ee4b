"""The table of attention costs that the worker plans by, from what the part `attention` measured.

    python -m benchmarks.gpu_parts.rig.choice_table benchmarks/results/nvidia_h200.json TABLE.json

writes the table of an earlier result. The part itself writes one beside its result.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu_parts.rig.kv import GQA, MHA, MQA, SMALL, Heads
from prefixd.worker.attention.choice.cost_table import ALONE, TOGETHER, CostPoint, CostTable, HeadCosts, split
from prefixd.worker.attention.choice.pass_plan import SPLITS

WAYS = {"contiguous": TOGETHER, "request": ALONE, "alone": ALONE, **{f"split{count}": split(count) for count in SPLITS}}
"""The benchmark's ways that the worker may choose. Results from before "alone" was measured have torch's public
function for each request in its place."""


def costs_of(
    points: Sequence[Mapping[str, Any]], shapes: Sequence[Heads], new_tokens: int, device: str, source: str
) -> CostTable | None:
    """The table of the points in which a way was measured that the worker may choose; None if there are none."""
    heads = []
    for shape in shapes:
        for layout in ("token", "layer"):
            own = [point for point in points if (point["shape"], point["layout"]) == (shape.name, layout)]
            measured = [
                CostPoint(
                    1 if point["phase"] == "decode" else point.get("new_tokens", new_tokens),
                    point["batch"],
                    point["tokens"],
                    us,
                )
                for point in own
                if (us := {name: point[f"{way}_us"] for way, name in WAYS.items() if f"{way}_us" in point})
            ]
            if measured:
                heads.append(HeadCosts(shape.query_heads, shape.kv_heads, shape.head_dim, layout, measured))
    return CostTable(device, source, heads) if heads else None


def text_of(table: CostTable) -> str:
    """The file of a table."""
    text: bytes = msgspec.json.format(msgspec.json.encode(table), indent=1)
    return text.decode() + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=Path, help="a result of benchmarks.gpu")
    parser.add_argument("table", type=Path, help="the file to write")
    options = parser.parse_args()
    result = json.loads(options.result.read_text())
    part = result["parts"]["attention"]
    source = f"{options.result.name}, commit {result['circumstances']['commit']}"
    shapes = (GQA, MHA, MQA) if result["figures"] == "measured" else SMALL
    table = costs_of(part["points"], shapes, part["new_tokens_of_prefill"], result["device"], source)
    if table is None:
        parser.error(f"{options.result} has no point of a way that the worker may choose: {', '.join(WAYS)}")
    options.table.write_text(text_of(table))


if __name__ == "__main__":
    main()
