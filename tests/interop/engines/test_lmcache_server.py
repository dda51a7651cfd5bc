"""kvactors as an L2 adapter of `lmcache server`: a client of the server gets no wrong byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import INSIDE_NETWORK
from tests.interop.engines.lmcache_server import CHUNKS, LmcacheClient, LmcacheServer, adapter
from tests.interop.engines.stores import free_bytes, small_file_system
from tests.interop.environments import Environments
from tests.interop.network import raise_loopback

ALL = list(range(12))

Serve = Callable[..., LmcacheServer]


@pytest.fixture
def serve(environments: Environments, tmp_path: Path) -> Iterator[Serve | None]:
    """Starts servers over a store in `tmp_path`, one at a time. The arguments are those of
    `adapter`."""
    if not INSIDE_NETWORK:
        yield None
        return
    raise_loopback()
    made: list[LmcacheServer] = []

    def start_one(directory: Path = tmp_path / "store", **params: Any) -> LmcacheServer:
        log = tmp_path / f"server-{len(made)}.log"
        made.append(LmcacheServer(environments, log, adapter(directory, **params)))
        return made[-1]

    try:
        yield start_one
    finally:
        for one in made:
            one.discard()


@pytest.fixture
def client(environments: Environments, tmp_path: Path) -> Iterator[LmcacheClient | None]:
    """A client that has not connected yet."""
    if not INSIDE_NETWORK:
        yield None
        return
    found = LmcacheClient(environments, tmp_path / "client.log")
    try:
        yield found
    finally:
        found.discard()


@pytest.mark.engines
def test_a_client_finds_its_chunks_in_storage_and_after_kill_9(
    serve: Serve, client: LmcacheClient
) -> None:
    server = serve()
    client.open()
    assert client.fetch(ALL[:2]) == (0, 0)
    assert client.store(ALL) == (len(ALL) * CHUNKS, 0)
    server.wait_stored(len(ALL) * CHUNKS)
    server.clear()
    assert client.fetch(ALL) == (len(ALL) * CHUNKS, len(ALL) * CHUNKS)
    server.wait_idle()
    server.kill()
    again = serve()
    assert again.status()["stored_object_count"] == len(ALL) * CHUNKS
    client.open()
    assert client.fetch(ALL) == (len(ALL) * CHUNKS, len(ALL) * CHUNKS)
    assert again.status()["is_healthy"]
    again.stop()


@pytest.mark.engines_full
def test_a_full_file_system_is_no_error_of_the_server(
    serve: Serve, client: LmcacheClient, tmp_path: Path
) -> None:
    folder = small_file_system(tmp_path / "small", 4)
    server = serve(folder / "store", free_space_floor="1MB")
    client.open()
    client.store(ALL)  # 6 MiB
    server.wait_idle()
    assert 0 < server.status()["stored_object_count"] < len(ALL) * CHUNKS
    assert free_bytes(folder) >= 1_000_000
    server.clear()
    hits, right = client.fetch(ALL)
    assert hits == right
    assert 0 < hits < len(ALL) * CHUNKS
    server.stop()
