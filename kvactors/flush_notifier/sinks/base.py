"""The contract of a sink: where flush tasks go."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.messages import FlushTask, GroupLabel
from kvactors.flush_notifier.view import SinkFilter
from kvactors.settings.sinks import SinkConfig
from kvactors.types import Tier

SnapshotSource = Callable[[], Iterator[HeldBlock]]
"""The blocks of the ledger, parents before children, with the tiers that the sink had acknowledged
when the first was read (0 if it has the block nowhere). Blocks that the ledger drops while it is
read are left out."""


class Sink(ABC):
    """Where flush tasks go.

    `open` comes first. Each incarnation of the notifier calls `set_snapshot_source`, `begin_epoch`
    and then `deliver` any number of times. `close` comes last. One call runs at a time. A call that
    misses its deadline is cancelled and repeated with what is due then, so a sink must accept the
    same task twice. Errors are raised, as SinkError or as they are.

    Attributes:
        name: unique among the sinks of a notifier.
        filter: tiers, granularity, and when gains are due.
    """

    takes_clear: bool = False
    """Whether the removal of everything may be sent as one task, with count 0 and no path, instead
    of run by run."""

    by_name: bool = False
    """Whether it identifies blocks by their hashes. Its tasks carry the tokens of the blocks that
    are resident now and no path."""

    by_tokens: bool = False
    """Whether it identifies blocks by tokens alone. It is sent no blocks of other scopes than the
    one that the cache was opened with, and none with extra keys in their path."""

    announces_full: bool = False
    """Whether the finish of a request sends all blocks of the request, also those that were sent
    before."""

    ready_timeout: float = 0.0
    """Seconds that `open` may take, if more than `actors.open_timeout_s`."""

    takes_groups: bool = False
    """Whether it is sent tasks about groups of layers (`FlushTask.group`), beside those about the
    layers of `[layout]`. They come from the notifiers of the groups, whose epochs are others."""

    repeats: bool = False
    """Whether the view may be sent again without `begin_epoch` before it: the index keeps a set of
    blocks. The blocks that it lost are then sent again, and at no moment is the index empty.
    Otherwise `begin_epoch` comes first, with the same epoch."""

    resync_interval: float = 0.0
    """Seconds between two times at which everything is sent again, 0 for never. From the config."""

    num_acknowledged: int = 0
    """Leading tasks of the present or last `deliver` that the index has for certain. A sink that
    makes one call a task counts them, so that a call that fails or is late does not repeat the
    tasks before it."""

    live_view: Mapping[Tier, AbstractSet[bytes]] | None = None
    """Block hashes by tier, of a sink that keeps them. The cache's count of divergent blocks
    compares them with the tiers, in place of what the notifier knows of the sink."""

    call: asyncio.Task[str] | None = None
    """The last call, in flight or ended. Set by FlushNotifier, which starts no call before the last
    one has ended."""

    on_reset: tuple[Callable[[], None], ...] = ()
    """Called after each removal of everything: the blocks of groups are due again."""

    turn: asyncio.Future[None] | None = None
    """Done at the end of the call in progress (see `in_turn`)."""

    def __init__(self, config: SinkConfig | str = "", block_size: int = 0) -> None:
        """Set the name and the filter.

        Args:
            config: settings, or a name (the class's if empty). With a name alone gains and losses
                of device and host are sent immediately.
            block_size: tokens of a block.
        """
        if isinstance(config, str):
            config = SinkConfig(name=config or type(self).__name__)
        self.name = config.label
        self.block_size = block_size
        self.resync_interval = config.resync_interval_s
        tiers = sum({Tier[tier.upper()] for tier in config.tiers}, Tier(0))
        self.filter = SinkFilter(
            int(tiers),
            config.granularity == "node",
            config.report_gains_at == "request_finish",
            self.by_tokens,
        )

    async def open(self) -> None:
        """Connect. Called once, before anything else, and cancelled after `actors.open_timeout_s`
        seconds. `close` follows in any case.

        Raises:
            SinkError: the sink cannot work. Nothing is left half-open.
        """

    def set_snapshot_source(self, source: SnapshotSource) -> None:
        """Take the source of this sink's view. Called by each incarnation of the notifier before
        its `begin_epoch`."""

    def set_group_source(self, group: GroupLabel, source: SnapshotSource) -> None:
        """Take the source of this sink's view of a group of layers, as `set_snapshot_source`.

        Args:
            group: the group.
            source: its blocks, which have neither a path nor a parent.
        """

    @abstractmethod
    async def begin_epoch(self, epoch: int) -> None:
        """Discard everything sent before. The full state follows in `deliver`.

        This is the first call, and the only sign of a restart: after a restart of the process or of
        the notifier `epoch` is larger than any before. At a resync it is the same.
        """

    @abstractmethod
    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """Take tasks, in order."""

    async def close(self) -> None:
        """Release everything. No call follows. Must end soon even if the index does not answer."""


async def in_turn(sink: Sink, work: Callable[[], Awaitable[None]]) -> None:
    """Make a call to a sink after the one in progress: the notifiers of several groups of layers
    call one sink."""
    while sink.turn is not None:
        await asyncio.wait([sink.turn])
    turn = sink.turn = asyncio.get_running_loop().create_future()
    try:
        await work()
    finally:
        sink.turn = None
        turn.set_result(None)
