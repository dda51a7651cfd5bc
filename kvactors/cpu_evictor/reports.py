"""What other actors report of a batch, checked: a store or a copy engine of the user's own may
answer with anything.

What does not fit the batch counts as a failure of all of it. So wrong lengths, types and values
cost a miss or a write, never a wrong byte.
"""

from __future__ import annotations

import operator
from typing import Any

from kvactors.storage.messages import Outcome

KNOWN = frozenset(int(outcome) for outcome in Outcome)


def outcomes_of(report: Any, keys: int) -> bytes:
    """One outcome a key: UNAVAILABLE for a value that is none, and for every key of a report of
    another type or length."""
    if not isinstance(report, bytes | bytearray | memoryview):
        return bytes([Outcome.UNAVAILABLE]) * keys
    outcomes = bytes(report)
    if len(outcomes) != keys:
        return bytes([Outcome.UNAVAILABLE]) * keys
    return bytes(value if value in KNOWN else Outcome.UNAVAILABLE for value in outcomes)


def count_of(report: Any, most: int) -> int:
    """A number of leading blocks from 0 to `most`; 0 for anything else."""
    try:
        count = operator.index(report)
    except TypeError:
        return 0
    return count if 0 <= count <= most else 0
