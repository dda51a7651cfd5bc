"""Checks of reports on a batch: a store or a copy engine supplied by the user may return invalid
values.

A report that does not fit its batch counts as a failure of all of it. So wrong lengths, types and
values cost a miss or a write, never a wrong byte.
"""

from __future__ import annotations

import operator
from typing import Any

from kvactors.storage.messages import Outcome

KNOWN = frozenset(int(outcome) for outcome in Outcome)


def outcomes_of(report: Any, keys: int) -> bytes:
    """One `Outcome` for each key: UNAVAILABLE for an unknown value, and for every key if the report
    has another type or length."""
    if not isinstance(report, bytes | bytearray | memoryview):
        return bytes([Outcome.UNAVAILABLE]) * keys
    outcomes = bytes(report)
    if len(outcomes) != keys:
        return bytes([Outcome.UNAVAILABLE]) * keys
    return bytes(value if value in KNOWN else Outcome.UNAVAILABLE for value in outcomes)


def count_of(report: Any, most: int) -> int:
    """A number of leading blocks, from 0 to `most`, or 0 for any other report."""
    try:
        count = operator.index(report)
    except TypeError:
        return 0
    return count if 0 <= count <= most else 0
