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
