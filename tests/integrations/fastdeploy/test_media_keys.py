"""Which blocks a media item belongs to: the table of FastDeploy's scan, and any items against a scan
token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.identity import block_extras, media_items
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request

ONE = [(2, 4, "h0")]
"""Tokens 2 .. 5: of blocks of 4, in the first two."""
SEVERAL = [(1, 2, "h0"), (5, 2, "h1"), (8, 4, "h2")]
"""One item in each block of 4, the last one of exactly its tokens."""


def keys_of(block: int, items: list[tuple[int, int, str]], tokens: int = 16) -> list[str]:
    """The hashes of the items in a block's extra key."""
    extras = block_extras(
        -(-tokens // BLOCK_SIZE),
        BLOCK_SIZE,
        [(offset, length) for offset, length, _ in items],
        [digest for _, _, digest in items],
        num_tokens=tokens,
    )
    return [str(digest) for digest, _ in media_items(extras.get(block, b""))]


@pytest.mark.parametrize(
    ("block", "items", "expected"),
    [
        pytest.param(0, [], [], id="no media"),
        pytest.param(2, ONE, [], id="the last item ends before the block"),
        pytest.param(1, [(0, 4, "h0")], [], id="the last item ends where the block starts"),
        pytest.param(0, [(0, 4, "h0")], ["h0"], id="an item ends where the block ends"),
        pytest.param(1, [(4, 1, "h0")], ["h0"], id="an item of the first token"),
        pytest.param(0, [(4, 1, "h0")], [], id="an item starts where the block ends"),
        pytest.param(0, [(3, 1, "h0")], ["h0"], id="an item of the last token"),
        pytest.param(0, ONE, ["h0"], id="an item goes on in the next block"),
        pytest.param(1, ONE, ["h0"], id="the next block sees it again"),
        pytest.param(1, [(2, 10, "h0")], ["h0"], id="an item covers the block"),
        pytest.param(3, [(2, 10, "h0")], [], id="a block after an item of three blocks"),
        pytest.param(0, SEVERAL, ["h0"], id="an earlier block than the later items"),
        pytest.param(1, SEVERAL, ["h1"], id="items before and after are skipped"),
        pytest.param(2, SEVERAL, ["h2"], id="the list ends in the block"),
        pytest.param(
            0, [(0, 1, "h0"), (1, 1, "h1"), (3, 2, "h2")], ["h0", "h1", "h2"], id="three items"
        ),
    ],
)
def test_the_items_of_a_block(block, items, expected):
    assert keys_of(block, items) == expected


def test_a_scan_in_the_order_of_the_blocks():
    items = [(0, 6, "h0"), (9, 5, "h1"), (14, 6, "h2")]
    found = [keys_of(block, items, 24) for block in range(6)]
    assert found == [["h0"], ["h0"], ["h1"], ["h1", "h2"], ["h2"], []]


@pytest.mark.parametrize(
    ("positions", "hashes", "text"),
    [
        ([(0, 2)], ["a", "b"], "1 media positions, 2 hashes"),
        ([(0, 0)], ["a"], "not empty"),
        ([(-1, 2)], ["a"], "ascending"),
        ([(4, 2), (0, 2)], ["a", "b"], "ascending"),
        ([(0, 3), (2, 3)], ["a", "b"], "disjoint"),
        ([(6, 3)], ["a"], "ends at 9, beyond the prompt's 8 tokens"),
    ],
)
def test_items_that_do_not_fit_are_named(positions, hashes, text):
    with pytest.raises(ValueError, match=text):
        block_extras(2, BLOCK_SIZE, positions, hashes, num_tokens=8)


@st.composite
def laid_out(draw):
    """Items of random gaps and lengths."""
    items, end = [], 0
    for number in range(draw(st.integers(0, 6))):
        offset = end + draw(st.integers(0, 9))
        length = draw(st.integers(1, 9))
        items.append((offset, length, f"h{number}"))
        end = offset + length
    return items, end + draw(st.integers(0, 9))


@given(laid_out())
def test_a_block_has_the_items_of_its_tokens(drawn):
    items, tokens = drawn
    for block in range(-(-tokens // BLOCK_SIZE)):
        own = range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        expected = [
            digest
            for offset, length, digest in items
            if any(token in own for token in range(offset, offset + length))
        ]
        assert keys_of(block, items, tokens) == expected


@pytest.mark.parametrize(
    ("place", "hit"),
    [((0, 4), 0), ((3, 2), 0), ((4, 4), 4), ((7, 1), 4), ((8, 4), 8), ((11, 1), 8), ((12, 1), 12)],
)
def test_blocks_before_an_item_are_shared_with_a_prompt_without_it(engine, place, hit):
    one = engine(gpu=12)
    prompt = list(range(13))
    one.serve("plain", prompt)
    assert one.serve("media", prompt, [(*place, "cat")])["gpu_match_token_num"] == hit


@pytest.mark.parametrize("item", [(5, 1), (4, 2), (1, 5)])
def test_an_item_in_the_tail_is_part_of_the_block_that_the_output_fills(engine, item):
    """The tail of 2 tokens has no hash before the output has filled its block."""
    one = engine(gpu=8)
    request = Request("a", list(range(6)), [(*item, "cat")])
    one.prefill(request)
    assert request.num_cached_blocks == 1
    request.output_token_ids += [7, 7, 7]
    request.block_tables += one.manager.allocate_gpu_blocks(1, "a")
    one.manager.cache_output_blocks(request, BLOCK_SIZE)
    assert request.num_cached_blocks == 2
    one.free(request)
    tokens = request.tokens
    assert one.match(Request("b", tokens, [(*item, "dog")]))[1] == (0 if item[0] < 4 else 4)
    assert one.match(Request("c", tokens))[1] == (0 if item[0] < 4 else 4)
    assert one.match(Request("d", tokens, [(*item, "cat")]))[1] == 8
