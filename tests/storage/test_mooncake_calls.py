"""Objects of each transfer of a pool."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.storage.mooncake import (
    CALL_SECONDS,
    LEAST_BYTES,
    LEAST_OBJECTS,
    MOST_BYTES,
    MOST_OBJECTS,
    CallSize,
)

MIB = 1 << 20


@given(
    st.integers(0, 3000),
    st.integers(1, 1 << 26),
    st.integers(1, MOST_OBJECTS),
    st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 100)), max_size=5),
)
def test_each_object_is_in_one_transfer_within_the_limits(count, block_bytes, most, transfers):
    size = CallSize(block_bytes)
    size.most_objects = most
    for objects, seconds in transfers:
        size.took(objects, seconds)
    parts = list(size.parts(count))
    assert [i for some in parts for i in range(count)[some]] == list(range(count))
    lengths = [some.stop - some.start for some in parts]
    for length in lengths:
        assert 0 < length <= most
        assert length <= LEAST_OBJECTS or length * block_bytes <= MOST_BYTES
    assert not lengths or max(lengths) - min(lengths) <= 1
    for one, other in pairwise(lengths):
        room = min(most, LEAST_BYTES // block_bytes)
        assert one + other > room, "two transfers that fit into one"


@pytest.mark.parametrize(
    ("rate", "lengths"),
    [(0.1e9, [8, 8, 8, 8]), (0.24e9, [11, 11, 10]), (0.4e9, [16, 16]), (3e9, [32])],
)
def test_transfers_take_about_the_wanted_time(rate, lengths):
    size = CallSize(2 * MIB)
    for _ in range(3):
        size.took(16, 16 * 2 * MIB / rate)
    parts = [some.stop - some.start for some in size.parts(32)]
    assert parts == lengths
    assert parts[0] * 2 * MIB / rate <= max(CALL_SECONDS, LEAST_BYTES / rate)


def test_short_and_failed_transfers_do_not_change_the_rate():
    size = CallSize(2 * MIB)
    size.took(32, 32 * 2 * MIB / 30e9)
    for objects, seconds in ((1, 1.0), (0, 5.0), (32, 0.0)):
        size.took(objects, seconds)
    assert len(list(size.parts(32))) == 1


def test_the_rate_follows_the_link():
    size = CallSize(2 * MIB)
    size.took(32, 32 * 2 * MIB / 30e9)
    for _ in range(20):
        size.took(32, 32 * 2 * MIB / 0.1e9)
    assert len(list(size.parts(32))) == 4
