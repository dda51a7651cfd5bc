"""The bytes of a stored block, and the memory of host slots."""

from __future__ import annotations

import mmap
from typing import Any

import pytest

from kvactors.errors import LayoutError
from tests.support import attentionstore_sdk as stand_in

ROLES = ("key_caches", "value_caches", "key_cache_scales", "value_cache_scales")


def block_bytes(tensors: dict[str, Any], block: int, layers: int, ranks: int = 1) -> bytes:
    """The bytes of a block: rank by rank and layer by layer key, value, and their scales."""
    return b"".join(
        tensors[f"{role}_{layer}_rank{rank}.device{rank}"][block].tobytes()
        for rank in range(ranks)
        for layer in range(layers)
        for role in ROLES
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_stored_block_has_the_key_value_and_scales_of_every_layer_and_rank(
    engine, shared, ranks, layers
):
    """FastDeploy stores one object for each of the four, and for each rank."""
    one = engine(gpu=4, file=True, ranks=ranks, layers=layers, roles=ROLES)
    one.serve("a", list(range(8)))
    tensors = one.memory.tensors
    expected = [block_bytes(tensors, block, layers, ranks) for block in range(2)]
    assert list(shared.pool.values()) == expected


def test_scales_are_refused_for_attention_store_and_nothing_stays_open(engine, service):
    options = {"attention_store": {"sdk": stand_in.__name__}}
    one = engine(gpu=4, roles=ROLES, backend="attention_store", options=options, attach=False)
    with pytest.raises(LayoutError, match="key, value, key_scale, value_scale"):
        one.manager.attach()
    assert not stand_in.services
    assert one.manager.can_allocate_gpu_blocks(4)


@pytest.mark.parametrize(
    ("cpu", "stored", "slots"), [(5, False, 5), (5, True, 7), (0, True, 6), (0, False, None)]
)
def test_host_memory_is_allocated_once_for_all_layers(
    engine, shared, monkeypatch, cpu, stored, slots
):
    """Slots of the host tier, or else of the blocks of the longest request on their way from
    storage, and 2 for those on the way there. Nothing is allocated where neither is configured."""
    allocated = []

    def counted(size: int) -> mmap.mmap:
        allocated.append(size)
        return mmap.mmap(-1, size)

    monkeypatch.setattr("kvactors.tier_cache.slots.new_memory", counted)
    options = {"staging_slots": 2} if stored else None
    one = engine(4, cpu, layers=3, roles=ROLES, file=stored, options=options, max_model_len=16)
    row = -(-len(block_bytes(one.memory.tensors, 0, 3)) // 4096) * 4096
    assert allocated == ([] if slots is None else [slots * row])
    assert one.manager.num_cpu_blocks == cpu
