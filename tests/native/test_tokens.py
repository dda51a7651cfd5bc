"""Which token sequences are read, which are refused, and that a refusal changes nothing. Block
hashes compared with hashlib."""

from __future__ import annotations

import array
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.native import HASH_BYTES, BlockTree, Path, chain_hashes

ROOT = bytes(range(32))
LARGEST = 2**32 - 1
TYPES = [
    np.int8,
    np.uint8,
    np.int16,
    np.uint16,
    np.int32,
    np.uint32,
    np.int64,
    np.uint64,
    np.intp,
    np.uintp,
]


def read(tokens, block_size=1):
    path = Path(block_size, ROOT)
    path.extend(tokens)
    return np.frombuffer(path.tokens(0, path.num_full_blocks), "<u4").tolist()


def names(tokens, block_size, extras=()):
    """The chain as docs/keys.md writes it, by another implementation."""
    key, chain = ROOT, b""
    for i in range(len(tokens) // block_size):
        extra = dict(extras).get(i, b"")
        words = np.array(tokens[i * block_size : (i + 1) * block_size], "<u4").tobytes()
        key = sha256(key + len(extra).to_bytes(4, "little") + extra + words).digest()
        chain += key
    return chain


@pytest.mark.parametrize("dtype", TYPES)
def test_numpy_integers_of_every_width(dtype):
    largest = min(np.iinfo(dtype).max, LARGEST)
    values = [0, 1, 5, largest, largest - 1]
    assert read(np.array(values, dtype)) == values


@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_arrays_of_every_code(code):
    assert read(array.array(code, [0, 1, 100])) == [0, 1, 100]
    assert read(memoryview(array.array(code, [0, 1, 100]))) == [0, 1, 100]


@pytest.mark.parametrize(
    "values",
    [[3, 1, LARGEST], (3, 1, LARGEST), [np.int64(3), np.uint8(1), LARGEST], range(5), [], ()],
)
def test_sequences(values):
    assert read(values) == [int(value) for value in values]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("step", [2, 3, -1, -2])
def test_a_buffer_need_not_be_contiguous(dtype, step):
    values = np.arange(100, dtype=dtype)[::step]
    assert read(values) == values.tolist()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_buffer_need_not_be_aligned_or_writable(dtype):
    odd = np.frombuffer(b"x" + np.arange(20, dtype=dtype).tobytes(), dtype, offset=1)
    assert not odd.flags.writeable
    assert read(odd) == list(range(20))


@given(st.lists(st.integers(0, LARGEST), max_size=70), st.integers(0, 70), st.integers(1, 5))
def test_tokens_read_in_two_parts_are_the_given_ones(values, cut, block_size):
    path = Path(block_size, ROOT)
    path.extend(values[:cut])
    path.extend(np.array(values[cut:], np.int64))
    full = len(values) // block_size
    assert (path.num_tokens, path.num_full_blocks) == (len(values), full)
    assert np.frombuffer(path.tokens(0, full), "<u4").tolist() == values[: full * block_size]


def test_a_prompt_large_enough_to_be_read_without_the_interpreter():
    values = np.random.default_rng(1).integers(0, LARGEST + 1, 200_000)
    assert read(values, 16) == values.tolist()
    assert read(values[::2], 16) == values[::2].tolist()
    bad = values.copy()
    for position in (0, 99_999, 199_999):
        bad[position] = -1
        with pytest.raises(ValueError, match="between 0 and"):
            read(bad)
        bad[position] = values[position]


OUT_OF_RANGE = [
    [1, -1],
    [1, LARGEST + 1],
    [1, 2**80],
    [1, -(2**80)],
    (1, -1),
    np.array([1, -1], np.int8),
    np.array([1, -1], np.int16),
    np.array([1, -1], np.int32),
    np.array([1, -1]),
    np.array([1, LARGEST + 1]),
    np.array([1, LARGEST + 1], np.uint64),
    np.array([1, 2**63], np.uint64),
    np.array([1, -(2**63)]),
    np.array([1, 7, -1, 7])[::2],
    array.array("q", [1, -1]),
]
NOT_INTEGERS = [
    [1, 2.0],
    [1, "2"],
    [1, None],
    (1, 2.5),
    "12",
    7,
    None,
    {1: 2},
    object(),
    np.array([1.0]),
    np.array([1.0], np.float16),
    np.array([True]),
    np.array([1j]),
    np.array(["a"]),
    np.array([(1, 2)], "i4,i4"),
    np.zeros((2, 2), np.int64),
    np.int64(7).reshape(()),
    array.array("d", [1.0]),
    [[1], [2]],
]


@pytest.mark.parametrize(
    ("tokens", "error"),
    [(t, ValueError) for t in OUT_OF_RANGE] + [(t, TypeError) for t in NOT_INTEGERS],
)
def test_a_refusal_appends_nothing(tokens, error):
    path = Path(2, ROOT)
    path.extend([1, 2, 3])
    with pytest.raises(error):
        path.extend(tokens)
    assert (path.num_tokens, path.hashes(0, 1)) == (3, names([1, 2], 2))
    path.extend([4])
    assert path.tokens(0, 2) == np.array([1, 2, 3, 4], "<u4").tobytes()
    with pytest.raises(error):
        chain_hashes(ROOT, tokens, 2)


class Meddler:
    """An integer whose reading runs other code."""

    def __init__(self, meddle) -> None:
        self.meddle = meddle

    def __index__(self) -> int:
        self.meddle()
        return 7


def test_a_path_is_not_entered_while_it_reads_tokens():
    path = Path(1, ROOT)
    tree = BlockTree(1)
    for meddle in (
        lambda: path.extend([9]),
        lambda: path.set_extra(0, b"x"),
        lambda: tree.pin(path),
        lambda: tree.peek(path),
    ):
        with pytest.raises(RuntimeError, match="in use"):
            path.extend([1, Meddler(meddle)])
        assert path.num_tokens == 0
    path.extend([1, Meddler(lambda: None)])
    assert path.tokens(0, 2) == np.array([1, 7], "<u4").tobytes()


def test_a_list_may_change_while_it_is_read():
    values = [1, 2, 3]
    values[1] = Meddler(values.clear)
    assert read(values) == [1, 7, 3]


@given(
    st.lists(st.integers(0, LARGEST), max_size=40),
    st.integers(1, 20),
    st.dictionaries(st.integers(0, 9), st.binary(max_size=70)),
)
def test_names_are_those_hashlib_gives(values, block_size, extras):
    path = Path(block_size, ROOT)
    for block, extra in extras.items():
        path.set_extra(block, extra)
    path.extend(values)
    full = len(values) // block_size
    expected = names(values, block_size, extras.items())
    assert path.hashes(0, full // 2) == expected[: HASH_BYTES * (full // 2)]
    assert path.hashes(0, full) == expected
    assert chain_hashes(ROOT, values, block_size) == names(values, block_size)


@pytest.mark.parametrize("block_size", [*range(1, 70), 128, 1000])
def test_names_for_every_padding(block_size):
    values = np.random.default_rng(block_size).integers(0, LARGEST + 1, 3 * block_size + 1)
    assert chain_hashes(ROOT, values, block_size) == names(values.tolist(), block_size)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Path(0, ROOT),
        lambda: Path(-1, ROOT),
        lambda: Path(16, b"short"),
        lambda: BlockTree(0),
        lambda: BlockTree(16, -1),
        lambda: chain_hashes(b"short", [1], 1),
        lambda: chain_hashes(ROOT, [1], 0),
        lambda: Path(1, ROOT).tokens(0, 1),
        lambda: Path(1, ROOT).hashes(-1, 0),
        lambda: Path(1, ROOT).hashes(1, 0),
        lambda: Path(1, ROOT).blocks(0, 1),
        lambda: Path(1, ROOT).is_shared(0),
        lambda: Path(1, ROOT).assign(1, [3]),
        lambda: Path(1, ROOT).assign(0, [-1]),
        lambda: BlockTree(2).pin(Path(1, ROOT)),
        lambda: BlockTree(2).host_blocks_added(b"short"),
    ],
)
def test_bad_sizes_are_refused(call):
    with pytest.raises(ValueError, match=r".+"):
        call()


def test_an_extra_key_comes_before_the_name():
    path = Path(2, ROOT)
    path.extend([1, 2, 3, 4])
    path.hashes(0, 1)
    with pytest.raises(ValueError, match="already has a name"):
        path.set_extra(0, b"image")
    path.set_extra(1, b"image")
    assert path.hashes(0, 2) == names([1, 2, 3, 4], 2, [(1, b"image")])
