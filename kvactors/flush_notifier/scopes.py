"""Root hashes of present requests. A block below another root cannot be hit, so it is not
announced.

The namespace is part of the root hash, and a sink is not sent it. To a router, blocks of one token
path under two namespaces are one path with different hashes, and the router would answer with
blocks that no request can get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvactors.flush_notifier.blocks import BITS, LAST, REASON_NUMBERS, LedgerBlock
from kvactors.flush_notifier.filter import ABOVE_ALL
from kvactors.flush_notifier.messages import RequestScope
from kvactors.types import Reason

if TYPE_CHECKING:
    from kvactors.flush_notifier.ledger import Ledger

RootOf = Callable[[str, RequestScope], bytes]
"""The root hash of the requests of a namespace, an adapter and a salt."""


class Scopes:
    """The roots that requests begin at.

    Attributes:
        root_of: None if they begin at every root.
    """

    def __init__(self, root_of: RootOf | None, namespace: str) -> None:
        self.root_of = root_of
        self.namespace = namespace

    def above_first(self, first: LedgerBlock) -> int:
        """The tiers due above the first block of a path: none unless requests begin at its root
        now."""
        if self.root_of is None or self.root_of(self.namespace, first.scope) == first.parent_hash:
            return ABOVE_ALL
        return 0


def rescope(ledger: Ledger, namespace: str) -> Iterator[None]:
    """Requests are of another namespace from now on. The ledger must not change between the
    steps."""
    tree, scopes = ledger.tree, ledger.scopes
    scopes.namespace = namespace
    if scopes.root_of is None:
        return
    tree.version += 1
    tree.spreading += 1
    for i, block in enumerate(tree.order, 1):  # parents first, so the due state above is final
        before = block.due[:]
        ledger.update(block)
        if block.due != before:
            for index in (LAST, *BITS[int(block.tiers)]):
                block.reasons[index] = REASON_NUMBERS[Reason.NAMESPACE]
        if not i % tree.step:
            tree.version += 1
            yield from tree.trim()
            yield
    tree.spreading -= 1
    tree.version += 1
    yield from tree.trim()
