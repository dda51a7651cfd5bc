"""Groups of layers whose blocks have other sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvactors import CacheClosed, ConfigError, StoreError, TierCache, WrongThread, open_tiers
from kvactors.storage import attempts
from kvactors.tier_cache import Lookup, SlotMemory, TierGroup, open_storage
from kvactors.tier_cache.settings import TierConfig, checked_config
from tests.tier_cache.helpers import BLOCK, KEYS, answer, elsewhere, load, payload, settle, store
from tests.tier_cache.stores import FaultyStore

WINDOW, STATE = 32, 1024
"""Bytes of the blocks of two groups."""
GROUPS = {
    "window": {"block_bytes": WINDOW, "num_slots": 6},
    "state": {"block_bytes": STATE, "num_slots": 2},
}


def hybrid(**settings: Any) -> TierCache:
    return open_tiers(
        {"model": "m", "block_bytes": BLOCK, "num_slots": 4, "groups": GROUPS, **settings}
    )


def files(folder: Path) -> dict[str, Any]:
    return {
        "backend": "file",
        "directory": str(folder),
        "free_space_floor": 0,
        "timeout_s": 20.0,
        "capacity_blocks": 64,
    }


def test_a_key_has_a_block_in_each_group(tmp_path: Path) -> None:
    cache = hybrid(storage=files(tmp_path))
    caches = {"": cache, **cache.groups}
    assert {name: one.memory.block_bytes for name, one in caches.items()} == {
        "": BLOCK,
        "window": WINDOW,
        "state": STATE,
    }
    for one in caches.values():
        store(one, KEYS[:2])
    settle(cache)  # the steps of all end together
    store(cache.groups["state"], KEYS[2:3])  # evicts one
    settle(cache)
    assert [cache.groups["state"].peek(key) for key in KEYS[:3]].count(Lookup.PENDING) == 1
    assert cache.peek(KEYS[2]) is Lookup.MISS
    assert all(one.statistics().saved >= 2 for one in caches.values())
    cache.check()
    cache.shutdown()
    assert all(one.health().status == "closed" for one in caches.values())
    with pytest.raises(CacheClosed):
        cache.groups["state"].lookup(KEYS[0])

    cache = hybrid(storage=files(tmp_path))  # a restart
    for one in (cache, *cache.groups.values()):
        assert answer(one, KEYS[1]) is Lookup.HIT
        assert load(one, KEYS[1]) == payload(KEYS[1], one.config.block_bytes)
    cache.shutdown()


def test_groups_are_reset_together() -> None:
    cache = hybrid(storage={"backend": "memory"})
    window = cache.groups["window"]
    store(cache, KEYS[:1])
    store(window, KEYS[:1])
    settle(cache)
    cache.reset()
    assert (cache.peek(KEYS[0]), window.peek(KEYS[0])) == (Lookup.PENDING, Lookup.PENDING)
    cache.reset(storage=True)
    settle(cache)
    assert (cache.peek(KEYS[0]), window.peek(KEYS[0])) == (Lookup.MISS, Lookup.MISS)
    cache.shutdown()


def test_work_and_trouble_of_a_group_are_those_of_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "PAUSE_S", 0.0)
    FaultyStore.mode, FaultyStore.unreadable = "ok", set()
    cache = hybrid(storage={"backend": f"{FaultyStore.__module__}:{FaultyStore.__name__}"})
    try:
        cache.start()
        state = cache.groups["state"]
        FaultyStore.mode = "hold"
        store(state, KEYS[:1])
        cache.end_step()
        assert cache.has_pending_work()
        FaultyStore.mode = "unwritable"
        settle(cache)
        for key in KEYS[1:8]:
            store(state, [key])
            settle(cache)
        (reason,) = cache.health().reasons
        assert reason.startswith("group state: storage: no write has worked")
    finally:
        FaultyStore.mode = "ok"
        cache.shutdown()


def test_one_thread_owns_all_groups() -> None:
    cache = hybrid()
    cache.start()
    window = cache.groups["window"]
    with pytest.raises(WrongThread):
        elsewhere(window.lookup, KEYS[0])
    elsewhere(cache.adopt)
    with pytest.raises(WrongThread):
        window.lookup(KEYS[0])
    elsewhere(cache.shutdown)


def test_a_group_that_cannot_open_closes_all(tmp_path: Path) -> None:
    cache, other = (hybrid(storage=files(tmp_path)) for _ in range(2))
    cache.groups["state"].start()  # the folder of this group is taken
    with pytest.raises(StoreError, match="in use"):
        other.start()
    assert other.groups["window"].health().status == "closed"
    other.shutdown()
    cache.shutdown()
    cache = hybrid(storage=files(tmp_path))
    cache.start()
    cache.shutdown()


def test_a_peek_neither_fetches_nor_holds(tmp_path: Path) -> None:
    state = hybrid(storage=files(tmp_path)).groups["state"]
    store(state, KEYS[:2])
    settle(state)
    state.reset()
    assert [state.peek(key) for key in KEYS[:3]] == [Lookup.PENDING, Lookup.PENDING, Lookup.MISS]
    settle(state)
    assert state.statistics().fetched == 0
    store(state, KEYS[3:5])
    settle(state)
    assert [state.peek(key) for key in KEYS[3:5]] == [Lookup.HIT, Lookup.HIT]
    assert store(state, KEYS[5:7])  # in the same step
    with pytest.raises(ValueError, match="bytes"):
        state.peek("key")  # type: ignore[arg-type]
    state.shutdown()


def test_memory_of_groups_may_be_the_engines() -> None:
    given = bytearray(2 * STATE)
    config = {"model": "m", "block_bytes": BLOCK, "num_slots": 4, "groups": GROUPS}
    cache = open_tiers(config, group_memory={"state": given})
    state = cache.groups["state"]
    store(state, KEYS[:1])
    assert bytes(given).count(payload(KEYS[0], STATE)) == 1
    cache.shutdown()
    with pytest.raises(ConfigError, match="'states', and groups has no such name"):
        open_tiers(config, group_memory={"states": given})


# -- settings


def test_storage_is_divided_by_the_bytes_of_the_host_slots() -> None:
    storage = {"backend": "memory", "capacity_bytes": 26_240, "capacity_blocks": 100}
    config = checked_config(
        {"model": "m", "block_bytes": 96, "num_slots": 4, "groups": GROUPS, "storage": storage}
    )
    shares = {name: config.group(name).storage for name in GROUPS} | {"": config.own.storage}
    assert {name: one.capacity_bytes for name, one in shares.items()} == {
        "": 10 * 4 * 96,
        "window": 10 * 6 * 32,
        "state": 10 * 2 * 1024,
    }
    assert {name: one.capacity_blocks for name, one in shares.items()} == {
        "": 100,
        "window": 150,
        "state": 50,
    }


def test_groups_have_an_identity_of_their_own() -> None:
    plain = checked_config({"model": "m", "block_bytes": BLOCK, "num_slots": 4})
    config = checked_config(
        {
            "model": "m",
            "block_bytes": BLOCK,
            "num_slots": 4,
            "groups": {
                "a": {"block_bytes": BLOCK, "num_slots": 1},
                "b": {"block_bytes": BLOCK, "num_slots": 1},
            },
        }
    )
    assert config.own.fingerprint == plain.fingerprint  # objects of before are found
    assert len({one.fingerprint for one in (plain, config.group("a"), config.group("b"))}) == 3
    other = TierGroup(BLOCK, capacity_bytes="8KB", identity={"dtype": "float32"})
    changed = TierConfig("m", BLOCK, capacity_bytes="64KB", groups={"a": other}).group("a")
    assert changed.fingerprint != config.group("a").fingerprint
    assert changed.num_slots == 2
    with pytest.raises(KeyError):
        config.group("c")


@pytest.mark.parametrize(
    ("groups", "storage", "error"),
    [
        ({"s": {"block_bytes": 8}}, {}, r"groups\.s: num_slots must be at least 1"),
        ({"s": {"block_bytes": 8, "num_slots": 1, "x": 1}}, {}, r"groups\.s\.x"),
        ({"s": {"num_slots": 1}}, {}, "block_bytes"),
        ({"": {"block_bytes": 8, "num_slots": 1}}, {}, "a group needs a name"),
        (
            {"s": {"block_bytes": 8, "num_slots": 1, "capacity_bytes": 8192}},
            {},
            r"groups\.s: num_slots = 1 and capacity_bytes = 8192",
        ),
        (
            {"s": {"block_bytes": 8, "num_slots": 1}},
            {"backend": "file", "directory": "d"},
            r"storage\.capacity_bytes is needed with groups \(s\)",
        ),
    ],
)
def test_a_bad_group_is_named(groups: Any, storage: Any, error: str) -> None:
    table = {"model": "m", "block_bytes": 96, "num_slots": 4, "groups": groups}
    with pytest.raises(ConfigError, match=error):
        checked_config({**table, "storage": storage})


def test_caches_and_storage_tiers_have_one_size() -> None:
    config = checked_config(
        {
            "model": "m",
            "block_bytes": BLOCK,
            "num_slots": 1,
            "groups": GROUPS,
            "storage": {"backend": "memory"},
        }
    )
    with pytest.raises(ConfigError, match=r"config\.group\(name\)"):
        open_storage(config)
    with pytest.raises(ConfigError, match="open_tiers opens groups"):
        TierCache(config, SlotMemory(1, BLOCK))
    tier = open_storage(config.group("state"))
    assert tier.block_bytes == STATE
    tier.close()
