"""Which blocks a media item belongs to: any items against a scan token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.identity import block_extras, media_items
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request


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
