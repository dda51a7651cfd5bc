"""Layouts of blocks: sizes, order, fingerprints, regions."""

from __future__ import annotations

import numpy as np
import pytest

import kvactors
from kvactors.errors import LayoutError
from kvactors.layout import (
    DSALayout,
    GQALayout,
    Layout,
    MLALayout,
    Role,
    heads_on_rank,
    make_layout,
)
from kvactors.settings import Config, LayoutConfig
from tests.support import cache as support

BLOCK = 64
LAYOUTS = {
    "gqa": GQALayout(3, 8, 128, BLOCK, "bfloat16"),
    "mha": GQALayout(2, 32, 64, BLOCK),
    "fp8": GQALayout(2, 4, 128, BLOCK, quantization="block_wise_fp8"),
    "mla": MLALayout(3, BLOCK),
    "dsa": DSALayout(3, BLOCK),
    "mtp": GQALayout(2, 4, 64, BLOCK, extra_layers=1, extra_block_ratio=1.5),
    "stage": MLALayout(2, BLOCK, layer_offset=30),
    "mla-fp8": MLALayout(2, BLOCK, quantization="block_wise_fp8"),
    "varied": GQALayout(2, [8, 2, 1], [64, 128, 64], BLOCK, extra_layers=1),
}
PER_TOKEN = {
    "gqa": 3 * 2 * 8 * 128 * 2,
    "fp8": 2 * 2 * (4 * 128 + 4 * 4),
    "mla": 3 * (512 + 64) * 2,
    "dsa": 3 * (656 + 132),
    "mla-fp8": 2 * (512 + 64 + 4),
    "varied": 2 * (8 * 64 + 2 * 128 + 64) * 2,
}


class Odd(Layout):
    """A layout from outside the package: a state and a key in one layer, a key of another type in
    the other, sizes that are no multiple of 16."""

    def __init__(self, block_size, width=7):
        self.width, self.size = width, block_size
        super().__init__(block_size, 2)

    @property
    def kind(self):
        return "odd"

    def roles(self, layer):
        key, state = (self.size, 3), (self.width,)
        if layer:
            return [Role("key", key, "float16")]
        roles = [("state", state, "uint8"), ("key", key, "int8")]
        return (Role(*one) for one in roles)

    @classmethod
    def from_settings(cls, settings, block_size):
        return cls(block_size, settings["width"])


@pytest.mark.parametrize("name", PER_TOKEN)
def test_bytes_a_token(name):
    assert LAYOUTS[name].block_bytes == BLOCK * PER_TOKEN[name]


def test_extra_layers_come_last_and_have_their_own_block_count():
    layout = LAYOUTS["mtp"]
    assert [(p.layer, p.extra) for p in layout.pieces] == [
        (0, False),
        (0, False),
        (1, False),
        (1, False),
        (2, True),
        (2, True),
    ]
    shapes = layout.allocate(lambda shape, dtype: shape, 10)
    assert [shape[0] for shape in shapes] == [10, 10, 10, 10, 15, 15]


def test_a_pipeline_stage_numbers_its_layers_from_its_first():
    layout = LAYOUTS["stage"]
    assert [p.layer for p in layout.pieces] == [30, 31]
    assert layout.position(31, "key") == 1
    with pytest.raises(LayoutError, match="layer 32"):
        layout.position(32, "key")


def test_fingerprints_distinguish_layouts():
    more = [
        GQALayout(3, 8, 128, BLOCK, "float16"),
        GQALayout(3, 8, 128, 32, "bfloat16"),
        GQALayout(2, 4, 128, BLOCK, "uint8"),
    ]
    prints = [layout.fingerprint for layout in (*LAYOUTS.values(), *more, Odd(BLOCK))]
    assert len(set(prints)) == len(prints)
    for heads in (8, np.int64(8), [8] * 3, np.array([8] * 3)):
        same = GQALayout(3, heads, 128, BLOCK, "bfloat16")
        assert same.fingerprint == LAYOUTS["gqa"].fingerprint


@pytest.mark.parametrize(
    ("heads", "ranks", "each"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (2, 8, 1), (1, 4, 1)]
)
def test_heads_are_split_or_repeated(heads, ranks, each):
    assert heads_on_rank(heads, ranks) == each


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (6, 4), (3, 8), (8, 0)])
def test_heads_that_do_not_come_out_even(heads, ranks):
    with pytest.raises(LayoutError, match="cannot be shared"):
        heads_on_rank(heads, ranks)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: GQALayout(0, 1, 1, 1), "num_layers must be at least 1"),
        (lambda: GQALayout(1, 1, 0, 1), "head_dim must be at least 1"),
        (lambda: GQALayout(1, 1, 1, 0), "block_size must be at least 1"),
        (lambda: GQALayout(1, 1, 1, 1, "float8"), "unknown dtype 'float8'"),
        (
            lambda: GQALayout(1, 1, 1, 1, extra_layers=1, extra_block_ratio=0.5),
            "extra_block_ratio must be at least 1",
        ),
        (lambda: GQALayout(1, 1, 1, 1, extra_block_ratio=float("nan")), "extra_block_ratio"),
        (lambda: GQALayout(2, [1], 1, 1), "num_kv_heads has 1 entries, and there are 2 layers"),
        (lambda: GQALayout(2, 1, [8, 0], 1), "head_dim must be at least 1"),
        (lambda: Odd(1).position(1, "state"), "no region of layer 1, role 'state'"),
        (lambda: MLALayout(1, 1, kv_lora_rank=0), "kv_lora_rank must be at least 1"),
        (lambda: DSALayout(1, 1, kv_lora_rank=500), "multiple of 128"),
        (
            lambda: make_layout(LayoutConfig(kind="mqa"), 4),
            "unknown layout 'mqa': choose gqa, mla, dsa",
        ),
        (lambda: make_layout(LayoutConfig(kind="no.such:Layout"), 4), "cannot be imported"),
        (
            lambda: make_layout(LayoutConfig(kind="kvactors.errors:LayoutError"), 4),
            "is not a Layout",
        ),
        (
            lambda: make_layout(LayoutConfig(num_kv_heads=3, tensor_parallel=2), 4),
            "cannot be shared",
        ),
        (lambda: LAYOUTS["gqa"].allocate(lambda *_: None, 0), "at least 1 block"),
    ],
)
def test_impossible_layouts_are_refused_by_name(make, complaint):
    with pytest.raises(LayoutError, match=complaint):
        make()


def test_regions_that_are_not_as_they_should_be_are_named():
    layout = LAYOUTS["mtp"]
    good = layout.allocate(lambda shape, dtype: (shape, dtype), 4)
    layout.verify(good, 4)
    with pytest.raises(LayoutError, match="6 regions, and 5 were given"):
        layout.verify(good[:-1], 4)
    with pytest.raises(LayoutError, match="layer 2, key, is float16"):
        layout.verify([*good[:4], ((4, *good[4][0][1:]), "float16"), good[5]], 4)
    with pytest.raises(LayoutError, match="layer 0, value, is float32"):
        layout.verify([good[0], (good[1][0], "float32"), *good[2:]], 4)


def test_settings_describe_every_kind():
    def of(**table):
        return make_layout(Config.from_mapping({"layout": table}).layout, BLOCK)

    assert of(kind="mla", num_layers=3, dtype="bfloat16").fingerprint == LAYOUTS["mla"].fingerprint
    assert of(kind="dsa", num_layers=3).fingerprint == LAYOUTS["dsa"].fingerprint
    eight = of(
        num_layers=2,
        num_kv_heads=16,
        head_dim=128,
        quantization="block_wise_fp8",
        tensor_parallel=4,
    )
    assert eight.fingerprint == LAYOUTS["fp8"].fingerprint
    mtp = of(num_layers=2, num_kv_heads=4, head_dim=64, extra_layers=1, extra_block_ratio=1.5)
    assert mtp.fingerprint == LAYOUTS["mtp"].fingerprint
    odd = of(kind=f"{__name__}:Odd", options={"width": 9})
    assert odd.block_bytes == 9 + 3 * BLOCK + 2 * 3 * BLOCK
    assert [odd.position(*place) for place in ((0, "key"), (0, "state"), (1, "key"))] == [0, 1, 2]
    varied = of(
        num_layers=2,
        num_kv_heads=[16, 4, 1],
        head_dim=[64, 128, 64],
        tensor_parallel=2,
        extra_layers=1,
    )
    assert varied.fingerprint == LAYOUTS["varied"].fingerprint


HEADS = {"num_kv_heads": 1, "head_dim": 5}


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "mla"},
        {"kind": "dsa"},
        {**HEADS, "quantization": "block_wise_fp8"},
        {**HEADS, "extra_layers": 1},
        {"kind": "mla", "quantization": "block_wise_fp8", "scale_dtype": "float16"},
        {"num_kv_heads": [3, 1], "head_dim": [5, 16]},
        {"kind": f"{__name__}:Odd", "options": {"width": 5}},
    ],
)
async def test_a_cache_of_every_layout_brings_the_right_bytes_back(table):
    config = Config.from_mapping(
        {
            "cache": {"block_size": 4},
            "device": {"num_blocks": 4},
            "host": {"slots": 16},
            "layout": {"num_layers": 2, **table},
        }
    )
    async with kvactors.open(config) as cache:
        for seed in (1, 2, 1, 2):
            await support.serve(cache, "r", [seed] * 12 + [0])
        await cache.wait_idle()
        assert cache.statistics().host_hits >= 3
        assert cache.check() == []
