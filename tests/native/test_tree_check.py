"""The check of the tree in steps, and objects that several threads enter."""

from __future__ import annotations

import pytest

from kvactors.cpu_evictor.slots import HostTier, SlotState
from kvactors.native import BlockPool, Path, TreeCheck
from kvactors.prefix_index.tree import BlockIndex

BLOCK = 4


def filled(requests: int, blocks: int = 6) -> BlockIndex:
    index = BlockIndex(BLOCK, requests * blocks, requests * blocks, recompute_last_token=False)
    for number in range(requests):
        path = Path(BLOCK, bytes(32))
        path.extend([number * 1000 + i for i in range(blocks * BLOCK)])
        index.tree.pin(path)
        path.assign(0, index.pool.take(blocks))
        index.tree.commit(path, blocks)
        index.tree.release(path)
    return index


def test_a_check_in_steps_looks_at_everything_when_nothing_changes():
    index = filled(20)
    check, steps = TreeCheck(index.tree), 0
    while not check.step(7):
        steps += 1
    assert check.exact
    assert steps > 2 * 120 // 7
    assert len(list(index.check_steps())) >= 1


@pytest.mark.parametrize("when", range(0, 40, 3))
def test_a_change_between_the_steps_is_no_damage(when):
    index = filled(20)
    check, steps, over = TreeCheck(index.tree), 0, False
    while not over:
        if steps == when:
            nodes, _, _, _, states, *_ = index.tree.evict(30)
            index.pool.give(index.tree.finish_offload(nodes, bytes(len(states)))[0])
            path = Path(BLOCK, bytes(32))
            path.extend(list(range(500, 500 + 40 * BLOCK)))
            index.tree.pin(path)
            path.assign(0, index.pool.take(20))
            index.tree.commit(path, 20)
        over = check.step(7)
        steps += 1
    assert not check.exact or steps <= when
    for _ in index.check_steps():
        pass


def test_a_listing_in_parts_names_every_node_once():
    index = filled(9)
    keys, start = b"", 0
    while start >= 0:
        some, states, start = index.tree.listing(start, 5)
        assert len(some) == 32 * len(states)
        keys += some
    names = {keys[i : i + 32] for i in range(0, len(keys), 32)}
    assert len(names) == len(keys) // 32 == index.tree.statistics()["nodes"]


def test_a_pool_does_not_take_a_block_twice():
    pool = BlockPool(4)
    taken = pool.take(2)
    pool.give(taken)
    for wrong in ([taken[0]], [4], [-1]):
        with pytest.raises(RuntimeError):
            pool.give(wrong)
    with pytest.raises(RuntimeError):
        pool.take(5)
    pool.share(taken_again := pool.take(1))
    pool.give(taken_again)
    assert (pool.owners(taken_again[0]), pool.num_shared, pool.free) == (1, 0, 3)
    with pytest.raises(RuntimeError):
        pool.share([3])
    pool.check()


@pytest.mark.parametrize("damage", ["slot", "pins", "children", "order"])
def test_the_host_tiers_check_in_steps_finds_damage(damage):
    host = HostTier(4, 6)
    entries = [host.add(bytes([n]) * 32, bytes(32), SlotState.RESIDENT) for n in range(3)]
    for entry in entries:
        entry.arriving = False
        host.unpin(entry)
    host.check()
    if damage == "slot":
        entries[0].slot = entries[1].slot
    elif damage == "pins":
        entries[0].pins = 1
    elif damage == "children":
        host._children[bytes(32)] -= 1
    else:
        entries[0].state = SlotState.PROMOTING
    with pytest.raises(AssertionError):
        host.check()


def test_a_change_between_the_steps_of_the_host_tiers_check_is_no_damage():
    host = HostTier(6000, 6000)
    entries = [host.add(n.to_bytes(32, "big"), bytes(32), SlotState.RESIDENT) for n in range(5000)]
    for entry in entries:
        entry.arriving = False
        host.unpin(entry)
    for step, _ in enumerate(host.check_steps()):
        host.drop(entries[step])
        host.pin(entries[-1])
    assert step > 1
    host.check()
