"""Headers, names and addresses of objects of shared stores, by the native calls."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvactors.native import addresses, check_headers, make_headers
from kvactors.storage.header import HEADER, MAGIC, NO_SPACE, NOT_FOUND, VERSION, Fit, outcome_of
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import key

SIZE, DIGEST = 5000, bytes(range(32))


def header(name: bytes, payload: bytes) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(payload)
    return HEADER.pack(MAGIC, VERSION, 0, DIGEST, name, len(payload), checksum)


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


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, Outcome.OK), (NO_SPACE, Outcome.NO_SPACE), (NOT_FOUND, Outcome.MISS)]
)
def test_outcomes_of_codes(code, outcome):
    assert outcome_of(code) == outcome
    assert outcome_of(-12345) == Outcome.UNAVAILABLE
