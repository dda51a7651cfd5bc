"""The tensors that a layout is allocated as, and the host memory of its blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvactors.device.arena import Arena
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


@pytest.mark.parametrize(
    ("layout", "tensors"),
    [
        (
            GQALayout(2, **GQA, dtype="bfloat16"),
            [("key", HEADS, "bfloat16"), ("value", HEADS, "bfloat16")],
        ),
        (  # the dtype of the model is that of the scales at most
            GQALayout(2, **GQA, dtype="bfloat16", quantization="block_wise_fp8"),
            [
                ("key", HEADS, "uint8"),
                ("value", HEADS, "uint8"),
                ("key_scale", SCALES, "float32"),
                ("value_scale", SCALES, "float32"),
            ],
        ),
        (MLALayout(2, BLOCK), [("key", (1, BLOCK, 512 + 64), "bfloat16")]),
        (
            DSALayout(2, BLOCK),
            [("key", (1, BLOCK, 512 + 16 + 128), "uint8"), ("indexer", (BLOCK, 128 + 4), "uint8")],
        ),
    ],
    ids=["gqa", "fp8", "mla", "dsa"],
)
def test_a_layer_has_the_tensors_of_its_kind(layout, tensors):
    assert allocated(layout, 7) == [
        (layer, role, (7, *shape), dtype) for layer in (0, 1) for role, shape, dtype in tensors
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
