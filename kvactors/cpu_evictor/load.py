"""One load under way: what it reads from, what has arrived, and how long a leading run that
makes."""

from __future__ import annotations

from kvactors.actor.actor import Timer
from kvactors.cpu_evictor.slots import HostBlock
from kvactors.lineage import Lineage, Lineages, lineage


class LoadJob:
    """Blocks `start`.. of a path on their way to the device.

    entries: sources in path order, as far as they are secured. host: how many leading ones came
    from the host tier. blocks: targets, None until placed. copies: copies still to come. fetching:
    the store is still asked. arrived: per position whether its bytes are on the device. late: the
    store is not waited for any more. over: answered (what still comes only cleans up). tokens: of
    the path, for a store that is addressed by them; lineages: of its blocks, for a store that keeps
    them. layers: by the first position of a copy, how many layers of it have arrived.
    """

    __slots__ = (
        "arrived",
        "blocks",
        "copies",
        "deadline",
        "entries",
        "fetching",
        "from_host",
        "keys",
        "late",
        "layers",
        "lineages",
        "op",
        "over",
        "root",
        "start",
        "timer",
        "tokens",
    )

    def __init__(
        self,
        op: int,
        root: bytes,
        keys: list[bytes],
        start: int,
        deadline: float,
        blocks: tuple[int, ...],
        tokens: bytes = b"",
        lineages: Lineages | None = None,
    ) -> None:
        self.lineages = lineages
        self.tokens = tokens
        self.op = op
        self.root = root
        self.keys = keys
        self.start = start
        self.deadline = deadline
        self.blocks: tuple[int, ...] | None = blocks or None
        self.entries: list[HostBlock] = []
        self.from_host: list[bool] = []
        self.arrived: set[int] = set()
        self.copies = 0
        self.layers: dict[int, int] = {}
        self.fetching = self.late = self.over = False
        self.timer: Timer | None = None

    def end(self) -> None:
        """It is answered or cancelled: its deadline has no meaning any more."""
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @property
    def wanted(self) -> list[bytes]:
        """Names still to be had."""
        return self.keys[self.start :]

    def good(self) -> int:
        """Length of the leading run that arrived."""
        run = 0
        while run in self.arrived:
            run += 1
        return run

    def reached(self) -> int:
        """Layers of all its copies that have arrived."""
        return min(self.layers.values(), default=0)

    def parent(self, position: int) -> bytes:
        """Name of the block before path position `position`."""
        return self.keys[position - 1] if position else self.root

    def lineage(self, position: int) -> Lineage | None:
        """What the hash of the block at path position `position` is made of, if the store keeps
        that."""
        return lineage(self.lineages, position, len(self.keys), self.parent(position))
