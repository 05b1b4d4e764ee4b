"""Cached prefixes as people see them: by the model's name, and by a part of the id where two have one name."""

from __future__ import annotations

import pytest

from prefixd.cli.output.tables.prefix_tables import print_inspection, print_prefixes
from prefixd.v1 import admin_pb2 as pb


def prefix(namespace_id: bytes, name: str, model: str = "") -> pb.PrefixInfo:
    return pb.PrefixInfo(key="ab" * 16, namespace_id=namespace_id * 8, namespace_name=name, model=model, tokens=16)


def test_a_namespace_has_its_models_name(capsys: pytest.CaptureFixture[str]) -> None:
    print_prefixes([prefix(b"\1", "5f1e", "llama"), prefix(b"\2", "5f1e-images", "llama"), prefix(b"\3", "vllm")], 3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "abab" in line] == ["llama", "llama-images", "vllm"]
    print_inspection(pb.InspectResponse(prefix=prefix(b"\1", "5f1e", "llama")), tokens=False)
    assert "in llama (0101010101010101)" in capsys.readouterr().out


def test_namespaces_of_one_name_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    print_prefixes([prefix(b"\1", "5f1e", "llama"), prefix(b"\1", "5f1e", "llama"), prefix(b"\2", "llama")], 3)
    lines = [line for line in capsys.readouterr().out.splitlines() if "abab" in line]
    assert ["(01010101)" in line for line in lines] == [True, True, False]
    assert "llama (02020202)" in lines[2]


ALTERED = pb.PrefixStorage(
    stored_bytes=1 << 20, exact_bytes=2 << 20, altered_blocks=2, largest_error=0.0162, rms_error=0.007
)


def test_what_a_codec_has_made_of_a_prefix_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    info = prefix(b"\1", "llama")
    print_prefixes([info], 1)
    assert "stored" not in capsys.readouterr().out, "all is exact"
    info.storage.CopyFrom(ALTERED)
    print_prefixes([info, prefix(b"\1", "llama")], 2)
    lines = capsys.readouterr().out.splitlines()
    header, altered, exact = (line for line in lines if "llama" in line or "stored" in line)
    assert "error" in header and "1.0 MiB" in altered and "1.62%" in altered and "1.62%" not in exact


def test_an_inspection_says_how_far_blocks_are_from_the_exact_ones(capsys: pytest.CaptureFixture[str]) -> None:
    info = prefix(b"\1", "llama")
    info.storage.CopyFrom(ALTERED)
    storage = pb.BlockStorage(stored_bytes=512 << 10, form="altered", largest_error=0.0162, rms_error=0.007)
    storage.parts.add(codec="int8", largest_errors=[0.01, 0.0162], rms_errors=[0.005, 0.007])
    other = pb.BlockStorage(form="altered", unread="a read failed")
    other.parts.add(codec="k8v4", largest_errors=[0.3, 0.001], rms_errors=[0.1, 0.001])
    blocks = [pb.BlockInfo(index=0, storage=storage), pb.BlockInfo(index=1, storage=other), pb.BlockInfo(index=2)]
    print_inspection(pb.InspectResponse(prefix=info, blocks=blocks), tokens=False)
    out = capsys.readouterr().out
    assert "on disk: 1.0 MiB stored of 2.0 MiB; 2 blocks altered by a lossy codec, largest error 1.62%" in out
    assert "512.0 KiB" in out and "block 1 could not be read: a read failed" in out
    layers = [line.split() for line in out.splitlines() if "int8, k8v4" in line]
    assert layers == [["0", "int8,", "k8v4", "30%", "10%"], ["1", "int8,", "k8v4", "1.62%", "0.7%"]]
