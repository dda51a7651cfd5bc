"""PrefixIndex, the part that does long work in parts: a turn each, between which other messages are
handled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from kvactors.actor import Actor, ActorRef, on
from kvactors.native import BlockTree, Path
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.messages import Continue
from kvactors.prefix_index.parts import part_of


class Works(Actor):
    """Holds the tree and the pool. part: blocks that a turn handles at most. closing: paths whose
    blocks are on their way back to the pool."""

    def __init__(self, ref: ActorRef, *, index: BlockIndex) -> None:
        super().__init__(ref)
        self.index = index
        self.part = part_of(index.block_size)
        self.closing = 0
        self.working = 0  # works of which parts are left

    def in_parts(self, work: Iterator[None]) -> None:
        """Do the first part of some work now, and each other one in a later turn."""
        if next(work, self) is not self:
            self.working += 1
            self.to_self(Continue(work))

    @on(Continue)
    def go_on(self, message: Continue) -> None:
        """The next part."""
        self.working -= 1
        self.in_parts(message.work)

    @abstractmethod
    def room_changed(self) -> None:
        """Blocks became free, or an operation ended: see who waits for that."""

    def give_back_path(self, tree: BlockTree, path: Path) -> None:
        """Drop what a path holds, the deepest blocks first; those that nothing else uses are free.
        What is longer than a part is free later."""
        if max(path.num_blocks, path.num_held) <= self.part:
            self.index.pool.give(tree.release(path))
        else:
            self.in_parts(self._give_back(tree, path))

    def _give_back(self, tree: BlockTree, path: Path) -> Iterator[None]:
        self.closing += 1
        yield from self.give_back_parts(tree, path)
        self.closing -= 1
        self.room_changed()

    def give_back_parts(self, tree: BlockTree, path: Path) -> Iterator[None]:
        """The same as work in parts."""
        blocks = max(path.num_blocks, path.num_held)
        for keep in range(blocks - self.part, 0, -self.part):
            self.index.pool.give(tree.release(path, keep))
            yield
            self.room_changed()
        self.index.pool.give(tree.release(path))
