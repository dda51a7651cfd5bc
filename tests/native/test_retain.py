"""The native policy RETAIN counts as an exact LRU does, and keeps the rules of a tree under any order
of requests."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.native import BlockTree, LifeTables, Path
from kvactors.scenario.sweep import DeviceTier

ROOT = bytes(32)


class Recorded(DeviceTier):
    """A device that records the blocks it evicts, by their ids in the trace."""

    def __init__(self, size, tables):
        super().__init__(size, tables)
        self.evicted = []

    def evict(self, count):
        nodes, _, _, blocks, *_ = self.tree.evict(count)
        self.evicted += ids_of(self.tree, nodes)
        freed, _ = self.tree.finish_offload(nodes, bytes(len(nodes)))
        self._free += freed
        return blocks


def ids_of(tree, nodes):
    """The blocks of nodes: their tokens, since each is one token."""
    return np.frombuffer(tree.contents(nodes)[1], np.uint32).tolist()


def residents(tree):
    """The paths of resident blocks, whole."""
    return [np.frombuffer(tokens, np.uint32).tolist() for _, tokens, _, _ in tree.paths()]


PAUSES = st.sampled_from([0.0, 0.0, 0.125, 0.5, 1.0, 3.0, 10.0, 60.0, -5.0])
OUTPUTS = st.sampled_from([10, 100, 500, 2000])


@st.composite
def requests(draw, most=80):
    """Requests that continue earlier ones: ids, time, output."""
    rng, trace, made, now = draw(st.randoms(use_true_random=False)), [], 0, 100.0
    for _ in range(draw(st.integers(1, most))):
        base = rng.choice(trace[-30:])[0] if trace and rng.random() < 0.7 else []
        base = base[: rng.randint(0, len(base))]
        grow = rng.randint(0 if base else 1, 6)
        now += draw(PAUSES)
        trace.append(([*base, *range(made, made + grow)], now, draw(OUTPUTS)))
        made += grow
    return trace


def committed(tree, tokens, blocks):
    """A path whose blocks are computed."""
    path = Path(1, ROOT)
    path.extend(tokens)
    tree.pin(path)
    path.assign(path.num_committed, blocks)
    tree.commit(path, len(tokens))
    return path


def test_blocks_of_a_request_that_was_given_up_are_victims_as_others():
    """Nothing has touched them."""
    tree = BlockTree(1, 16, True, LifeTables(first=0))
    tree.release(committed(tree, [1, 2, 3], [0, 1, 2]))
    tree.check()
    assert (tree.retention()["resident"], tree.retention()["runs"]) == (3, 3)
    nodes = tree.evict(2)[0]
    assert ids_of(tree, nodes) == [3, 2]
    tree.check()


def test_a_shared_block_is_a_victim_once_the_blocks_below_it_are_gone():
    tree = BlockTree(1, 16, True, LifeTables(first=0))
    short, long = committed(tree, [1, 2], [0, 1]), committed(tree, [1, 2, 3, 4], [2, 3])
    for _ in range(3):
        tree.touch(long, -1)
        tree.release(long)
        tree.check()
        tree.pin(long)
        tree.check()
    tree.touch(long, -1)
    tree.release(long)
    tree.touch(short, -1)
    tree.release(short)
    tree.check()
    evicted = [ids_of(tree, tree.evict(1)[0])[0] for _ in range(4)]
    assert evicted == [4, 3, 2, 1]
    tree.check()


@settings(max_examples=40)
@given(trace=requests(most=60), size=st.integers(1, 64))
def test_the_guard_counts_as_an_exact_lru_does(trace, size):
    # The statistics are inverted: the guard has work to do.
    device, recent, hits = Recorded(size, LifeTables(True)), [], 0
    ours = 0
    for ids, now, output in trace:
        ours += device.request(np.array(ids, np.uint32), now, output)
        if len(ids) > size:
            continue
        kept = set(recent[:size])
        hits += next((at for at, one in enumerate(ids) if one not in kept), len(ids))
        recent = ids + [one for one in recent if one not in ids]
    counts = device.tree.retention()
    assert (counts["hits"], counts["shadow_hits"]) == (ours, hits)
    kept = {one for path in residents(device.tree) for one in path}
    assert counts["displaced"] == len(set(recent[: counts["resident"]]) - kept)
    assert counts["chosen"] + counts["oldest"] == len(device.evicted)


@settings(max_examples=60)
@given(
    trace=requests(most=50),
    size=st.integers(8, 64),
    order=st.randoms(use_true_random=False),
    inverted=st.booleans(),
)
def test_requests_that_overlap_keep_their_blocks(trace, size, order, inverted):
    # Requests begin and end in any order, and copies of evicted blocks end late.
    tree = BlockTree(1, 0, False, LifeTables(inverted))
    free, running, copying = list(range(size)), [], []

    def end_one():
        path, output = running.pop(order.randrange(len(running)))
        tree.touch(path, output)
        tree.release(path)

    def end_copy():
        nodes = copying.pop(0)
        freed, kept = tree.finish_offload(nodes, bytes(len(nodes)))
        assert len(freed) + len(kept) == len(nodes)
        free.extend(freed)

    for ids, now, output in trace:
        tree.advance(now)
        path = Path(1, ROOT)
        path.extend(np.array(ids, np.uint32))
        hits, _ = tree.pin(path)
        pinned = {one for other, _ in running for one in other.blocks()} | set(path.blocks()[:hits])
        missing = len(ids) - hits
        if missing > len(free):
            nodes, _, _, blocks, *_ = tree.evict(missing - len(free))
            assert not pinned & set(blocks)
            assert len(set(blocks)) == len(blocks)
            copying.append(nodes)
            while copying and (len(free) < missing or order.random() < 0.5):
                end_copy()
        if missing > len(free):
            tree.release(path)
        else:
            path.assign(hits, [free.pop() for _ in range(missing)])
            tree.commit(path, len(ids))
            running.append((path, output))
        while running and order.random() < 0.6:
            end_one()
        tree.check()
    while running:
        end_one()
    while copying:
        end_copy()
    tree.check()
    # Every block is free or resident, once, and resident paths are whole from the root on.
    known = {tuple(ids[: n + 1]) for ids, _, _ in trace for n in range(len(ids))}
    for path in residents(tree):
        assert tuple(path) in known
    held = tree.evict(size)
    assert sorted(free + held[3]) == sorted(set(free + held[3]))
    left = ids_of(tree, held[0])
    parents = {ids[n]: ids[n - 1] for ids, _, _ in trace for n in range(1, len(ids))}
    for at, one in enumerate(left):  # leaves first: no block stays below one that has left
        assert parents.get(one) not in left[:at]


@settings(max_examples=10)
@given(trace=requests(most=60), size=st.integers(1, 16))
def test_statistics_and_ghost_entries_are_bounded(trace, size):
    device, seen = Recorded(size, LifeTables()), set()
    for ids, now, output in trace * 3:
        device.request(np.array(ids, np.uint32), now, output)
        seen |= set(ids)
        counts = device.tree.retention()
        assert counts["ghosts"] + counts["resident"] <= len(seen)
        assert counts["runs"] <= counts["ghosts"] + counts["resident"]
        assert counts["resident"] <= size


def test_ghost_entries_of_one_shot_prompts_are_forgotten():
    device = DeviceTier(20, LifeTables())
    for number in range(3000):
        device.request(np.arange(number * 20, number * 20 + 20, dtype=np.uint32), number * 0.1)
    some = device.tree.retention()
    for number in range(3000, 15_000):
        device.request(np.arange(number * 20, number * 20 + 20, dtype=np.uint32), number * 0.1)
    counts = device.tree.retention()
    assert some["ghosts"] < counts["ghosts"] <= 1 << 18
    assert counts["runs"] <= (1 << 15) + 40


def test_a_clock_that_goes_backwards_changes_nothing():
    ahead, back = Recorded(8, LifeTables()), Recorded(8, LifeTables())
    for number in range(400):
        ids = np.arange(number % 7 * 3, number % 7 * 3 + 3, dtype=np.uint32)
        now = float(number // 50 * 50)
        ahead.request(ids, now)
        back.request(ids, float(number) if number % 50 == 0 else -1e9 * number)
    assert ahead.evicted == back.evicted
