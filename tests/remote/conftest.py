"""The stores that the tests run over, each with a real server that lives as long as the run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from prefixd_swap.stores import ObjectStore, StoreOptions, ValkeyOptions
from tests.remote.mooncake_server import MooncakeServer, mooncake_server
from tests.remote.objects import opened
from tests.remote.s3_server import S3Server, s3_server
from tests.remote.valkey_server import ValkeyServer, valkey_server


@pytest.fixture(scope="session")
def shared_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def shared_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def shared_mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    with mooncake_server(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


@pytest.fixture(params=["valkey", "s3", "mooncake"])
def options(request: pytest.FixtureRequest) -> StoreOptions:
    """How to reach each store."""
    if request.param == "s3":
        s3: S3Server = request.getfixturevalue("shared_s3")
        return s3.options(s3.new_bucket())
    if request.param == "mooncake":
        mooncake: MooncakeServer = request.getfixturevalue("shared_mooncake")
        return mooncake.options()
    server: ValkeyServer = request.getfixturevalue("shared_valkey")
    return ValkeyOptions(port=server.port)


@pytest.fixture
async def store(options: StoreOptions) -> AsyncIterator[ObjectStore]:
    """Each store, empty for the names of this test."""
    async with opened(options) as store:
        yield store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder whose path is short enough for a socket file."""
    return tmp_path
