"""Requests in one step leave the eviction policies, salts and hints as requests in several calls
do."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvactors.native import BlockTree, LifeTables, Path

BLOCK, ROOT = 2, bytes(32)


class Tier:
    """A device of some blocks. one_step: requests use the calls of one step, as far as they can."""

    def __init__(self, size: int, retain: bool, host: bool, *, one_step: bool) -> None:
        tables = LifeTables(first=4) if retain or host else None
        self.tree = BlockTree(
            BLOCK, 64, True, tables if retain else None, False, tables if host else None
        )
        self.free, self.one_step, self.steps = list(range(size)), one_step, 0

    def acquire(self, tokens: list[int], now: float, salt: int = 0) -> Path:
        path = Path(BLOCK, ROOT)
        path.extend(tokens)
        path.salt = salt
        blocks = -(-len(tokens) // BLOCK)
        limit = (len(tokens) - 1) // BLOCK
        if self.one_step:
            run = self.tree.pin_resident(path, ROOT, limit, 0, blocks, len(self.free), False, now)
            if run >= 0:
                self.steps += 1
                table = path.complete(run, [self.free.pop() for _ in range(blocks - run)])
                assert list(table) == path.blocks()
                return path
        self.tree.advance(now)
        run, states = self.tree.pin(path, limit)
        assert not states, "the host has nothing here"
        missing = blocks - run - len(self.free)
        if missing > 0:
            self.evict(missing)
        path.assign(run, [self.free.pop() for _ in range(blocks - run)])
        return path

    def evict(self, count: int) -> list[bytes]:
        nodes, hashes, *_ = self.tree.evict(count)
        freed, kept = self.tree.finish_offload(nodes, bytes(len(nodes)))
        assert not kept
        self.free += freed
        return [hashes]

    def commit(self, path: Path, tokens: int) -> int:
        if self.one_step:
            done = self.tree.commit_tokens(path, tokens, False)
            if done >= 0:
                self.steps += 1
                return done
        self.tree.commit(path, tokens // BLOCK)
        return path.num_committed

    def end(self, path: Path, output: int, now: float) -> None:
        if self.one_step:
            freed = self.tree.end(path, output, now)
            if freed is not None:
                self.steps += 1
                self.free += freed
                return
        self.tree.advance(now)
        self.tree.touch(path, output)
        self.free += self.tree.release(path)


def state(tier: Tier) -> Any:
    tree = tier.tree
    counts = tree.statistics()
    del counts["bytes"]
    return counts, tree.device_hashes(), tree.retention(), tree.retention(True), tier.free


def walk(tiers: list[Tier], seed: int, steps: int) -> None:
    """The same requests for all. Some prompts return, as those of a chat do, and some overlap."""
    random, now = Random(seed), 0.0
    prompts = [[family * 100 + i for i in range(random.randint(1, 12))] for family in range(9)]
    running: list[tuple[list[Path], list[int]]] = []
    for _ in range(steps):
        now += random.choice([0.0, 0.1, 1.0, 30.0])
        if running and (len(running) == 3 or random.random() < 0.5):
            paths, tokens = running.pop(random.randrange(len(running)))
            output, computed = random.choice([-1, 0, 5, 700]), len(tokens) - random.randint(0, 1)
            for tier, path in zip(tiers, paths, strict=True):
                tier.commit(path, computed)
                tier.end(path, output, now)
        else:
            tokens = random.choice(prompts)[: random.randint(1, 12)]
            running.append(([tier.acquire(tokens, now) for tier in tiers], tokens))
        if random.random() < 0.2:
            count = random.randint(1, 4)
            victims = [tier.evict(count) for tier in tiers]
            assert victims[0] == victims[1], "another victim"
        states = [state(tier) for tier in tiers]
        assert states[0] == states[1]
    for tier in tiers:
        tier.tree.check()


@pytest.mark.parametrize(
    ("retain", "host"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_the_same_blocks_are_evicted(retain: bool, host: bool) -> None:
    """LRU and RETAIN, of either tier."""
    steps = 0
    for seed in range(12):
        tiers = [Tier(20, retain, host, one_step=one) for one in (True, False)]
        walk(tiers, seed, 300)
        steps += tiers[0].steps
    assert steps > 2000


def path_of(tokens: int, salt: int = 0) -> Path:
    path = Path(BLOCK, ROOT)
    path.extend(list(range(tokens)))
    path.salt = salt
    return path


@pytest.mark.parametrize("hinted", [False, True])
def test_an_end_is_refused_in_a_tree_with_salts_or_hints(hinted: bool) -> None:
    """Each block has a separate place there, and its hint may have to be forgotten."""
    tree = BlockTree(BLOCK)
    path = path_of(4)
    assert tree.pin_resident(path, ROOT, -1, 0, 2, 2, False, 0.0) == 0
    path.assign(0, [0, 1])
    assert tree.commit_tokens(path, 4, False) == 2
    if hinted:
        tree.hint(path, 1, 9.0)
    else:
        tree.set_quota(7, 1)
    assert tree.end(path, -1, 0.0) is None
    assert (path.num_held, path.blocks()) == (2, [0, 1])
    again = path_of(4, 7)
    assert tree.pin_resident(again, ROOT, -1, 0, 2, 0, False, 0.0) == 2, (
        "a match needs no more than before"
    )
    tree.check()
    assert tree.release(path) == tree.release(again) == []


def test_a_forgotten_path_commits_nothing_new() -> None:
    tree = BlockTree(BLOCK)
    tree.share()
    path = path_of(6, 7)
    path.assign(0, [0, 1, 2])
    assert tree.commit_tokens(path, 2, False) == 1
    tree.begin_forget(7)
    assert tree.commit_tokens(path, 6, False) == -1
    assert tree.commit_tokens(path, 2, False) == 1
    other = path_of(2, 7)
    other.assign(0, [3])
    other.forgotten = True
    assert tree.commit_tokens(other, 2, False) == -1
    assert tree.end(path, -1, 0.0) is None
    assert {1, 2} <= {*tree.release(path)}


def test_a_commit_that_the_tree_refuses_changes_nothing() -> None:
    tree = BlockTree(BLOCK)
    path = path_of(4)
    path.assign(0, [0, 1])
    tree.replace(path, 1, -1)
    with pytest.raises(ValueError, match="without a device block"):
        tree.commit_tokens(path, 4, False)
    assert (path.num_held, path.num_committed) == (0, 0)
    assert tree.statistics()["nodes"] == 0
