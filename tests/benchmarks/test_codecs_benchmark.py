"""The benchmark of the codecs, with as little to do as still goes through everything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import codecs
from benchmarks.codecs_parts.made_up_kv import made_up_part, part_shape
from benchmarks.codecs_parts.speeds import speeds
from benchmarks.common import harness
from prefixd_swap.codecs.codec import Refused
from prefixd_swap.codecs.registry import find_codec


@pytest.mark.slow
def test_every_codec_is_measured_beside_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "codecs.json"
    parts = ["--only", "speeds", "--only", "choices"]
    written = ["--json", str(file), "--plot", str(tmp_path / "codecs.png"), "--folder", str(tmp_path)]
    codecs.main(["--short", *parts, *written])
    result = json.loads(file.read_text())
    rows = {(row["codec"], row["tokens"], row["part_bytes"]): row for row in result["codecs"]}
    assert len(rows) == 12 and (tmp_path / "codecs.png").stat().st_size > 0
    for (name, tokens, _), row in rows.items():
        assert row["encode_core_gbps"] > 0 and row["decode_core_gbps"] > 0 and row["encode_gbps"] > 0
        assert (row["worst_rms_error"] > 0) == (row["worst_error"] > 0) == (name != "lossless")
        for call, what in (("store", "encode"), ("load", "decode")):
            raw = result[f"raw_{call}_gbps"]
            gain = min(row[f"{what}_gbps"] / raw, 1 / row["size"])
            assert row[f"{call}_gain"] == pytest.approx(gain, abs=0.01)
        most = {"lossless": 0.72, "int8": {16: 0.54, 64: 0.52}[tokens], "k8v4": {16: 0.42, 64: 0.4}[tokens]}
        assert row["size"] < most[name]
    zstd = {row["zstd"]: row for row in result["zstd"]}
    assert zstd["entropy"]["ratio"] > zstd["codec"]["ratio"] > zstd["level 1"]["ratio"]
    errors = [row["keys_rms_error"] for row in result["scale_precision"] if row["tokens"] == 16]
    assert errors == sorted(errors, reverse=True)
    groups = result["int4_groups"]
    assert [row["values_rms_error"] for row in groups] == sorted(row["values_rms_error"] for row in groups)
    assert [row["size"] for row in groups] == sorted((row["size"] for row in groups), reverse=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("nbytes", "tokens"), [(64 << 10, 16), (64 << 10, 64), (2 << 20, 16), (2 << 20, 64)])
def test_a_part_has_the_bytes_that_were_asked_for(dtype: str, nbytes: int, tokens: int) -> None:
    shape = part_shape(nbytes, tokens, dtype)
    assert shape.nbytes == nbytes and shape.tokens == tokens
    data = made_up_part(shape, 0)
    assert data.size == nbytes and np.array_equal(data, made_up_part(shape, 0))
    assert not np.array_equal(data, made_up_part(shape, 1))


def test_a_codec_that_refuses_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(find_codec("int8")), "encode", lambda *_: Refused.NOT_FINITE)
    with pytest.raises(harness.BenchmarkError, match="int8 refuses a part of 16 tokens: not_finite"):
        speeds(["int8"], [16], [64 << 10], "bfloat16", 1, 1)
