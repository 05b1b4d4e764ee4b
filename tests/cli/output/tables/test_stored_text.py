"""How blocks are stored is said in one line, and only where it is worth saying."""

from __future__ import annotations

from prefixd.cli.output.tables.stored_text import stored_line, stored_words
from prefixd.v1 import admin_pb2 as pb

GIB = 1 << 30


def test_what_codecs_save_and_alter_is_one_line() -> None:
    stored = pb.StoredStats(
        codec="int8", stored_bytes=412 * GIB, exact_bytes=803 * GIB, refused_parts={"above_bound": 1200, "not_fewer": 3}
    )
    stored.largest_error.add(labels={"tenant": "a", "model": "m"}, value=0.009)
    stored.largest_error.add(labels={"tenant": "b", "model": "m"}, value=0.0162)
    stored.rms_error.add(labels={"tenant": "a", "model": "m"}, value=0.004)
    stored.altered_blocks.add(labels={"tenant": "a", "model": "m"}, count=7)
    assert stored_line(stored) == (
        "disk: 412.0 GiB stored of 803.0 GiB, saved 49% (disk.codec = int8), largest error 1.62% (RMS 0.4%); 1,203 "
        "parts not taken by their codec (above_bound 1,200, not_fewer 3)"
    )
    assert stored_words(stored) == ["disk saves 49%", "error 1.62%"]


def test_an_empty_disk_with_a_codec_saves_nothing() -> None:
    assert stored_line(pb.StoredStats(codec="lossless")) == "disk: 0 B stored of 0 B, saved 0% (disk.codec = lossless)"


def test_nothing_is_said_where_all_is_exact() -> None:
    assert stored_line(pb.StoredStats(codec="exact", stored_bytes=GIB, exact_bytes=GIB, blocks={"raw": 9})) is None
    assert stored_line(pb.StoredStats()) is None and stored_words(pb.StoredStats()) == []


def test_blocks_of_an_earlier_codec_are_said_too() -> None:
    stored = pb.StoredStats(codec="exact", stored_bytes=GIB, exact_bytes=2 * GIB, blocks={"coded": 1})
    assert stored_line(stored) == "disk: 1.0 GiB stored of 2.0 GiB, saved 50% (disk.codec = exact)"
