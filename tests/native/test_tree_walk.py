"""A walk over all blocks of a tree, in steps between which the tree may change, and a clear of host
hints, whose bits are reset in steps."""

from __future__ import annotations

import hashlib
from random import Random

from kvactors.native import HOST, BlockTree, Path, TreeWalk
from kvactors.types import split_hashes

ROOTS = (bytes(32), b"\1" * 32)


class Grown:
    """A tree with random paths, some given back again. blocks: device blocks handed out so far."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.tree = BlockTree(2, 16)
        self.blocks = 0
        self.held: list[Path] = []
        for _ in range(30):
            self.add()

    def add(self) -> None:
        path = Path(2, self.random.choice(ROOTS))
        branch = [self.random.randrange(2) for _ in range(self.random.randrange(1, 12))]
        path.extend([token for step in branch for token in (step, step)])
        if self.random.randrange(2):
            path.set_extra(
                self.random.randrange(len(branch)), b"image" * self.random.randrange(1, 3)
            )
        self.tree.pin(path)
        need = path.num_full_blocks - path.num_committed
        path.assign(path.num_committed, range(self.blocks, self.blocks + need))
        self.blocks += need
        self.tree.commit(path, path.num_full_blocks)
        self.held.append(path)
        if self.random.randrange(2):
            self.tree.release(self.held.pop(self.random.randrange(len(self.held))))

    def change(self) -> None:
        """New nodes are added, old ones removed, and node ids are used again."""
        self.add()
        nodes, _keys, _parents, _blocks, _states, *_ = self.tree.evict(self.random.randrange(4))
        self.tree.finish_offload(nodes, bytes(len(nodes)))

    def all(self) -> dict[bytes, int]:
        keys, states, _ = self.tree.listing(0, 10**6)
        return dict(zip(split_hashes(keys), states, strict=True))


class Seen:
    """The nodes that a walk has visited, checked one by one: parents first, hashes and positions
    those of the path."""

    def __init__(self, *, changing: bool = False) -> None:
        self.position: dict[bytes, int] = {}
        self.states: dict[bytes, int] = {}
        self.changing = changing

    def take(self, stretches, step: int) -> None:
        assert sum(len(states) for *_, states, _ in stretches) <= step
        for root, parent, start, tokens, keys, states, extra_keys in stretches:
            assert root in ROOTS
            assert len(tokens) == 8 * len(states)
            assert self.position.get(parent, -1) == start - 1 or (
                self.changing and parent not in self.position
            )
            assert start or parent == root
            extras, above = dict(extra_keys), parent
            assert list(extras) == sorted(extras)
            for offset, key in enumerate(split_hashes(keys)):
                extra = extras.pop(start + offset, b"")
                named = (
                    above
                    + len(extra).to_bytes(4, "little")
                    + extra
                    + tokens[8 * offset : 8 * offset + 8]
                )
                assert hashlib.sha256(named).digest() == key
                above = key
                assert self.changing or key not in self.position, "a block is met twice"
                self.position[key] = start + offset
                self.states[key] = states[offset]
            assert not extras, "no extra key of another block"


def test_a_walk_meets_every_block_once_parents_first_and_a_bounded_number_a_step():
    for seed in range(20):
        grown, seen = Grown(seed), Seen()
        walk, over = TreeWalk(grown.tree), False
        while not over:
            over, stretches = walk.step(3)
            seen.take(stretches, 3)
        assert seen.states == grown.all()


def test_a_walk_during_changes_visits_every_lasting_node():
    for seed in range(60):
        grown, seen = Grown(seed), Seen(changing=True)
        walk, over, lasting = TreeWalk(grown.tree), False, set(grown.all())
        while not over:
            over, stretches = walk.step(grown.random.randrange(1, 4))
            seen.take(stretches, 3)
            grown.change()
            lasting &= set(grown.all())
            grown.tree.check()
        assert lasting <= set(seen.states)


def test_hints_of_before_a_clear_count_no_more_and_go_in_steps_beside_other_changes():
    for seed in range(40):
        grown = Grown(seed)
        keys = list(grown.all())
        grown.tree.host_blocks_added(b"".join(keys))
        for path in grown.held:
            grown.tree.release(path)
        grown.held.clear()
        nodes, *_ = grown.tree.evict(grown.random.randrange(20))
        grown.tree.finish_offload(nodes, bytes(len(nodes)))
        grown.tree.clear_host()
        assert grown.tree.statistics()["host"] == 0
        assert not any(state & HOST for state in grown.all().values())
        grown.tree.check()
        again: set[bytes] = set()
        while not grown.tree.sweep_host(2):
            grown.tree.check()
            key = grown.random.choice(keys)
            if grown.tree.host_blocks_added(key):
                again.add(key)
            if grown.random.randrange(3) == 0:
                grown.change()
            grown.tree.check()
        left = grown.all()
        assert {key for key, state in left.items() if state & HOST} == again & set(left)
        assert all(state for key, state in left.items() if not below(grown, key)), (
            "a block is kept that nothing holds"
        )


def below(grown: Grown, key: bytes) -> bool:
    """Whether a lease refers to the block, or it has blocks below it."""
    held = {
        name for path in grown.held for name in split_hashes(path.hashes(0, path.num_full_blocks))
    }
    if key in held:
        return True
    walk, over = TreeWalk(grown.tree), False
    while not over:
        over, stretches = walk.step(100)
        for _root, parent, _start, _tokens, keys, _states, _extra in stretches:
            if key in (parent, *split_hashes(keys)[:-1]):
                return True
    return False
