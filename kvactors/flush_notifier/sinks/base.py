"""The contract of a sink: where flush tasks go."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.runs import Holding
from kvactors.flush_notifier.view import SinkView
from kvactors.sink_config import SinkConfig
from kvactors.types import Tier


class Holdings(Protocol):
    """What a sink has been sent, on demand."""

    def __call__(self, *, every: bool = False) -> Iterator[Holding]:
        """Everything that a sink was sent as resident and not as gone since, parents before
        children. every: also blocks that are in the ledger without being resident for this sink
        (`Holding.tiers` is 0)."""
        ...


class Sink(ABC):
    """name: unique among a notifier's sinks. view_of: what it hears of, and when.

    Its life: `open`, then for each life of the notifier `begin` and any number of `deliver`, then
    `close`. One call at a time; each may be given up at its deadline (its task is cancelled) and
    repeated with what is true then, so a sink must bear hearing the same twice. Errors are raised,
    SinkError or whatever the edge gives.
    """

    takes_clear: bool = False
    """Whether "everything is gone" may be told as one task, with count 0 and no path, instead of
    run by run."""

    by_name: bool = False
    """Whether it knows blocks by their names, and so is told no tokens but those of blocks that are
    resident now, instead of complete paths."""

    by_tokens: bool = False
    """Whether it addresses blocks by tokens alone. It gets no blocks of other scopes than the one
    that the cache was opened with, and none with extra keys in their path."""

    announces_full: bool = False
    """Whether the finish of a request sends all blocks of the request, also those that were sent
    before."""

    ready_timeout: float = 0.0
    """Seconds that `open` may take, where they are more than `actors.start`."""

    repeats: bool = False
    """Whether it may be sent again what it has, without "everything is void" before: its index
    keeps a set of blocks. What an index lost is then sent again without a moment at which the index
    has nothing. Otherwise `begin` comes first, with the epoch of before."""

    resync_interval: float = 0.0
    """Seconds after which everything is sent again, 0 for never: from its config."""

    taken: int = 0
    """How many tasks of the present or last `deliver`, from the first on, are told for certain. A
    sink for which a task is a call of its own counts them, so that a call that fails or is too late
    does not cost those before it."""

    call: asyncio.Task[str] | None = None
    """The last call to it, in flight or ended. FlushNotifier sets this, and begins no call before
    the last one has ended."""

    def __init__(self, config: SinkConfig | str = "", block_size: int = 0) -> None:
        """config: settings, or just a name (the class's if empty): then it is sent gains and losses
        of device and host, each as it happens."""
        if isinstance(config, str):
            config = SinkConfig(name=config or type(self).__name__)
        self.name = config.label
        self.block_size = block_size
        self.resync_interval = config.resync_interval
        tiers = sum({Tier[tier.upper()] for tier in config.tiers}, Tier(0))
        self.view_of = SinkView(
            int(tiers), config.view == "node", config.gains == "request_finish", self.by_tokens
        )

    async def open(self) -> None:
        """Before anything else, once. SinkError (or ConfigError) if it cannot work; then nothing is
        left half-open. It is cancelled after `actors.start` seconds. `close` follows in any
        case."""

    def attach(self, holdings: Holdings) -> None:
        """A new life of the notifier: what it says this sink was told, on demand. Comes before that
        life's `begin`."""

    @abstractmethod
    async def begin(self, epoch: int) -> None:
        """A new incarnation of the notifier, or a resync (then with the epoch of before):
        everything sent until now is void. Comes before everything that is sent from then on."""

    @abstractmethod
    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """Take tasks, in order."""

    async def close(self) -> None:
        """No more calls. Must not take longer than a moment, whatever the other side does."""
