"""Containment of calls to a back end, and the order of clears and writes."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.flush_notifier.messages import PathPart
from kvactors.storage.guarded import Clears, Containment
from kvactors.storage.messages import Outcome

KEY = bytes(32)


def contained() -> Containment:
    return Containment("a store", 60.0)


def raising(error: BaseException):
    def call():
        raise error

    return call


def test_an_exception_becomes_the_fallback_and_a_fault():
    calls = contained()
    assert calls.call("probe", raising(ValueError("no")), 7) == 7
    assert (calls.faults, "ValueError" in calls.last_fault) == (1, True)
    with pytest.raises(KeyboardInterrupt):
        calls.call("probe", raising(KeyboardInterrupt()), 7)
    assert calls.faults == 1


@pytest.mark.parametrize(
    ("found", "number"), [(3, 3), (0, 0), (-1, 0), (4, 0), ("3", 0), (None, 0)]
)
def test_a_number_is_in_range_or_nothing(found, number):
    calls = contained()
    assert calls.number("probe", found, 3) == number
    assert calls.faults == (found not in (0, 3))


def test_outcomes_are_one_valid_byte_a_key():
    class Report:
        outcomes = bytes([Outcome.OK, 200])

    calls = contained()
    assert list(calls.outcomes("read", Report, 2)) == [Outcome.OK, Outcome.UNAVAILABLE]
    assert list(calls.outcomes("read", Report, 1)) == [Outcome.UNAVAILABLE]
    assert list(calls.outcomes("read", None, 1)) == [Outcome.UNAVAILABLE]
    assert calls.faults == 3


def test_keys_are_32_bytes():
    calls = contained()
    assert calls.keys("lost", [KEY, b"short", None]) == [KEY]
    assert calls.keys("lost", "text") == calls.keys("lost", 7) == []
    assert calls.keys("lost", iter([KEY])) == [KEY]
    assert calls.faults == 3


def test_parts_of_paths_are_whole_or_none():
    calls = contained()
    part = PathPart(KEY, KEY, b"1234")
    assert calls.parts("next_paths", [part]) == [part]
    assert calls.parts("next_paths", [part, None]) is None
    assert calls.parts("next_paths", (part,)) is None
    assert calls.faults == 2


async def test_a_clear_waits_for_writes_in_flight():
    clears, order = Clears(), []

    async def clear() -> None:
        async with clears.clearing():
            order.append("cleared")

    with clears.writing():
        clearing = asyncio.create_task(clear())
        await asyncio.sleep(0)
        order.append("written")
        assert clears.closed
    await clearing
    assert (order, clears.closed) == (["written", "cleared"], False)


async def test_a_clear_that_fails_stays_pending_until_a_later_one_succeeds():
    clears = Clears()
    with pytest.raises(OSError, match="no"):
        async with clears.clearing():
            raise OSError("no")
    assert (clears.closed, clears.running) == (True, 0)
    async with clears.clearing():
        pass
    assert not clears.closed


async def test_an_earlier_clear_does_not_end_a_later_one():
    clears = Clears()
    first = clears.clearing()
    await first.__aenter__()
    with pytest.raises(OSError, match="no"):
        async with clears.clearing():
            raise OSError("no")
    await first.__aexit__(None, None, None)
    assert clears.pending
