"""The tensors that a layout is allocated as, and the host memory of its blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvactors.device.arena import Arena
from kvactors.errors import LayoutError
from kvactors.layout import DSALayout, GQALayout, Layout, MLALayout
from kvactors.tier_cache import SlotMemory

BLOCK = 64
GQA = {"num_kv_heads": 4, "head_dim": 128, "block_size": BLOCK}
HEADS = (4, BLOCK, 128)
SCALES = (4, BLOCK)


def allocated(layout: Layout, blocks: int) -> list[tuple[int, str, tuple[int, ...], str]]:
    """Layer, role, shape and dtype of each tensor, in the order in which they are made."""
    made: list[tuple[tuple[int, ...], str]] = []
    layout.allocate(lambda shape, dtype: made.append((shape, dtype)), blocks)
    return [
        (piece.layer, piece.role, *tensor)
        for piece, tensor in zip(layout.pieces, made, strict=True)
    ]


def test_a_layer_has_a_key_and_a_value():
    assert allocated(GQALayout(2, **GQA, dtype="bfloat16"), 7) == [
        (0, "key", (7, *HEADS), "bfloat16"),
        (0, "value", (7, *HEADS), "bfloat16"),
        (1, "key", (7, *HEADS), "bfloat16"),
        (1, "value", (7, *HEADS), "bfloat16"),
    ]


def test_fp8_has_bytes_and_a_scale_for_each_token_of_each_head():
    """The dtype of the model is that of the scales at most."""
    assert allocated(GQALayout(1, **GQA, dtype="bfloat16", quantization="block_wise_fp8"), 7) == [
        (0, "key", (7, *HEADS), "uint8"),
        (0, "value", (7, *HEADS), "uint8"),
        (0, "key_scale", (7, *SCALES), "float32"),
        (0, "value_scale", (7, *SCALES), "float32"),
    ]


def test_mla_has_no_value():
    assert allocated(MLALayout(2, BLOCK), 3) == [
        (0, "key", (3, 1, BLOCK, 512 + 64), "bfloat16"),
        (1, "key", (3, 1, BLOCK, 512 + 64), "bfloat16"),
    ]


def test_dsa_has_bytes_of_a_key_and_of_an_indexer():
    assert allocated(DSALayout(1, BLOCK), 3) == [
        (0, "key", (3, 1, BLOCK, 512 + 16 + 128), "uint8"),
        (0, "indexer", (3, BLOCK, 128 + 4), "uint8"),
    ]


@pytest.mark.parametrize("offset", [0, 1, 30])
@pytest.mark.parametrize("layers", [1, 3])
def test_layers_are_numbered_from_the_offset(offset, layers):
    layout = DSALayout(layers, BLOCK, layer_offset=offset)
    found = allocated(layout, 2)
    assert [layer for layer, *_ in found[::2]] == list(range(offset, offset + layers))
    assert [role for _, role, *_ in found] == ["key", "indexer"] * layers
    for number, (layer, role, *_) in enumerate(found):
        assert layout.position(layer, role) == number


def test_a_cache_without_blocks_is_refused():
    with pytest.raises(LayoutError, match="at least 1 block"):
        allocated(MLALayout(1, BLOCK), 0)


# -- host memory


@pytest.mark.parametrize(
    "layout",
    [
        GQALayout(2, **GQA),
        GQALayout(2, **GQA, quantization="block_wise_fp8"),
        MLALayout(2, BLOCK),
        DSALayout(2, BLOCK),
    ],
    ids=["gqa", "fp8", "mla", "dsa"],
)
@pytest.mark.parametrize("make", [Arena, SlotMemory])
def test_host_slots_hold_a_block_of_every_layout(layout, make):
    """Also one of DSA, for which FastDeploy allocates no host memory."""
    memory = make(3, layout.block_bytes)
    for slot in range(3):
        memory.view(slot)[:] = bytes([slot + 1]) * layout.block_bytes
    for slot in range(3):
        assert set(memory.view(slot)) == {slot + 1}, "slots do not overlap"
    memory.close()


def test_given_memory_stays_the_callers():
    rows = np.zeros(2 * 64, np.uint8)
    memory = SlotMemory(2, 64, rows)
    memory.view(1)[:] = b"\x05" * 64
    memory.close()
    assert rows.tolist() == [0] * 64 + [5] * 64
