"""Headers, names and addresses of the objects of a Mooncake pool, by the native calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.native import addresses, check_headers, make_headers, object_names, slot_pointers
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import HEADER, Compared, Fit, PoolHeaders, outcome_of
from kvactors.storage.mooncake_client import NO_SPACE, NOT_FOUND
from kvactors.testing.store_contract import key
from tests.storage.test_mooncake_objects import DIGEST, SIZE, header

WHOLE = SIZE + HEADER.size


@pytest.mark.parametrize("count", [1, 2, 5])
def test_headers_of_large_objects_by_several_threads_are_those_of_one(count):
    size = (8 << 20) // count + 17
    memory = np.zeros((count, size + HEADER.size), np.uint8)
    memory[:, :size] = np.random.default_rng(count).integers(0, 256, (count, size), np.uint8)
    keys = [key(i) for i in range(count)]
    about = (DIGEST, b"".join(keys), [[int(row.ctypes.data)] for row in memory], size)
    make_headers(*about)
    for name, row in zip(keys, memory, strict=True):
        assert bytes(row[size:]) == header(name, bytes(row[:size]))
    assert check_headers(*about) == bytes([Fit.FITS] * count)
    memory[count - 1, size // 2] ^= 1
    assert check_headers(*about) == bytes([Fit.FITS] * (count - 1) + [Fit.DIFFERS])


def test_lists_that_do_not_fit_are_refused():
    memory = np.zeros(SIZE + HEADER.size, np.uint8)
    where = addresses([memory.data])
    assert where == [memory.ctypes.data]
    for digest, keys, pointers, fault in (
        (DIGEST[1:], key(1), [where], ValueError),
        (DIGEST, key(1)[1:], [where], ValueError),
        (DIGEST, key(1), [where, where], ValueError),
        (DIGEST, key(1), [[]], ValueError),
        (DIGEST, key(1), [where * 3], ValueError),
        (DIGEST, key(1), [tuple(where)], TypeError),
        (DIGEST, key(1), where, TypeError),
    ):
        for call in (make_headers, check_headers):
            with pytest.raises(fault):
                call(digest, keys, pointers, SIZE)
    assert not memory.any()


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=20))
def test_names_are_the_prefix_and_the_keys_in_hex(keys):
    assert object_names("p/", b"".join(keys)) == ["p/" + one.hex() for one in keys]


def test_parts_of_keys_have_no_names():
    with pytest.raises(ValueError, match="32 bytes each"):
        object_names("p/", bytes(33))


@given(st.lists(st.integers(0, 1 << 20), max_size=20), st.sampled_from([list, tuple]))
def test_a_slot_has_one_piece(slots, kind):
    found = slot_pointers(1 << 40, 8192, kind(slots))
    assert found == [[(1 << 40) + 8192 * slot] for slot in slots]
    assert slot_pointers(7, 3, range(2)) == [[7], [10]]


def test_a_slot_below_the_first_one_is_refused():
    with pytest.raises((TypeError, ValueError, OverflowError)):
        slot_pointers(4096, 4096, [-1])


# -- headers of a batch


@pytest.mark.parametrize("verifies", [True, False])
@given(st.lists(st.sampled_from([WHOLE, WHOLE - 1, 0, NOT_FOUND, -800]), max_size=12), st.data())
def test_only_objects_that_arrived_whole_are_compared(verifies, codes, data):
    """By the codes of a read. Those that arrived have a checksum, or none, or a wrong key."""
    headers, bare = PoolHeaders(DIGEST, SIZE, verifies), PoolHeaders(DIGEST, SIZE, False)
    memory = np.zeros((len(codes), WHOLE), np.uint8)
    keys = [key(i) for i in range(len(codes))]
    pointers = [[int(row.ctypes.data)] for row in memory]
    kinds = [data.draw(st.sampled_from(["checksum", "none", "other"])) for _ in codes]
    wanted, without = [], 0
    for one, where, code, kind in zip(keys, pointers, codes, kinds, strict=True):
        named = key(99) if kind == "other" else one
        (bare if kind == "none" else PoolHeaders(DIGEST, SIZE, True)).make(named, [where])
        if code != WHOLE:
            wanted.append(Outcome.CORRUPT if code >= 0 else outcome_of(code))
        elif kind == "other":
            wanted.append(Outcome.CORRUPT)
        else:
            refused = kind == "none" and verifies
            without += refused
            wanted.append(Outcome.MISS if refused else Outcome.OK)
    assert headers.compare(b"".join(keys), pointers, codes) == Compared(bytes(wanted), without)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(0, Outcome.OK), (NO_SPACE, Outcome.NO_SPACE), (NOT_FOUND, Outcome.MISS)],
)
def test_outcomes_of_codes(code, outcome):
    assert outcome_of(code) == outcome
    assert outcome_of(-12345) == Outcome.UNAVAILABLE
