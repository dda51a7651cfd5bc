"""Pools of several nodes, whose objects are asked for and not listed."""

from __future__ import annotations

import asyncio

import pytest

from tests.integrations.fastdeploy.config import Request
from tests.storage.pools import master

A = list(range(12))


@pytest.mark.parametrize("cpu", [0, 2])
def test_a_prompt_that_one_node_has_computed_is_a_hit_on_another(engine, shared, cpu):
    one, other = (engine(gpu=6, cpu=cpu, file=True) for _ in range(2))
    one.serve("a", A)
    request = Request("b", [*A, 1])
    assert other.match(request)[1] == 12
    assert not other.wrong(request, 12)
    other.serve("c", [*A, 1, 2, 3, 4])
    found = other.manager.statistics()
    assert found.written_blocks == 1, "the others are in the pool"


def test_the_waits_of_a_match_for_storage_are_limited_together(engine, shared, monkeypatch):
    """Each block is read by itself, for want of slots. The wait for every single one is short."""
    options = {"fetch_wait_s": 0.3}
    one, other = (engine(gpu=6, cpu=1, file=True, options=options) for _ in range(2))
    one.serve("a", list(range(20)))
    read = shared.read

    async def slow(*arguments):
        await asyncio.sleep(0.2)
        return await read(*arguments)

    monkeypatch.setattr(shared, "read", slow)
    request = Request("b", list(range(21)))
    assert other.match(request)[1] <= 8, "two reads take longer than all may"
    assert not other.wrong(request, 0)


@pytest.mark.full
def test_nodes_share_a_pool_of_mooncake(engine):
    with master() as pool:
        environ = {
            "MOONCAKE_MASTER_SERVER_ADDR": pool.address,
            "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
            "MOONCAKE_METADATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(32 << 20),
            "MOONCAKE_LOCAL_BUFFER_SIZE": str(16 << 20),
            "MOONCAKE_PROTOCOL": "tcp",
        }
        settings = {"storage": {"timeout_s": 20.0}}
        one, other = (
            engine(gpu=6, cpu=2, backend="mooncake", environ=environ, options=settings)
            for _ in range(2)
        )
        one.serve("a", A)
        request = Request("b", A)
        assert other.match(request)[1] == 12
        assert not other.wrong(request, 12)
        for made in (one, other):
            made.manager.close()
