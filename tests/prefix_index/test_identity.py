"""No two scopes have one root hash, and no two store identities have one digest, folder or pool
prefix."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from kvactors.identity import CacheScope, StoreIdentity

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=4) | st.sampled_from(
    ["a", "ab", "b", "a/b", "a_b", "\x01\0\0\0a"]
)

PARTS = ("", "a", "b", "ab", "a\x02\0\0\0", "\x03")


def test_no_text_moves_from_one_field_of_a_root_into_another() -> None:
    optional = (None, *PARTS)
    scopes = [CacheScope(*parts) for parts in product(PARTS, PARTS, optional, optional)]
    assert _distinct(scope.root(b"f") for scope in scopes) == len(scopes)


def test_no_text_moves_from_one_field_of_a_store_identity_into_another() -> None:
    prints = [part.encode() for part in PARTS]
    stores = [StoreIdentity(*parts) for parts in product(PARTS, PARTS, prints, (0, 1, 11), (1, 11))]
    assert _distinct(store.digest for store in stores) == len(stores)


@given(TEXT)
@example("../../etc")
@example("..")
@example("/")
@example("org/" + "m" * 300)
def test_a_model_is_one_plain_folder_name(model: str) -> None:
    folder = StoreIdentity(model, "space", bytes(32), 1, 2).folder("base")
    assert folder.parts[2:] == ("space", "rank-1-of-2")
    assert folder.parts[0] == "base"
    assert Path(folder.parts[1]).name == folder.parts[1]
    assert len(folder.parts[1]) < 100
    assert folder.parts[1].isascii()
    assert not folder.parts[1].startswith((".", "-"))


def _distinct(values: Iterable[bytes]) -> int:
    return len(set(values))
