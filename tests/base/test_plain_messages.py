"""Messages as JSON types: whatever a client sent, every JSON parser reads them."""

from __future__ import annotations

import json
import math

from prefixd.base.plain_messages import to_plain
from prefixd.v1 import admin_pb2 as pb


def test_numbers_that_json_does_not_have_are_left_out() -> None:
    tier = pb.GhostTier(hit_rates={"1": math.nan, "2": 0.5}, seconds_per_byte=math.inf)
    plain = to_plain(pb.GhostStats(watched_s=-math.inf, asked_tokens=1.5, tiers=[tier]))
    assert (plain["watched_s"], plain["asked_tokens"]) == (None, 1.5)
    assert plain["tiers"][0]["hit_rates"] == {"1": None, "2": 0.5} and plain["tiers"][0]["seconds_per_byte"] is None
    json.dumps(plain, allow_nan=False)
