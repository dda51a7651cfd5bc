"""Slots of a file store: free, read, or in quarantine."""

from __future__ import annotations

from kvactors.storage.file.slots import LONGEST, PAUSE, Slots


def test_a_slot_that_is_read_becomes_free_when_its_last_reader_ends():
    slots = Slots()
    slots.begin_reads([1])
    slots.begin_reads([1])
    slots.give([1, 2])
    assert list(slots.free) == [2]
    slots.end_reads([1])
    assert list(slots.free) == [2]
    slots.end_reads([1])
    assert list(slots.free) == [2, 1]


def test_a_free_slot_can_be_the_next_one():
    slots = Slots()
    slots.give([1, 2, 3])
    slots.first(3)
    slots.first(9)
    slots.first(None)
    assert list(slots.free) == [3, 1, 2]


def test_the_quarantine_doubles_with_each_corrupt_object_up_to_a_day():
    slots = Slots()
    now = 0.0
    for pause in (PAUSE, 2 * PAUSE, 4 * PAUSE):
        slots.suspect(5, now)
        assert (slots.quarantined, slots.release(now + pause - 1)) == (1, False)
        now += pause
        assert slots.release(now)
    for _ in range(30):
        slots.suspect(5, 0.0)
    assert (slots.release(LONGEST - 1), slots.release(LONGEST)) == (False, True)


def test_first_offenders_are_released_when_slots_run_out():
    slots = Slots()
    slots.suspect(1, 0.0)
    for _ in range(2):
        slots.suspect(2, 0.0)
    assert (slots.release_first_offenders(), list(slots.free)) == (True, [1])
    assert (slots.release_first_offenders(), slots.quarantined) == (False, 1)


def test_a_suspect_that_returned_the_written_bytes_starts_over():
    slots = Slots()
    slots.suspect(1, 0.0)
    slots.release(PAUSE)
    slots.passed(1)
    assert slots.suspects == set()
    slots.suspect(1, 0.0)
    assert slots.release(PAUSE)
