"""Entries of a file store's table, and its first page."""

from __future__ import annotations

import pytest

from kvactors.errors import StoreError
from kvactors.storage.file.table import (
    ENTRY_BYTES,
    PAGE,
    Damaged,
    Meta,
    checksum_of,
    entry_in,
    entry_of,
    fields_of,
    is_marked,
    mark_of,
    meta_of,
    scan,
)

META = Meta("ab" * 32, 5000, 8192, 16, generation=3)
KEY = bytes(range(32))


def entry(sequence: int = 7, generation: int = 3, fields=None) -> bytes:
    return entry_of(META, KEY, 123, sequence, generation, fields)


def test_an_entry_is_read_as_it_was_written():
    found = entry_in(entry(fields={1: b"12345678"}), 4, META)
    assert (found.slot, found.key, found.sequence, found.checksum) == (4, KEY, 7, 123)
    assert found.metadata == {1: b"12345678"}
    assert len(found.raw) == ENTRY_BYTES


def test_a_mark_recognizes_its_entry_and_has_the_checksum_of_the_payload():
    raw = entry()
    assert is_marked(raw, mark_of(raw))
    assert checksum_of(mark_of(raw)) == 123
    assert not is_marked(entry(sequence=8), mark_of(raw))
    assert not is_marked(raw[:-1] + b"x", mark_of(raw))


@pytest.mark.parametrize("at", range(0, ENTRY_BYTES, 7))
def test_an_entry_with_a_flipped_bit_is_none(at):
    raw = bytearray(entry())
    raw[at] ^= 1
    assert entry_in(bytes(raw), 0, META) is None


@pytest.mark.parametrize(
    ("sequence", "good"), [(2**63 - 1, True), (2**63, False), (2**64 - 1, False)]
)
def test_an_entry_whose_sequence_number_has_no_successor_is_none(sequence, good):
    assert (entry_in(entry(sequence), 0, META) is not None) == good


def test_fields_that_do_not_fit_are_left_out():
    long = {1: b"12345678", 9: bytes(ENTRY_BYTES)}
    assert fields_of(entry(fields=long)) == {1: b"12345678"}


def test_fields_end_where_one_is_cut_short():
    raw = entry(fields={1: b"12345678", 2: b"1234"})
    cut = raw[:12] + (14).to_bytes(4, "little") + raw[16:]
    assert fields_of(cut) == {1: b"12345678"}


def test_a_scan_distinguishes_torn_entries_and_those_of_earlier_generations():
    table = entry(9) + bytes(ENTRY_BYTES) + entry(5) + entry(1, generation=2) + b"x" * ENTRY_BYTES
    found = scan(table, META, first=10)
    assert [(one.slot, one.sequence) for one in found.found] == [(12, 5), (10, 9)]
    assert (found.torn, found.stale) == (1, 1)


def test_a_first_page_is_read_as_it_was_written():
    page = META.page()
    assert (len(page), meta_of(page, "here")) == (PAGE, META)


def test_a_first_page_is_damaged_or_of_another_version():
    with pytest.raises(Damaged, match="checksum"):
        meta_of(b"x" * PAGE, "here")
    later = Meta("ab" * 32, 1, 4096, 1, version=3)
    with pytest.raises(StoreError, match="format version 3"):
        meta_of(later.page(), "here")
    with pytest.raises(Damaged, match="stride is 1"):
        meta_of(Meta("ab" * 32, 5000, 1, 1).page(), "here")
