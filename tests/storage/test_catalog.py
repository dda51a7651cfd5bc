"""Back ends by name, and the catalog."""

from __future__ import annotations

import random

import pytest

from kvactors.device.arena import Arena
from kvactors.errors import ConfigError
from kvactors.quotas import Quota, Quotas, StorageQuotas, salt_id
from kvactors.settings import Config, StorageConfig
from kvactors.storage.backend import SlotViews
from kvactors.storage.catalog import COUNTED_SALTS, Catalog
from kvactors.storage.factory import capacity_of, make_backend
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import never

SIZE = 5000
PRINT = bytes(range(32))


def name(i: int) -> bytes:
    return i.to_bytes(4, "big") + bytes(28)


def test_back_ends_by_name():
    assert make_backend(StorageConfig(), "", PRINT, SIZE) is None
    assert isinstance(make_backend(StorageConfig(backend="memory"), "", PRINT, SIZE), MemoryBackend)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"backend": "file"}, "storage.directory is needed"),
        (
            {"backend": "fiel"},
            "unknown storage.backend 'fiel': choose none, memory, file, mooncake",
        ),
        ({"backend": "no.such:Store"}, "cannot be imported"),
        ({"backend": "builtins:dict"}, "cannot|is not a Backend"),
        ({"backend": "memory", "capacity_bytes": "1KB"}, "holds no block of 5000 bytes"),
        ({"backend": "mooncake", "exclusive": True}, "exclusive has no meaning"),
    ],
)
def test_back_ends_that_cannot_be(changes, complaint):
    with pytest.raises((ConfigError, TypeError), match=complaint):
        make_backend(StorageConfig(**changes), "m", PRINT, SIZE)


@pytest.mark.parametrize(
    ("blocks", "size", "capacity"),
    [(None, None, 0), (7, None, 7), (None, "50KB", 10), (3, "50KB", 3), (30, 51_000, 10)],
)
def test_a_capacity_in_blocks_and_in_bytes(blocks, size, capacity):
    assert capacity_of(StorageConfig(capacity_blocks=blocks, capacity_bytes=size), SIZE) == capacity


@pytest.mark.parametrize(
    "changes", [{"capacity_blocks": 0}, {"capacity_bytes": 0}, {"capacity_bytes": "0GB"}]
)
def test_a_capacity_of_zero_is_an_error_that_names_the_remedy(changes):
    with pytest.raises(
        ConfigError, match=r"must be at least 1, not .*leave it out for 80 % of the free space"
    ):
        Config.from_mapping({"storage": {"backend": "memory", **changes}})


@pytest.mark.parametrize("name", ["", "a/b", ".", "..", "a\0b", "n" * 201, "\u00e4" * 101])
def test_a_namespace_that_cannot_be_a_folder_is_an_error(name):
    with pytest.raises(ConfigError, match=r"storage\.namespace must "):
        Config.from_mapping({"storage": {"backend": "memory", "namespace": name}})


# -- Quotas of salts in a store: the catalog against a model, and what stores keep of salts.


SALTS = 4


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def admit(catalog: Catalog, numbers, salt):
    return catalog.admit([key(n) for n in numbers], {key(n): salt for n in numbers})


class Model:
    """A store as a plain list: the rules of docs/how-to/share_a_cache.md, one key at a time."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.keys = []  # (key, salt), the least recently used first
        self.default = None
        self.named = {}

    def quota(self, salt):
        found = self.named.get(salt, self.default)
        return 1_000_000 if salt is None or found is None else found

    def held(self, salt):
        return sum(one[1] == salt for one in self.keys)

    def above(self):
        return {salt for _, salt in self.keys if self.held(salt) > self.quota(salt)}

    def admit(self, batch):
        batch = dict(batch[max(0, len(batch) - self.capacity) :])
        before = dict(self.keys)
        used = [(one, before.get(one, salt)) for one, salt in batch.items()]
        self.keys = [one for one in self.keys if one[0] not in batch] + used
        incoming = {salt for _, salt in used}
        while len(self.keys) > self.capacity:
            salts = self.above() & incoming or self.above()
            choice = [one for one in self.keys if one[1] in salts] or self.keys
            # Of several salts above their quotas any may be first: a choice for each.
            first = {}
            for one in choice:
                first.setdefault(one[1] if salts else None, one)
            yield first.values()

    def leave(self, one):
        self.keys.remove(one)


def salt_of(number):
    """Keys have one salt each. That of every fifth is not known."""
    return None if number % 5 == 4 else number % SALTS


def test_many_small_stores_follow_the_model():
    """Few keys and small quotas, so that quotas decide in most steps."""
    for seed in range(300):
        rng = random.Random(seed)
        history = []
        for _ in range(30):
            some = [rng.sample(range(12), rng.randint(1, 6)) for _ in range(2)]
            history.append(
                rng.choice(
                    (
                        *[("admit", some[0])] * 6,
                        ("run", some[1]),
                        ("remove", some[0][0]),
                        ("evict", set(some[1])),
                        ("quota", rng.randrange(SALTS), rng.choice((None, "default", 1, 2, 3))),
                    )
                )
            )
        follow(rng.randint(2, 8), rng.choice((None, 1, 2, 3)), history)


def follow(capacity, default, history):
    quotas = StorageQuotas(default)
    catalog, model = Catalog(capacity), Model(capacity)
    catalog.shares.follow(quotas)
    model.default = default
    for kind, *args in history:
        if kind == "admit":
            _admit(catalog, model, args[0])
        elif kind == "remove":
            gone = catalog.remove([key(args[0])])
            assert gone == [one for one, _ in model.keys if one == key(args[0])]
            model.keys = [one for one in model.keys if one[0] != key(args[0])]
        elif kind == "run":
            _run(catalog, model, args[0])
        elif kind == "evict":
            _evict(catalog, model, {key(number) for number in args[0]})
        elif kind == "quota":
            _set_quota(quotas, model, *args)
        else:
            catalog.clear()
            model.keys = []
        assert [*catalog] == [one for one, _ in model.keys]
        assert [catalog.salt(one) for one, _ in model.keys] == [salt for _, salt in model.keys]
        assert sorted(one for part in catalog.slices() for one in part) == sorted([*catalog])
        for salt in range(SALTS):
            assert catalog.shares.held(salt) == model.held(salt)
        catalog.check()


def _admit(catalog, model, numbers):
    batch = [(key(number), salt_of(number)) for number in numbers]
    before = set(catalog)
    departed = set(catalog.departed)
    admission = catalog.admit([one for one, _ in batch], dict(batch))
    left = before - set(catalog)
    assert set(admission.evicted) == left
    assert len(admission.evicted) == len(left)
    assert catalog.departed == departed | left
    fresh, existing, refused = map(set, admission[:3])
    assert fresh | existing | refused == {one for one, _ in batch}
    assert len(fresh) + len(existing) + len(refused) == len(batch)
    taken = {one for one, _ in batch[-catalog.capacity :]}  # of the rest only what is there stays
    assert fresh == {one for one in taken if one in catalog and one not in before}
    assert existing == {one for one, _ in batch if one in catalog and one in before}
    after = set(catalog)
    for choices in model.admit(batch):
        gone = [one for one in choices if one[0] not in after]
        assert gone, "another key left than one that the rules allow"
        model.leave(gone[0])


def _run(catalog, model, numbers):
    names = [key(number) for number in numbers]
    held = dict(model.keys)
    expected = next((i for i, one in enumerate(names) if one not in held), len(names))
    assert catalog.run(names) == expected
    for one in reversed(names[:expected]):
        model.keys.remove((one, held[one]))
        model.keys.append((one, held[one]))


def _evict(catalog, model, busy):
    above = model.above()
    free = [one for one in model.keys if one[0] not in busy]
    allowed = [one for one in free if one[1] in above] or free[:1]
    victim = catalog.evict(busy)
    if victim is None:
        assert not free
        return
    (one,) = [one for one in allowed if one[0] == victim]
    assert one == next(other for other in free if other[1] == one[1] or not above)
    model.leave(one)


def _set_quota(quotas, model, salt, blocks):
    if blocks == "default":
        quotas.set(salt, None)
        model.named.pop(salt, None)
    else:
        quotas.set(salt, Quota(storage=blocks))
        model.named[salt] = blocks


def test_a_salt_above_its_quota_loses_its_own_keys_and_no_others():
    quotas = StorageQuotas()
    quotas.set(1, Quota(storage=2))
    catalog = Catalog(6)
    catalog.shares.follow(quotas)
    admit(catalog, range(3), 2)
    admit(catalog, range(10, 13), 1)  # free space beyond the quota
    assert len(catalog) == 6
    admission = admit(catalog, range(20, 24), 1)
    assert admission.evicted == [key(10), key(11), key(12)]
    assert admission.refused == [key(20)]
    assert [*catalog] == [key(n) for n in (0, 1, 2, 21, 22, 23)]
    assert catalog.shares.evicted == {1: 4}


async def test_an_object_keeps_the_salt_that_it_was_written_with():
    store = MemoryBackend(bytes(32), 8, 4)
    arena = Arena(4, 8)
    await store.write([key(1)], SlotViews(arena, [0]), never)
    report = await store.write([key(2), key(1)], SlotViews(arena, [0, 1]), never, (), [7, 7])
    assert list(report.outcomes) == [Outcome.OK, Outcome.EXISTS]
    assert [store.catalog.salt(key(n)) for n in (1, 2)] == [None, 7]  # as its entry on a disk


def test_victims_are_counted_for_a_bounded_number_of_salts():
    quotas = StorageQuotas(1)
    catalog = Catalog(2)
    catalog.shares.follow(quotas)
    quotas.set(COUNTED_SALTS + 100, Quota(storage=1))
    for salt in range(COUNTED_SALTS + 200):
        admit(catalog, (2 * salt, 2 * salt + 1), salt)
        catalog.admit([key(1 << 40)])
        catalog.clear()
    assert catalog.shares.quota_evictions == COUNTED_SALTS + 200
    assert len(catalog.shares.evicted) == COUNTED_SALTS + 1


def test_the_quotas_of_the_settings_reach_the_store():
    quotas = Quotas(Quota(storage=5), {"a": Quota(storage=2), "b": Quota(device=1)})
    found = quotas.storage
    assert [found.get(salt_id(salt)) for salt in (None, "a", "b", "c")] == [5, 2, None, 5]
    assert found
    assert found.is_named(salt_id("b"))
    quotas.set("a", None)
    assert found.get(salt_id("a")) == 5
    none = Quotas(Quota(device=1))
    assert not none.storage
    none.set("a", Quota(storage=3))
    assert none.storage
