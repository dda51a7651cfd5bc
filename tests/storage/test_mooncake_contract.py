"""Mooncake's pool keeps the contract, with a real master."""

from __future__ import annotations

import itertools

import pytest

from kvactors.identity import StoreIdentity
from kvactors.settings.mooncake import MooncakeConfig
from kvactors.storage.mooncake import MooncakeBackend
from kvactors.testing.store_contract import StoreContract
from tests.storage.pools import master

pytestmark = pytest.mark.full

numbers = itertools.count()
addresses: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def running():
    with master() as one:
        addresses[:] = [one.address]
        yield


class TestMooncake(StoreContract):
    evicts = False

    async def make(self, folder, capacity):
        config = MooncakeConfig(
            master_server_address=addresses[0],
            local_hostname="127.0.0.1",
            global_segment_size="32MB",
            local_buffer_size="16MB",
            connect_timeout_s=60.0,
        )
        return MooncakeBackend(
            config, StoreIdentity("m", "n", next(numbers).to_bytes(32, "big")), self.block_bytes
        )
