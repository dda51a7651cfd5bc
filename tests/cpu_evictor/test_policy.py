"""The order in which blocks leave the host tier."""

from __future__ import annotations

from kvactors.cpu_evictor.slots import HostTier, SlotState


def name(number: int) -> bytes:
    return bytes([number]) * 32


def tier(blocks: int = 6) -> HostTier:
    """Blocks 1, 2, .., each of another prompt, the least recently used first."""
    host = HostTier(blocks, blocks)
    for number in range(1, blocks + 1):
        host.land([host.add(name(number), bytes(32), SlotState.RESIDENT)], frozenset())
    return host


def order(host: HostTier, count: int) -> list[int]:
    return [block.hash[0] for block in host.victims(count)]


def first(host: HostTier, *numbers: int) -> None:
    host.evict_first([name(number) for number in numbers])


def test_the_index_chooses_under_retain():
    host = tier()
    assert order(host, 3) == [1, 2, 3]
    first(host, 5, 3)
    assert order(host, 3) == [5, 3, 1]


def test_victims_of_several_messages_keep_their_order():
    host = tier()
    first(host, 4)
    first(host, 6, 2, 9)
    assert order(host, 2) == [4, 6]
    assert order(host, 2) == [2, 1]


def test_a_victim_that_is_used_again_is_not_evicted_first():
    host = tier()
    first(host, 4, 5)
    host.touch([name(4)])
    assert order(host, 2) == [5, 1]


def test_a_victim_that_has_left_is_forgotten():
    host = tier()
    first(host, 4)
    host.drop(host.blocks[name(4)])
    host.land([host.add(name(4), bytes(32), SlotState.RESIDENT)], frozenset())
    assert order(host, 1) == [1]
    host.check()


def test_every_block_is_a_candidate_once():
    host = tier()
    first(host, 3, 1)
    found = [block.hash[0] for block in host.candidates()]
    assert found == [3, 1, 2, 4, 5, 6]


def test_a_victim_that_cannot_be_evicted_is_tried_once():
    host = tier()
    host.pin(host.blocks[name(4)])
    first(host, 4)
    assert order(host, 1) == [1]
    assert [block.hash[0] for block in host.candidates()] == [1, 2, 3, 4, 5, 6]


def test_a_block_with_followers_stays_although_it_was_named():
    host = HostTier(4, 4)
    for number, parent in ((2, 1), (1, 0)):
        host.land([host.add(name(number), name(parent), SlotState.RESIDENT)], frozenset())
    first(host, 1)
    assert order(host, 1) == [2]
    first(host, 1, 2)
    assert order(host, 2) == [2, 1]
