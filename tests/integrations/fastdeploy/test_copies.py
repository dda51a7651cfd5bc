"""Copies between cache tensors and host slots, and the bytes of a stored block."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from kvactors.errors import LayoutError
from kvactors.integrations.fastdeploy import PrefixCacheManager
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request, make_config
from tests.integrations.fastdeploy.conftest import RESERVE
from tests.support import attentionstore_sdk as stand_in

BLOCKS, HEADS, DIM = 4, 2, 8
SCALES = ("key_cache_scales", "value_cache_scales")


def tensors_of(layers: int, *, ranks: int = 1, seed: int = 0) -> dict[str, Any]:
    """Tensors of fp8 caches with FastDeploy's shapes, in which every byte is drawn."""
    rng = np.random.default_rng(seed)
    shape, found = (BLOCKS, HEADS, BLOCK_SIZE, DIM), {}
    for rank in range(ranks):
        for layer in range(layers):
            place = f"{layer}_rank{rank}.device{rank}"
            for stem in ("key_caches", "value_caches"):
                found[f"{stem}_{place}"] = rng.integers(0, 256, shape, np.uint8)
            for stem in SCALES:
                found[f"{stem}_{place}"] = rng.random(shape[:3]).astype(np.float32)
    return found


def block_bytes(tensors: dict[str, Any], block: int, layers: int, ranks: int = 1) -> bytes:
    """The bytes of a block: rank by rank and layer by layer key, value, and their scales."""
    stems = ("key_caches", "value_caches", *SCALES)
    return b"".join(
        tensors[f"{stem}_{layer}_rank{rank}.device{rank}"][block].tobytes()
        for rank in range(ranks)
        for layer in range(layers)
        for stem in stems
    )


# -- copies


# -- fp8: keys, values and their scales


def made_manager(
    tensors: dict[str, Any], *, ranks: int = 1, options: Any = None, **config: Any
) -> PrefixCacheManager:
    return PrefixCacheManager(
        make_config(BLOCKS, **config),
        ranks,
        tensors=tensors,
        environ={RESERVE: "0", "FILE_BACKEND_STORAGE_DIR": "/unused"},
        options=options,
    )


def prefilled(manager: PrefixCacheManager, name: str, tokens: list[int]) -> tuple[Request, int]:
    """A request whose prompt is computed, and the tokens that were cached."""
    request = Request(name, tokens)
    found, cached, _ = manager.request_match_blocks(request, BLOCK_SIZE)
    lacking = len(tokens) // BLOCK_SIZE - len(found)
    assert manager.can_allocate_gpu_blocks(lacking)
    request.block_tables = found + manager.allocate_gpu_blocks(lacking, name)
    manager.update_cache_blocks(request, BLOCK_SIZE, len(tokens))
    return request, cached


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_stored_block_has_the_key_value_and_scales_of_every_layer_and_rank(shared, ranks, layers):
    """FastDeploy stores one object for each of the four, and for each rank."""
    tensors = tensors_of(layers, ranks=ranks)
    before = [block_bytes(tensors, block, layers, ranks) for block in range(BLOCKS)]
    manager = made_manager(tensors, ranks=ranks, backend="file")
    manager.attach()
    request, _ = prefilled(manager, "a", list(range(8)))
    manager.write_cache_to_storage(request)
    manager.release_block_ids(request)
    assert list(shared.pool.values()) == [before[block] for block in request.block_tables]
    manager.close()


def test_scales_are_refused_for_attention_store_and_nothing_stays_open():
    stand_in.reset()
    options = {"attention_store": {"sdk": "tests.support.attentionstore_sdk"}}
    manager = made_manager(tensors_of(2), options=options, backend="attention_store")
    with pytest.raises(LayoutError, match="key, value, key_scale, value_scale"):
        manager.attach()
    assert not stand_in.services
    assert manager.can_allocate_gpu_blocks(BLOCKS)
    manager.close()


# -- host memory


@pytest.mark.parametrize(
    ("cpu", "stored", "slots"), [(5, False, 5), (5, True, 7), (0, True, 6), (0, False, None)]
)
def test_host_memory_is_allocated_once_for_all_layers(shared, monkeypatch, cpu, stored, slots):
    """Slots of the host tier, or else of the blocks of the longest request on their way from
    storage, and 2 for those on the way there. Nothing is allocated where neither is configured."""
    allocated = []

    def counted(size: int) -> mmap.mmap:
        allocated.append(size)
        return mmap.mmap(-1, size)

    monkeypatch.setattr("kvactors.tier_cache.slots.new_memory", counted)
    tensors = tensors_of(3)
    options = {"staging_slots": 2} if stored else None
    backend = "file" if stored else None
    longest = BLOCKS * BLOCK_SIZE
    manager = made_manager(
        tensors, options=options, cpu_blocks=cpu, backend=backend, max_model_len=longest
    )
    manager.attach()
    row = -(-len(block_bytes(tensors, 0, 3)) // 4096) * 4096
    assert allocated == ([] if slots is None else [slots * row])
    assert manager.num_cpu_blocks == cpu
    manager.close()
