"""A clear is one short turn however much is cached: the blocks come back in later turns, some at a
time, and count as free from then on."""

from __future__ import annotations

from pathlib import Path as FilePath

from kvactors.actor.sliced import finish
from kvactors.errors import NoRoom
from kvactors.native import BlockTree, Path
from kvactors.prefix_index.messages import Abandon, Acquire, AcquireResult, Clear
from kvactors.prefix_index.tree import RECLAIMED_BLOCKS, BlockIndex
from tests.prefix_index.index_machine import BLOCK, IndexMachine

MANY = 3 * RECLAIMED_BLOCKS


def filled(blocks: int, cached: int) -> IndexMachine:
    """An index with one finished request of so many blocks."""
    machine = IndexMachine()
    machine.start(blocks, True, False, False, False, "none", 0, blocks)
    assert isinstance(request(machine, cached), AcquireResult)
    machine.commit(0, 0)
    machine.finish(0)
    machine.finish_works()
    assert machine.index.tree.statistics()["device"] == cached
    return machine


def request(machine: IndexMachine, blocks: int, *, wait: bool = True) -> object:
    """The answer to a request of so many blocks that no request has had."""
    machine.number += 1
    path = Path(BLOCK, bytes(32))
    path.extend([1_000 * machine.number + i for i in range(blocks * BLOCK)])
    machine.open[machine.number] = blocks * BLOCK
    effects = machine.turn(
        Acquire(machine.number, f"r{machine.number}", path, machine.stepper.now + 5.0, wait), 5.0
    )
    return effects.answered[0].error or effects.answered[0].value


def sweeps(machine: IndexMachine) -> list[int]:
    """The blocks that each turn brings back, until nothing is left to do."""
    steps = []
    while machine.sweeps:
        before = machine.index.pool.free
        effects = machine.turn(machine.sweeps.pop())
        steps.append(machine.index.pool.free - before)
        assert len(effects.told) <= 1
    return steps


def test_the_turn_of_a_clear_returns_nothing_and_later_turns_return_a_bounded_number_of_blocks() -> (
    None
):
    machine = filled(MANY + 7, MANY + 5)
    effects = machine.turn(Clear())
    assert effects.answered[0].value.count == MANY + 5
    assert machine.index.pool.free == 2, "the turn of the clear went through the blocks"
    assert machine.index.free == machine.index.pool.total
    assert machine.actor.index_statistics().blocks_free == machine.index.pool.total
    steps = sweeps(machine)
    assert steps[:4] == [RECLAIMED_BLOCKS, RECLAIMED_BLOCKS, RECLAIMED_BLOCKS, 5]
    assert set(steps[4:]) == {0}, "only memory goes after the last block"
    assert not machine.index.retired
    assert machine.index.pool.free == machine.index.pool.total
    machine.teardown()


def test_a_request_gets_blocks_of_a_clear_at_once_and_no_more_than_it_needs() -> None:
    for wait in (True, False):
        machine = filled(20, 18)
        machine.turn(Clear())
        assert isinstance(request(machine, 5, wait=wait), AcquireResult)
        assert machine.index.reclaimable == 18 - 3
        assert machine.index.pool.free == 0
        refused = request(machine, 16, wait=wait)
        assert isinstance(refused, NoRoom)
        assert "15" in str(refused), "what a clear leaves can be had"
        assert isinstance(request(machine, 15, wait=wait), AcquireResult)
        assert machine.index.free == 0
        machine.teardown()


def test_a_cleared_block_that_a_fork_has_is_not_free() -> None:
    machine = IndexMachine()
    machine.start(4, True, False, False, False, "none", 0)
    machine.acquire(0, 2 * BLOCK, 5.0, True)
    machine.fork(0, 1)
    machine.commit(0, 0)
    machine.finish(0)
    machine.turn(Clear())
    assert machine.index.reclaimable == machine.index.free == 2
    assert isinstance(request(machine, 3, wait=False), NoRoom)
    machine.teardown()


def test_the_memory_of_a_tree_goes_when_its_last_lease_has_ended() -> None:
    machine = filled(40, 10)
    assert isinstance(request(machine, 4), AcquireResult)
    machine.commit(0, 0)
    tree = machine.index.tree
    used = tree.statistics()["bytes"]
    machine.turn(Clear())
    sweeps(machine)
    assert list(machine.index.retired) == [tree]
    assert not tree.idle
    machine.turn(Abandon(machine.lease(0)))
    machine.leases.clear()
    sweeps(machine)
    assert not machine.index.retired
    assert tree.statistics()["bytes"] < used / 10
    machine.teardown()


def test_a_block_that_an_eviction_still_reads_comes_back_at_its_end_only() -> None:
    """Matched and given back during its eviction, it is on the list of unused blocks while a copy
    still reads it."""
    index = BlockIndex(BLOCK, 4, 64, recompute_last_token=False)
    path = Path(BLOCK, bytes(32))
    path.extend(range(3 * BLOCK))
    path.assign(0, index.take(3))
    index.tree.commit(path, 3)
    index.tree.release(path)
    op = index.evict(1, 1)
    index.match(path, fetch=0)
    index.tree.release(path)
    assert index.retire() == 2
    finish(index.check_steps())
    index.sweep()
    assert all(map(index.pool.owners, op.blocks)), "a block is free that a copy still reads"
    assert index.free == index.pool.free == 3
    assert not index.sweeping
    finish(index.check_steps())
    went, stayed = index.finish_evict(op, b"\0")
    assert (went, stayed) == ([0], [])
    while index.sweeping:
        index.sweep()
    assert not index.retired
    assert index.pool.free == 4
    finish(index.check_steps())


def resident_pages() -> int:
    """Memory pages that this process has touched."""
    return int(FilePath("/proc/self/statm").read_text().split()[1])


def test_a_new_tree_takes_no_memory_until_it_is_used() -> None:
    """Nodes, tokens and both tables of ten million nodes would be more than a gigabyte."""
    before = resident_pages()
    tree = BlockTree(4, 10_000_000, touch=False)
    grown = resident_pages() - before
    assert tree.statistics()["bytes"] > 10_000_000 * 80
    assert grown < 4096, f"{grown} pages of a tree that nobody has used"
    tree.check()
