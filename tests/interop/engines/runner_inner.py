"""vLLM's real scheduler, driven by vLLM's own `RequestRunner`, over kvactors' manager.

The file runs in vLLM's environment (`test_vllm_tests.py` copies it there). The runner's worker is a
mock that copies nothing: the blocks that it stores and loads are compared by their keys.
"""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import PrepareStoreOutput, ReqContext

from kvactors.integrations.vllm.manager import KVActorsManager
from kvactors.tier_cache import TierConfig, open_tiers
from tests.v1.kv_connector.unit.offloading_connector.utils import MockLoadStoreSpec, request_runner
from tests.v1.kv_connector.unit.utils import EOS_TOKEN_ID

__all__ = ["request_runner"]

BLOCK = 4


class Bridge:
    """kvactors' manager in the place of the runner's mock."""

    def __init__(self, runner, slots: int, blocks_per_chunk: int) -> None:
        config = TierConfig(model="tiny", block_bytes=64, num_slots=slots, events=("host",))
        tiers = open_tiers(config)
        self.manager = KVActorsManager(
            tiers, None, chunk_tokens=BLOCK * blocks_per_chunk, flush_steps=4
        )
        self.runner = runner
        mock = runner.manager
        for name in (
            "lookup",
            "get_load_source",
            "complete_load",
            "complete_store",
            "touch",
            "on_new_request",
            "on_request_finished",
            "on_schedule_end",
            "take_events",
            "has_pending_work",
            "reset_cache",
        ):
            getattr(mock, name).side_effect = getattr(self.manager, name)
        mock.prepare_store.side_effect = self.prepare_store
        mock.prepare_load = self.prepare_load
        if hasattr(self.manager, "on_reset_flushed"):
            mock.on_reset_flushed = self.manager.on_reset_flushed

    def prepare_store(self, keys, context):
        found = self.manager.prepare_store(keys, context)
        assert len(found.store_spec.block_ids) == len(found.keys_to_store)
        return PrepareStoreOutput(
            found.keys_to_store, MockLoadStoreSpec(found.keys_to_store), found.evicted_keys
        )

    def prepare_load(self, keys, context):
        keys = list(keys)
        assert len(self.manager.prepare_load(keys, context).block_ids) == len(keys)
        return MockLoadStoreSpec(keys)

    @property
    def resident(self) -> int:
        return self.manager.tiers.statistics().resident

    def check(self) -> None:
        """Nothing is pinned, and the tier's own facts agree."""
        self.manager.tiers.check()
        assert self.manager.tiers.copies_in_flight() == ((), ())
        assert self.manager.tiers.statistics().pinned == 0


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def make(request, request_runner):
    def make_one(slots: int = 32, blocks_per_chunk: int = 1) -> Bridge:
        runner = request_runner(
            block_size=BLOCK,
            num_gpu_blocks=100,
            blocks_per_chunk=blocks_per_chunk,
            async_scheduling=request.param,
        )
        return Bridge(runner, slots, blocks_per_chunk)

    return make_one


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_blocks_are_stored_once_and_loaded_after_the_device_forgot_them(
    make, blocks_per_chunk
) -> None:
    bridge = make(blocks_per_chunk=blocks_per_chunk)
    runner, blocks = bridge.runner, tuple(range(6))
    runner.new_request(token_ids=[7] * BLOCK * 6)
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=blocks)
    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[7] * BLOCK * 6 + [1])
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_loaded=blocks)
    bridge.check()
    assert bridge.resident == 6 // blocks_per_chunk


def test_a_full_host_tier_evicts_and_never_a_block_in_use(make) -> None:
    bridge = make(slots=3)
    runner = bridge.runner
    for token in range(7, 12):
        runner.new_request(token_ids=[token] * BLOCK * 3)
        runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=(0, 1, 2))
        assert bridge.resident == 3
        bridge.check()
    events = list(bridge.manager.take_events())
    stored = sum(len(event.keys) for event in events if not event.removed)
    removed = sum(len(event.keys) for event in events if event.removed)
    assert stored - removed in (3, 0)  # the scheduler takes events too
    runner.new_request(token_ids=[5] * BLOCK * 4)
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=(0, 1, 2))  # as much as fits
    bridge.check()


def test_a_reset_with_copies_in_flight_keeps_their_slots_until_they_are_flushed(make) -> None:
    bridge = make(slots=3)
    runner = bridge.runner
    runner.new_request(token_ids=[7] * BLOCK * 3)
    runner.run(decoded_tokens=[1, 1], complete_transfers=False)
    assert bridge.manager.tiers.copies_in_flight().stores
    bridge.manager.reset_cache()
    assert bridge.manager.has_pending_work()
    statistics = bridge.manager.tiers.statistics()
    assert (statistics.resident, statistics.pinned) == (0, 3)
    other = [bytes([i]) * 36 for i in range(3)]
    context = ReqContext("other")
    assert bridge.manager.prepare_store(other, context).keys_to_store == []
    bridge.manager.on_reset_flushed()
    assert len(bridge.manager.prepare_store(other, context).keys_to_store) == 3
    bridge.manager.complete_store(other, context)
    bridge.check()
