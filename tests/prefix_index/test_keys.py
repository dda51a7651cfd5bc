"""Names of blocks: the published vectors by three roads, and media ranges."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path as FilePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.identity import CacheScope, block_extras, media_extra, media_items
from kvactors.native import Path, chain_hashes
from tests.support.path_model import PathModel

DOC = (FilePath(__file__).parents[2] / "docs" / "keys.md").read_text()
VECTORS: dict[str, list[dict[str, Any]]] = {}
for text in re.findall(r"```json\n(.*?)```", DOC, re.DOTALL):
    VECTORS |= json.loads(text)


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def tagged(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


def media_hash(value: dict[str, Any]) -> bytes | str | int:
    return bytes.fromhex(value["hex"]) if "hex" in value else value.get("text", value.get("int"))


# -- the published vectors


def test_the_page_has_vectors_of_every_kind() -> None:
    assert {name: len(rows) >= 5 for name, rows in VECTORS.items()} == {
        "roots": True,
        "extras": True,
        "chains": True,
    }


@pytest.mark.parametrize("row", VECTORS["roots"])
def test_published_root_keys(row: dict[str, Any]) -> None:
    fingerprint = bytes.fromhex(row["fingerprint"])
    fields = [(1, fingerprint), (2, row["model"].encode()), (3, row["namespace"].encode())]
    fields += [
        (tag, row[name].encode())
        for tag, name in ((4, "salt"), (5, "lora"))
        if row[name] is not None
    ]
    by_hand = sha(b"kvactors.key.v2", *(tagged(tag, value) for tag, value in fields))
    assert by_hand.hex() == row["key"]
    scope = CacheScope(row["model"], row["namespace"], row["lora"], row["salt"])
    assert scope.root(fingerprint).hex() == row["key"]


@pytest.mark.parametrize("row", VECTORS["extras"])
def test_published_extra_keys(row: dict[str, Any]) -> None:
    encode = {
        "hex": (4, bytes.fromhex),
        "text": (5, str.encode),
        "int": (6, lambda number: str(number).encode()),
    }
    by_hand = b"".join(
        tagged(encode[kind][0], struct.pack("<q", item["offset"]) + encode[kind][1](value))
        for item in row["items"]
        for kind, value in item.items()
        if kind != "offset"
    )
    assert by_hand.hex() == row["extra"]
    items = [(media_hash(value), value["offset"]) for value in row["items"]]
    assert media_extra(items).hex() == row["extra"]
    assert media_items(by_hand) == items


@pytest.mark.parametrize("row", VECTORS["chains"])
def test_published_chains(row: dict[str, Any]) -> None:
    size, tokens, root = row["block_size"], row["tokens"], bytes.fromhex(row["root"])
    extras = {int(block): bytes.fromhex(extra) for block, extra in row["extras"].items()}
    full = len(tokens) // size

    by_hand, parent = [], root
    for block in range(full):
        extra = extras.get(block, b"")
        packed = struct.pack(f"<{size}I", *tokens[block * size : (block + 1) * size])
        parent = sha(parent, struct.pack("<I", len(extra)), extra, packed)
        by_hand.append(parent.hex())
    assert by_hand == row["keys"]

    for path in (Path(size, root), PathModel(size, root)):
        path.extend(tokens)
        for block, extra in extras.items():
            path.set_extra(block, extra)
        assert path.hashes(0, full).hex() == "".join(row["keys"])
        assert path.num_plain_blocks == min([full, *extras])
    if not extras:
        assert chain_hashes(root, tokens, size).hex() == "".join(row["keys"])


ITEMS = st.lists(
    st.tuples(st.binary(max_size=5) | st.text(max_size=5) | st.integers(), st.integers(-9, 9)),
    max_size=4,
)


@given(ITEMS, ITEMS)
def test_different_media_have_different_extra_keys(one: list[Any], other: list[Any]) -> None:
    assert (media_extra(one) == media_extra(other)) == (one == other)
    assert media_items(media_extra(one)) == one


def test_a_media_hash_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        media_extra([(1.5, 0)])  # type: ignore[list-item]


@pytest.mark.parametrize("cut", range(1, 15))
def test_bytes_that_are_no_extra_key_are_refused(cut: int) -> None:
    whole = media_extra([(b"\x00\xff", 0)])
    for wrong in (whole[:cut], b"\x01" + whole[1:], whole + whole[:cut]):
        with pytest.raises(ValueError, match="extra key"):
            media_items(wrong)


# -- media ranges: blocks of 4 tokens, blocks 0 to 3

RANGES = [
    ([], {}),
    ([(0, 4)], {0: [0]}),  # ends exactly where block 1 starts
    ([(0, 5)], {0: [0], 1: [0]}),
    ([(3, 1)], {0: [0]}),
    ([(4, 1)], {1: [0]}),  # starts exactly where block 0 ends
    ([(3, 2)], {0: [0], 1: [0]}),
    ([(2, 12)], {0: [0], 1: [0], 2: [0], 3: [0]}),  # spans
    ([(0, 8), (8, 2), (10, 2)], {0: [0], 1: [0], 2: [1, 2]}),
    ([(0, 1), (1, 1), (2, 1), (3, 1)], {0: [0, 1, 2, 3]}),
    ([(1, 4), (5, 6)], {0: [0], 1: [0, 1], 2: [1]}),
    ([(15, 9)], {3: [0]}),  # reaches into blocks beyond those asked for
    ([(16, 4)], {}),
    ([(20, 1)], {}),
]


@pytest.mark.parametrize(("positions", "expected"), RANGES)
def test_media_belong_to_the_blocks_they_overlap(
    positions: list[tuple[int, int]], expected: dict[int, list[int]]
) -> None:
    hashes = [f"item {i}" for i in range(len(positions))]
    extras = block_extras(4, 4, positions, hashes)
    begin = {i: offset for i, (offset, _) in enumerate(positions)}
    wanted = {
        block: [(hashes[i], begin[i] - 4 * block) for i in items]
        for block, items in expected.items()
    }
    assert extras == {block: media_extra(items) for block, items in wanted.items()}


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=5))
def test_the_range_rule_holds_for_any_items(block_size: int, gaps: list[tuple[int, int]]) -> None:
    positions, end = [], 0
    for gap, length in gaps:
        positions.append((end + gap, length))
        end += gap + length
    hashes = list(range(len(positions)))
    extras = block_extras(6, block_size, positions, hashes)
    for block in range(6):
        start, stop = block * block_size, (block + 1) * block_size
        overlapping = [
            (i, offset - start)
            for i, (offset, length) in enumerate(positions)
            if offset < stop and offset + length > start
        ]
        assert extras.get(block, b"") == media_extra(overlapping)


@pytest.mark.parametrize(
    ("positions", "hashes", "message"),
    [
        ([(0, 1)], [], "1 media positions, 0 hashes"),
        ([(-1, 2)], ["a"], "at -1"),
        ([(0, 0)], ["a"], "length 0"),
        ([(0, -3)], ["a"], "length -3"),
        ([(0, 4), (3, 2)], ["a", "b"], "at 3"),  # they overlap
        ([(8, 2), (0, 2)], ["a", "b"], "at 0"),  # not ascending
        ([(14, 3)], ["a"], "ends at 17"),
    ],
)
def test_bad_media_are_refused(
    positions: list[tuple[int, int]], hashes: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        block_extras(4, 4, positions, hashes, num_tokens=16)
