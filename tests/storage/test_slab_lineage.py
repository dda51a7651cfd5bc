"""Lineages in table entries, and of objects that are being written."""

from __future__ import annotations

import msgspec

from kvactors.flush_notifier.messages import PLAIN, RequestScope
from kvactors.lineage import Lineage
from kvactors.storage.catalog import OwnedInventory
from kvactors.storage.file.table import (
    ENTRY_BYTES,
    PARENT,
    WritingLineages,
    entry_bytes_for,
    fields_of_lineage,
    lineage_in,
)

LINEAGE = Lineage(bytes(32), b"1234" * 4, b"image", RequestScope("adapter", lora_id=7))


def test_a_lineage_is_read_as_it_was_written():
    for lineage in (LINEAGE, msgspec.structs.replace(LINEAGE, extra_key=b"", scope=PLAIN)):
        fields = fields_of_lineage(lineage, 1000)
        assert lineage_in(fields, lineage.block_hash()) == lineage


def test_a_lineage_of_another_key_is_none():
    fields = fields_of_lineage(LINEAGE, 1000)
    assert lineage_in(fields, bytes(32)) is None
    assert lineage_in({}, LINEAGE.block_hash()) is None
    assert lineage_in(fields | {PARENT: b"short"}, LINEAGE.block_hash()) is None


def test_a_lineage_is_written_whole_or_not_at_all():
    assert fields_of_lineage(LINEAGE, 40) == {}
    assert fields_of_lineage(None, 1000) == {}


def test_entries_hold_the_tokens_of_a_block():
    assert entry_bytes_for(0) == ENTRY_BYTES
    assert entry_bytes_for(64) % 8 == 0
    assert entry_bytes_for(64) > 4 * 64 + 32
    assert entry_bytes_for(1 << 20) == ENTRY_BYTES


def test_lineages_are_kept_while_their_batch_is_written():
    writing, inventory = WritingLineages(), OwnedInventory()
    key, stored = b"k" * 32, b"s" * 32
    inventory.catalog.admit([stored])
    with writing.of_batch([key, stored], [LINEAGE, LINEAGE], inventory):
        assert (writing.get(key), writing.get(stored), len(writing)) == (LINEAGE, None, 1)
        with writing.of_batch([key], [LINEAGE], inventory):
            pass
        assert len(writing) == 0
    assert len(writing) == 0


def test_a_batch_that_ends_leaves_the_lineage_of_a_later_one():
    writing, inventory = WritingLineages(), OwnedInventory()
    key = b"k" * 32
    first = writing.of_batch([key], [LINEAGE], inventory)
    first.__enter__()
    second = writing.of_batch([key], [LINEAGE], inventory)
    second.__enter__()
    first.__exit__(None, None, None)
    assert writing.get(key) == LINEAGE
    second.__exit__(None, None, None)
    assert len(writing) == 0
