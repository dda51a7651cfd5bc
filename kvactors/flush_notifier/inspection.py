"""Comparison of sinks' views with the tiers, for reports and invariants."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvactors.actor.log import described, get_logger
from kvactors.flush_notifier.checks import Tiers, divergence_steps
from kvactors.flush_notifier.deliveries import SinkDelivery
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.steps import Steps
from kvactors.types import Tier


def count_divergent_blocks(
    ledger: Ledger,
    deliveries: Sequence[SinkDelivery],
    tiers: Tiers,
    names: Collection[str] | None = None,
) -> Steps[int]:
    """Count the blocks on which a sink's view differs from the announceable blocks of the tiers.

    Not announceable are blocks whose path was never announced, blocks whose path is interrupted
    (see `Ledger`), and gains that are due to a sink when the request finishes.

    Args:
        ledger: the ledger.
        deliveries: of all sinks, in the ledger's order.
        tiers: the blocks that each tier holds.
        names: sinks to compare, all if None.
    """
    chosen = [i for i, one in enumerate(deliveries) if names is None or one.sink.name in names]
    mirrors = {i: own for i in chosen if (own := own_account(deliveries[i].sink)) is not None}
    return divergence_steps(ledger, chosen, mirrors, tiers)


def own_account(sink: Sink) -> Tiers | None:
    """A sink's own account of its view, None if it has none: `live_view` if there is one, otherwise
    `view()`, which copies everything."""
    foreign: Any = sink
    try:
        held: Any = getattr(foreign, "live_view", None)
        if held is None and (view := getattr(foreign, "view", None)) is not None:
            held = view()
        return None if held is None else {Tier(int(tier)): hashes for tier, hashes in held.items()}
    except Exception as error:
        get_logger().warning("sink view not readable", sink=sink.name, error=described(error))
        return None
