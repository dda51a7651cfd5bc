"""Which roots requests begin at. A block below another root cannot be hit, so it is not announced.

The namespace is in the root hash and not in what a sink is sent: to a router, blocks of one token
path under two namespaces are the same path with other hashes, and it would answer with those that
no request can get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvactors.flush_notifier.messages import Origin
from kvactors.flush_notifier.runs import BITS, LAST, Entry
from kvactors.flush_notifier.view import ABOVE_ALL
from kvactors.types import Reason

if TYPE_CHECKING:
    from kvactors.flush_notifier.ledger import Ledger

RootOf = Callable[[Origin], bytes]
"""The root hash of requests of an adapter and a salt that are admitted now."""


def above_first(root_of: RootOf | None, first: Entry) -> int:
    """What stands for the block above the first block of a path: nothing if no request of now
    begins at its root."""
    return ABOVE_ALL if root_of is None or root_of(first.origin) == first.parent_key else 0


def rescope(ledger: Ledger, root_of: RootOf) -> Iterator[None]:
    """Requests begin at other roots from now on. Steps of `ledger.step` blocks; no fact comes
    between them."""
    ledger.root_of = root_of
    ledger.version += 1
    ledger.spreading += 1
    for i, entry in enumerate(ledger.order.up_to(ledger.order.last_number), 1):
        before = entry.dues[:]
        ledger._look(
            entry
        )  # parents come before children, so what is due of the block above is final
        if entry.dues != before:
            for index in (LAST, *BITS[int(entry.truth)]):
                entry.reasons[index] = Reason.NAMESPACE
        if not i % ledger.step:
            ledger.version += 1
            yield from ledger.trim()
            yield
    ledger.spreading -= 1
    ledger.version += 1
    yield from ledger.trim()
