"""Storage of v1 in a real Mooncake pool: the scheduler's process looks up what the workers wrote."""

from __future__ import annotations

import pytest

from tests.integrations.fastdeploy.config import BLOCK_SIZE
from tests.integrations.fastdeploy.test_v1_manager import LAYOUT, A, B, Engine
from tests.storage.pools import master

SIZE = str(64 << 20)


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_come_back_from_a_pool(ranks):
    with master() as pool:
        environ = {
            "MOONCAKE_MASTER_SERVER_ADDR": pool.address,
            "MOONCAKE_METADATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": SIZE,
            "MOONCAKE_LOCAL_BUFFER_SIZE": SIZE,
        }
        one = Engine(
            3, 4, ranks=ranks, backend="mooncake", environ=environ, options={"layout": LAYOUT}
        )
        try:
            one.serve("a", A)
            one.serve("b", B[:3])  # the batch of this step carries the copies of a
            one.serve("c", B[:2])  # at its start the workers write
            for worker in one.workers:
                assert worker._storage.tier.drain(20.0)
            assert one.manager.reset_cache()
            assert one.serve("again", [*A, 9]) == (0, 2)
            assert one.manager.statistics().storage_tokens == 2 * BLOCK_SIZE
        finally:
            one.close()
