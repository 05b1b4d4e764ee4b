"""What ways to compute attention cost on a device, as measured there: a table in JSON that `benchmarks.gpu` writes.

Tables of a few devices come with prefixd. A way's name is "together" (one call for all sequences), "alone" (a call for
each) or "split 8" (the keys of each in 8 pieces, then merged).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec

from prefixd.worker_protocol.errors import ModelError

TOGETHER, ALONE = "together", "alone"
_TABLES = Path(__file__).parent / "tables"
_DEFAULT = "nvidia_h100"
_MERGE_US = 12.0  # predicted: two small kernels; `benchmarks.gpu` measures ways to split as a whole

_Number = Annotated[int, msgspec.Meta(ge=1)]
_Microseconds = Annotated[float, msgspec.Meta(ge=0)]


def split(pieces: int) -> str:
    """The name of the way."""
    return f"split {pieces}"


def pieces_of(way: str) -> int:
    """The pieces of a way that splits keys; 1 for another."""
    return int(way.removeprefix("split ")) if way.startswith("split ") else 1


class CostPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured: `batch` sequences, each with `queries` new tokens behind `tokens` others. us: microseconds, by way."""

    queries: _Number
    batch: _Number
    tokens: _Number
    us: dict[str, _Microseconds]


class HeadCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The points of one shape of heads in one layout of KV."""

    query_heads: _Number
    kv_heads: _Number
    head_dim: _Number
    layout: str
    points: list[CostPoint]

    def cheapest(self, queries: int, batch: int, tokens: int, ways: Collection[str], *, estimate: bool = False) -> str:
        """The cheapest of `ways` and `TOGETHER` at the nearest point; `TOGETHER` if none was measured.

        A call for each sequence costs as many times more as there are more sequences than at that point; the others are
        taken to cost what they do there.
        estimate: a way to split that was not measured there costs what so many more sequences, of so many fewer keys,
            cost in one call, and merging; as far as so many were measured.
        """
        near = self._nearest(queries, batch, tokens)
        if near is None:
            return TOGETHER
        costs = {way: near.us[way] for way in (TOGETHER, *ways) if way in near.us}
        if ALONE in costs:
            costs[ALONE] *= batch / near.batch
        for way in ways if estimate else ():
            count = batch * pieces_of(way)
            if way not in near.us and way != ALONE and count <= max(point.batch for point in self.points):
                alike = self._nearest(queries, count, tokens // pieces_of(way))
                if alike is not None and TOGETHER in alike.us:
                    costs[way] = alike.us[TOGETHER] + _MERGE_US
        return min(costs, key=costs.__getitem__, default=TOGETHER)

    def _nearest(self, queries: int, batch: int, tokens: int) -> CostPoint | None:
        """The nearest point, of those with single queries or of those with several."""
        points = [point for point in self.points if (point.queries == 1) == (queries == 1)]
        wanted = (queries, batch, max(tokens, 1))
        return min(
            points,
            key=lambda point: _distance(wanted, (point.queries, point.batch, point.tokens)),
            default=None,
        )


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table of a device. device: as torch names it. source: the run that measured it."""

    device: str
    source: str
    heads: list[HeadCosts]

    def of(self, query_heads: int, kv_heads: int, head_dim: int, layout: str) -> HeadCosts:
        """The costs of the shape that is most like this one."""

        def distance(costs: HeadCosts) -> tuple[float, bool]:
            shape = (costs.kv_heads, costs.query_heads // costs.kv_heads, costs.head_dim)
            return _distance(shape, (kv_heads, query_heads // kv_heads, head_dim)), costs.layout != layout

        return min(self.heads, key=distance)


def read_costs(device: str, file: str = "") -> CostTable:
    """The table in `file`; without one, the table of this device that comes with prefixd, or that of an H100.

    Raises ModelError for a file that has none.
    """
    if file:
        return _read(Path(file))
    known = {table.device: table for table in map(_read, sorted(_TABLES.glob("*.json")))}
    return known.get(device) or _read(_TABLES / f"{_DEFAULT}.json")


@functools.cache
def _read(file: Path) -> CostTable:
    try:
        table = msgspec.json.decode(file.read_bytes(), type=CostTable)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(
            f"worker.attention_costs = {str(file)!r} has no table of attention costs ({error}); give the file that "
            "benchmarks.gpu wrote on this device, or leave it out"
        ) from error
    if not table.heads or not all(costs.points and costs.query_heads % costs.kv_heads == 0 for costs in table.heads):
        raise ModelError(
            f"worker.attention_costs = {str(file)!r} has shapes of heads without a point, or with query heads that "
            "are no multiple of the KV heads; leave it out"
        )
    return table


def _distance(these: tuple[int, ...], others: tuple[int, ...]) -> float:
    return sum((math.log2(this) - math.log2(other)) ** 2 for this, other in zip(these, others, strict=True))
