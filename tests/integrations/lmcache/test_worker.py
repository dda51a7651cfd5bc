"""The worker of LMCache's adapter over a file store and over stores that hang or fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvactors.integrations.lmcache.object_store import ObjectTransfer
from tests.integrations.lmcache.world import (
    KEYS,
    LAYOUT,
    LIMIT,
    SIZE,
    Memory,
    World,
    open_faulty,
    open_files,
    payload,
    salted,
)
from tests.tier_cache.stores import FaultyStore

PAGES = 3
"""Pages of an object."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(open_files(tmp_path), tmp_path)
    yield made
    made.close()


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[World]:
    made = World(open_faulty(), tmp_path)
    yield made
    FaultyStore.mode = "ok"
    made.close()


def test_objects_are_stored_found_and_loaded(world: World) -> None:
    assert world.held(KEYS[:4]) == [False] * 4
    assert world.store(KEYS[:4]) == [True] * 4
    assert world.held(KEYS[:5]) == [True] * 4 + [False]
    assert world.load(KEYS[:5]) == [*map(payload, KEYS[:4]), None]
    world.check()


STATES = [key._replace(object_group_id=1) for key in KEYS]
"""States after the same chunks."""
STATE_LAYOUT, STATE_SIZE = "float32[3,500]", 6000


def store_groups(world: World, count: int) -> list[bool]:
    """Store chunks, and states of two pages, in one task."""
    memory = [Memory(payload(key)) for key in KEYS[:count]]
    memory += [Memory(payload(key, STATE_SIZE), STATE_LAYOUT) for key in STATES[:count]]
    task = world.submit([*KEYS[:count], *STATES[:count]], memory, save=True)
    world.wait(lambda: task.number in world.results)
    return task.ok


def test_objects_of_several_groups_have_sizes_and_layouts_of_their_group(world: World) -> None:
    assert store_groups(world, 2) == [True] * 4
    both = [*KEYS[:2], *STATES[:3]]
    assert world.look_up(both, LAYOUT, STATE_LAYOUT) == [True] * 4 + [False]
    assert world.look_up(both, LAYOUT, "float32[3,501]") == [True] * 2 + [False] * 3
    memory = [Memory(), *(Memory(bytes(STATE_SIZE), STATE_LAYOUT) for _ in range(2))]
    task = world.submit([KEYS[1], STATES[0], KEYS[0]], memory, save=False)
    world.wait(lambda: task.number in world.results)
    assert task.ok == [True, True, False]  # the memory of a state, for a chunk
    assert memory[0].bytes.raw == payload(KEYS[1])
    assert memory[1].bytes.raw == payload(STATES[0], STATE_SIZE)
    world.objects.post(partial(world.objects.unlock, [*both[:4], *KEYS[:2]]))
    world.check()


def test_the_end_of_a_prefix_is_evicted_in_all_groups(tmp_path: Path) -> None:
    """LMCache looks all chunks of a group up, and then all of another one."""
    pages = 4 * (PAGES + 2)
    world = World(open_files(tmp_path, pages), tmp_path, pages)
    assert store_groups(world, 4) == [True] * 8
    assert world.store(KEYS[10:11]) == [True]  # evicts a chunk and a state
    found = world.look_up([*KEYS[:4], *STATES[:4]], LAYOUT, STATE_LAYOUT)
    assert found == [True, True, True, False] * 2
    world.close()


def test_another_layout_takes_the_place_unless_the_object_is_locked(world: World) -> None:
    other = "bfloat16[2,50,50]"
    world.store(KEYS[:2])
    assert world.look_up(KEYS[:1]) == [True]
    assert world.store(KEYS[:2], other) == [False, True]
    assert world.held(KEYS[:2]) == [True, False]
    assert world.held(KEYS[:2], other) == [False, True]
    world.check()


def test_wrong_memory_fails_its_object_only(world: World) -> None:
    memory = [Memory(payload(KEYS[0])), None]
    task = world.submit(KEYS[:2], memory, save=True)
    world.wait(lambda: task.number in world.results)
    assert task.ok == [True, False]
    short = [Memory(bytes(SIZE - 1)), Memory()]
    task = world.submit([KEYS[0], KEYS[0]], short, save=False)
    world.wait(lambda: task.number in world.results)
    assert task.ok == [False, True]
    world.check()


def test_the_store_evicts_by_use_and_never_a_locked_object(tmp_path: Path) -> None:
    world = World(open_files(tmp_path, 4 * PAGES), tmp_path, 4 * PAGES)
    assert world.store(KEYS[:4]) == [True] * 4
    assert world.look_up(KEYS[:1]) == [True]
    assert world.held(KEYS[2:3]) == [True]
    # the end of a prefix is evicted before its beginning
    assert world.store(KEYS[4:5]) == [True]
    assert world.held(KEYS[:5]) == [True, True, True, False, True]
    assert world.look_up(KEYS[1:3]) == [True, True]
    # one object has no lock: one fits, and the locked ones stay
    assert world.store(KEYS[10:13]) == [True, False, False]
    assert world.held(KEYS[:3]) == [True] * 3
    assert world.load(KEYS[:3]) == [*map(payload, KEYS[:3])]
    world.objects.post(partial(world.objects.unlock, [*KEYS[:3]]))
    assert world.store(KEYS[20:24]) == [True] * 4
    assert world.held(KEYS[:4]) == [False] * 4
    # more than the capacity: the beginning is stored
    assert world.store(KEYS[30:40]) == [True] * 4 + [False] * 6
    world.check()
    world.close()


def test_after_a_restart_the_end_of_a_prefix_is_evicted_first(tmp_path: Path) -> None:
    world = World(open_files(tmp_path), tmp_path)
    assert world.store(KEYS[:6]) == [True] * 6
    assert world.held(KEYS[2:4]) == [True] * 2
    recorded = [key for key, _ in world.keys.read()]
    assert recorded == KEYS[5::-1][:6], "a process that was killed leaves another order"
    world.close()
    assert [key for key, _ in world.keys.read()] == [KEYS[i] for i in (5, 4, 1, 0, 3, 2)]


def test_delete_leaves_locked_objects(world: World) -> None:
    world.store(KEYS[:3])
    world.store(salted("tenant")[:3])
    assert world.look_up(KEYS[:1]) == [True]
    chosen = [*KEYS[:2], KEYS[1], KEYS[9]]
    assert world.objects.ask(lambda: world.objects.delete(chosen), LIMIT, -1) == 1
    assert world.held(KEYS[:3]) == [True, False, True]
    assert world.held(salted("tenant")[:3]) == [True] * 3
    world.check()


def test_equal_keys_of_several_tasks_are_stored_once(world: World) -> None:
    tasks = [
        world.submit(
            [KEYS[0], KEYS[i], KEYS[0]], [Memory(payload(KEYS[j])) for j in (0, i, 0)], save=True
        )
        for i in (1, 2, 3)
    ]
    world.wait(lambda: all(task.number in world.results for task in tasks))
    assert [task.ok for task in tasks] == [[True] * 3] * 3
    world.check()


def test_a_store_task_ends_when_an_object_of_another_task_is_in_the_key_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first task has stored KEYS[0], and writes its line when KEYS[1] is stored as well.
    move, goes_on = world.objects._move, threading.Event()

    def slow(transfer: ObjectTransfer) -> bool:
        assert transfer.task.keys[transfer.position] == KEYS[0] or goes_on.wait(LIMIT)
        return move(transfer)

    monkeypatch.setattr(world.objects, "_move", slow)
    first = world.submit(KEYS[:2], [Memory(payload(key)) for key in KEYS[:2]], save=True)
    world.wait(lambda: ("stored", KEYS[:1], [SIZE]) in world.changes)
    assert world.store(KEYS[:1]) == [True]
    assert [key for key, _ in world.keys.read()] == KEYS[:1], "lost if the process is killed now"
    goes_on.set()
    world.wait(lambda: first.number in world.results)
    world.check()


def test_an_object_whose_page_the_store_has_evicted_is_reported_as_deleted(tmp_path: Path) -> None:
    world = World(open_files(tmp_path, 2 * PAGES), tmp_path)  # the disk takes less than expected
    for i in range(3):
        assert world.store(KEYS[i : i + 1]) == [True]
    assert ("deleted", KEYS[:1], [SIZE]) in world.changes
    world.check()
    world.close()


# -- stores that hang or fail


def test_pages_of_a_store_that_has_failed_do_not_stay_when_the_disk_takes_them_later(
    faulty: World,
) -> None:
    FaultyStore.mode = "hold"
    faulty.timeout = 0.2
    while not faulty.tier.in_flight:  # not, if the time was over before it began
        assert faulty.store(KEYS[:1]) == [False]
    FaultyStore.mode = "ok"
    faulty.timeout = LIMIT
    assert faulty.tier.drain(LIMIT)
    for _ in range(2):  # a turn that begins after the ends of the writes
        faulty.objects.ask(lambda: None, LIMIT, None)
    assert not faulty.tier.objects
    assert faulty.store(KEYS[:1]) == [True]
    assert faulty.tier.objects == PAGES
    faulty.check()


def test_a_load_that_hangs_ends_in_time_and_leaves_the_memory_alone(faulty: World) -> None:
    faulty.store(KEYS[:2])
    FaultyStore.mode = "hang"
    faulty.timeout = 0.2
    memory = Memory(b"\7" * SIZE)
    task = faulty.submit(KEYS[:1], [memory], save=False)
    faulty.wait(lambda: task.number in faulty.results)
    assert task.ok == [False]
    FaultyStore.mode = "ok"
    faulty.timeout = LIMIT
    assert faulty.tier.drain(LIMIT)
    for _ in range(2):  # a turn that begins after the end of the read
        faulty.objects.ask(lambda: None, LIMIT, None)
    assert faulty.load(KEYS[1:2]) == [payload(KEYS[1])]
    assert memory.bytes.raw == b"\7" * SIZE, "memory that LMCache has back was written"
    assert not faulty.objects.catalog.locks
    assert faulty.load(KEYS[:1]) == [payload(KEYS[0])]
    faulty.check()


def test_loads_that_hang_for_good_do_not_hang_the_others(faulty: World) -> None:
    faulty.store(KEYS[:8])
    FaultyStore.mode = "hang"
    faulty.timeout = 0.2
    for _ in range(3):  # more pages than the staging memory has
        tasks = [faulty.submit([key], [Memory()], save=False) for key in KEYS[:8]]
        faulty.wait(lambda tasks=tasks: all(task.number in faulty.results for task in tasks))
        assert not any(task.ok[0] for task in tasks)
    FaultyStore.mode = "ok"


def test_a_store_that_fails_costs_misses_only(faulty: World) -> None:
    faulty.store(KEYS[:2])
    FaultyStore.mode = "raise"
    assert faulty.load(KEYS[:2]) == [None] * 2
    assert faulty.store(KEYS[2:4]) == [False] * 2
    assert faulty.objects.running
    faulty.check()


def test_tasks_in_flight_fail_when_the_worker_stops(tmp_path: Path) -> None:
    world = World(open_faulty(), tmp_path)
    world.store(KEYS[:1])
    FaultyStore.mode = "hang"
    task = world.submit(KEYS[:1], [Memory()], save=False)
    assert world.look_up(KEYS[:1]) == [True]
    assert world.objects.stop(0.2)
    assert world.results[task.number].ok == [False]
    assert not world.objects.running
    assert world.objects.stop(0.2)
    FaultyStore.mode = "ok"
    world.tier.close()
    assert world.objects.ask(lambda: 1, LIMIT, 2) == 2
    world.keys.close()


@pytest.mark.parametrize("report", ["accessed", "stored"])
def test_a_receiver_that_raises_does_not_end_the_worker(
    world: World, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("a listener of LMCache")

    monkeypatch.setattr(world, report, raises)
    assert world.store(KEYS[:1]) == [True]
    assert world.held(KEYS[:1]) == [True]
    assert world.load(KEYS[:1]) == [payload(KEYS[0])]
    assert LAYOUT
