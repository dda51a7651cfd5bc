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
NAME = st.from_regex(r"\A[a-z0-9_-]{1,3}\Z")
PRINTS = st.binary(max_size=3)
SCOPES = st.builds(CacheScope, TEXT, TEXT, st.none() | TEXT, st.none() | TEXT)
STORES = st.builds(StoreIdentity, TEXT, NAME, PRINTS, st.integers(0, 11), st.integers(1, 12))

PARTS = ("", "a", "b", "ab", "a\x02\0\0\0", "\x03")


@given(SCOPES, PRINTS, SCOPES, PRINTS)
@example(CacheScope("ab", "c"), b"f", CacheScope("a", "bc"), b"f")
@example(CacheScope("m", "n", lora="x"), b"f", CacheScope("m", "n", salt="x"), b"f")
@example(CacheScope("m", "n", salt=""), b"f", CacheScope("m", "n"), b"f")
def test_different_scopes_have_different_roots(
    one: CacheScope, print_of_one: bytes, other: CacheScope, print_of_other: bytes
) -> None:
    same = (one, print_of_one) == (other, print_of_other)
    assert (one.root(print_of_one) == other.root(print_of_other)) == same


def test_no_text_moves_from_one_field_of_a_root_into_another() -> None:
    optional = (None, *PARTS)
    scopes = [CacheScope(*parts) for parts in product(PARTS, PARTS, optional, optional)]
    assert _distinct(scope.root(b"f") for scope in scopes) == len(scopes)


@given(STORES, STORES)
def test_different_store_identities_never_share_a_place(
    one: StoreIdentity, other: StoreIdentity
) -> None:
    same = one == other
    assert (one.digest == other.digest) == same
    assert (one.pool_prefix == other.pool_prefix) == same
    assert same or not one.pool_prefix.startswith(other.pool_prefix)
    same_but_for_layout = one._replace(fingerprint=b"") == other._replace(
        fingerprint=b""
    )  # layouts share a folder
    assert (one.folder("d") == other.folder("d")) == same_but_for_layout


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
