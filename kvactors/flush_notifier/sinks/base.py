"""The contract of a sink: where flush tasks go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvactors.config import SinkConfig
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.view import SinkView
from kvactors.units import Tier


class Sink(ABC):
    """name: unique among a notifier's sinks. view: what it hears of, and when. One call at a time; each may be given up at its deadline
    and repeated, so a sink must bear hearing the same task twice. Errors are raised, SinkError or whatever the edge gives."""

    def __init__(self, config: SinkConfig, block_size: int) -> None:
        self.name = config.name or config.kind
        self.block_size = block_size
        tiers = sum({Tier[tier.upper()] for tier in config.tiers}, Tier(0))
        self.view_of = SinkView(int(tiers), config.view == "node", config.gains == "request_finish")

    @abstractmethod
    async def begin(self, epoch: int) -> None:
        """A new life of the notifier: everything told in an earlier epoch is void. Comes before its first delivery."""

    @abstractmethod
    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """Take tasks, in order."""

    async def close(self) -> None:
        """No more calls."""


def make_sink(config: SinkConfig, block_size: int) -> Sink:
    """The sink a config describes. Raises SinkError if it cannot work."""
    from kvactors.flush_notifier.sinks.jsonl import JsonLinesSink
    from kvactors.flush_notifier.sinks.memory import MemorySink

    return JsonLinesSink(config, block_size) if config.kind == "jsonl" else MemorySink(config, block_size)
