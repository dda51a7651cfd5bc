"""Paths of finished requests that are offered to the host tier and written to the store."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import msgspec

from kvactors.cpu_evictor.messages import Save
from kvactors.native import BlockTree, Path
from kvactors.prefix_index.actions import Action
from kvactors.prefix_index.host_victims import HostVictims
from kvactors.prefix_index.index import BlockIndex, is_past, pick_hashes
from kvactors.prefix_index.lineages import LineageSource
from kvactors.prefix_index.parts import parts
from kvactors.prefix_index.settings import IndexSettings


class SavedPath(msgspec.Struct, eq=False):
    """The path of a finished request while it is being saved.

    Attributes:
        parts: messages without an answer, and one more until the finish has sent all of them. 0
            after a restart of the host tier.
        priority, expiry: of its blocks.
    """

    tree: BlockTree
    path: Path
    parts: int
    priority: int = 0
    expiry: float = inf

    def answered(self) -> bool:
        """A message is answered, or all are sent. Returns whether nothing is left to wait for: then
        the path is released."""
        if not self.parts:
            return False
        self.parts -= 1
        return not self.parts


NO_HINT = (0, inf)
"""Priority and expiry of blocks without hints."""


class SavedPart(NamedTuple):
    """The blocks of one message, from position `start` on."""

    whole: SavedPath
    start: int


class SaveTable:
    """Saves in flight by operation. A path is held until all its parts are answered."""

    def __init__(
        self,
        index: BlockIndex,
        lineages: LineageSource,
        ops: Iterator[int],
        victims: HostVictims,
        settings: IndexSettings,
    ) -> None:
        self._index = index
        self._lineages = lineages
        self._ops = ops
        self._victims = victims
        self._settings = settings
        self._save_after = settings.save_after
        self._keep = not settings.exclusive
        self.enabled = self._keep or self._save_after > 0
        self.in_flight: dict[int, SavedPart] = {}

    def __len__(self) -> int:
        return len(self.in_flight)

    def paths(self) -> list[SavedPath]:
        """The paths that are held."""
        return list({part.whole: None for part in self.in_flight.values()})

    def ranges(self, blocks: int) -> Iterator[tuple[int, int]]:
        """The ranges of a path that are saved in one message each. A store that is addressed by
        tokens gets the whole path with every message, so it gets one."""
        part = self._index.part if self._settings.token_root is None else max(1, blocks)
        return parts(0, blocks, part)

    def start(self, whole: SavedPath, start: int, stop: int) -> list[Action]:
        """Offer blocks [start, stop) to the host tier, and to the store those that are hit often
        enough."""
        path, last = whole.path, min(stop, self._settings.storable(whole.path))
        save: list[int] = []
        if self._save_after and start < last:
            save = whole.tree.worth_saving(path, start, last, self._save_after)
        if not (save or self._keep):
            return []
        op = next(self._ops)
        whole.parts += 1
        self.in_flight[op] = SavedPart(whole, start)
        victims = self._victims.before_copies(path, start, stop) if self._keep else []
        by_tokens = save and self._settings.token_root is not None
        return [
            *victims,
            Save(
                op,
                path.hashes(start - 1, start) if start else path.root,
                path.hashes(start, stop),
                tuple(path.blocks(start, stop)),
                self._keep,
                tuple(position - start for position in save),
                path.tokens(0, save[-1] + 1) if by_tokens else b"",
                self._index.memory_generation,
                self._lineages.of_path(path, start, stop),
                path.salt,
                whole.priority,
                whole.expiry,
            ),
        ]

    def finish(self, op: int, on_host: bytes) -> SavedPath | None:
        """The blocks of a part have been copied.

        Args:
            op: the operation.
            on_host: one byte a block, non-zero if the host tier has it.

        Returns:
            The path; None for an unknown operation.
        """
        part = self.in_flight.pop(op, None)
        if part is None:
            return None
        whole = part.whole
        if not is_past(whole.tree, whole.path):
            hashes = whole.path.hashes(part.start, part.start + len(on_host))
            whole.tree.host_blocks_added(
                pick_hashes(hashes, [j for j, kept in enumerate(on_host) if kept])
            )
        return whole

    def host_lost(self) -> list[SavedPath]:
        """The host tier has restarted: the paths to be released."""
        lost = self.paths()
        for whole in lost:
            whole.parts = 0  # no further part of it is sent
        self.in_flight.clear()
        return lost
