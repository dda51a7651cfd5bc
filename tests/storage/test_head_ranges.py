"""Stores whose objects are ranges of heads: caches with other numbers of ranks find them, and a
block is a hit only if all of its objects are whole."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import numpy as np
import pytest
from msgspec.structs import replace

import kvactors
from kvactors.data_plane.ranks.worker import serve_rank
from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.errors import ConfigError, RankError
from kvactors.layout import DSALayout, GQALayout, Layout, MLALayout, Role, make_layout
from kvactors.settings import Config, StorageConfig
from kvactors.settings.mooncake import MooncakeConfig
from kvactors.settings.valkey import ValkeyConfig
from kvactors.storage.factory import make_store, object_layout
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake_client import MooncakeClient
from kvactors.testing.store_contract import StoreContract, key, never
from tests.storage.mooncake_standin import StandIn
from tests.storage.test_mooncake_rules import listening
from tests.support.valkey import MISSING, PROGRAM, valkey_server

pytestmark = pytest.mark.full

OK, MISS, CORRUPT, EXISTS = Outcome.OK, Outcome.MISS, Outcome.CORRUPT, Outcome.EXISTS
HEADS, BLOCK, RANGES = 8, 4, 4


class TokensFirst(Layout):
    """A layout of another package, whose heads stand behind the tokens. `heads`: on a rank."""

    heads_axis = 1

    def __init__(self, heads: int) -> None:
        self.heads = heads
        super().__init__(BLOCK, 2)

    @property
    def kind(self) -> str:
        return "tokens-first"

    def roles(self, layer):
        shape = (BLOCK, self.heads, 5 + layer)
        return [Role("key", shape, "float16"), Role("value", shape, "uint8")]


LAYOUTS = {
    "plain": lambda ranks: GQALayout(3, HEADS // ranks, 6, BLOCK),
    "quantized": lambda ranks: GQALayout(
        2, HEADS // ranks, 6, BLOCK, quantization="block_wise_fp8", extra_layers=1
    ),
    "uneven": lambda ranks: GQALayout(2, [HEADS // ranks, 2 * HEADS // ranks], [6, 10], BLOCK),
    "tokens-first": lambda ranks: TokensFirst(HEADS // ranks),
}


def share(whole: Layout, body: bytes, rank: int, ranks: int) -> bytes:
    """A rank's bytes of a block."""
    found, at = [], 0
    for piece in whole.pieces:
        values = np.frombuffer(body[at : at + piece.nbytes], np.uint8).reshape(*piece.shape, -1)
        at += piece.nbytes
        found.append(np.split(values, ranks, whole.heads_axis)[rank].tobytes())
    return b"".join(found)


def body(whole: Layout, number: int) -> bytes:
    return np.random.default_rng(number).bytes(whole.block_bytes)


class Ranks:
    """The stores of all ranks of a cache, as the ranks of one use them."""

    def __init__(self, storage: StorageConfig, make, ranks: int) -> None:
        self.whole, self.layout, self.ranks = make(1), make(ranks), ranks
        self.stores = [
            make_store(replace(storage, rank=rank, ranks=ranks), "m", make(ranks))
            for rank in range(ranks)
        ]
        self.arenas = [
            Arena(64, one.block_bytes, trailer=one.slot_trailer_bytes) for one in self.stores
        ]

    async def __aenter__(self):
        for store, arena in zip(self.stores, self.arenas, strict=True):
            await store.open()
            await store.attach(arena)
        return self

    async def __aexit__(self, *error) -> None:
        for store in self.stores:
            await store.close()

    async def put(self, *numbers: int) -> list[list[int]]:
        """Write blocks. Returns the outcomes of each rank."""
        found = []
        for rank, (store, arena) in enumerate(zip(self.stores, self.arenas, strict=True)):
            views = [arena.view(i) for i in range(len(numbers))]
            for view, number in zip(views, numbers, strict=True):
                view[:] = share(self.whole, body(self.whole, number), rank, self.ranks)
            found.append(list((await store.write(keys(numbers), views, never)).outcomes))
        return found

    async def get(self, *numbers: int) -> list[int]:
        """Read blocks. Returns the worst outcome of each. The bytes of hits are right."""
        found = []
        for rank, (store, arena) in enumerate(zip(self.stores, self.arenas, strict=True)):
            views = [arena.view(i) for i in range(len(numbers))]
            outcomes = (await store.read(keys(numbers), views, never)).outcomes
            for view, number, outcome in zip(views, numbers, outcomes, strict=True):
                wanted = share(self.whole, body(self.whole, number), rank, self.ranks)
                assert outcome != OK or bytes(view) == wanted
            found.append(outcomes)
        return list(map(max, zip(*found, strict=True)))


def keys(numbers):
    return [key(number) for number in numbers]


def in_folder(folder, **more) -> StorageConfig:
    more = {"head_ranges": RANGES, "timeout_s": 20.0, **more}
    return StorageConfig(backend="object", url=f"file://{folder}", **more)


@pytest.fixture(scope="module")
def valkey():
    if PROGRAM is None:
        pytest.skip(MISSING)
    with valkey_server() as one:
        yield one


@pytest.fixture
async def pool(monkeypatch):
    """The settings of a Mooncake pool, and its clients."""
    made, objects = [], {}

    def client() -> StandIn:
        made.append(StandIn())
        made[-1].objects = objects
        return made[-1]

    monkeypatch.setattr(MooncakeClient, "_make", staticmethod(client))
    async with listening() as port:
        server = MooncakeConfig(master_server_address=f"127.0.0.1:{port}")
        yield StorageConfig(backend="mooncake", mooncake=server, head_ranges=RANGES), made


class TestInAFolder(StoreContract):
    evicts = False
    layout = LAYOUTS["quantized"](1)
    block_bytes = layout.block_bytes

    async def make(self, folder, capacity):
        folder.mkdir(exist_ok=True)
        return make_store(in_folder(folder), "m", self.layout)


class TestInValkey(TestInAFolder):
    numbers = itertools.count()

    @pytest.fixture(autouse=True)
    def _at(self, valkey):
        self.server = ValkeyConfig(url=valkey.url)

    async def make(self, folder, capacity):
        config = StorageConfig(backend="valkey", valkey=self.server, head_ranges=RANGES)
        return make_store(config, f"m{next(self.numbers)}", self.layout)


# -- numbers of ranks


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_number_of_ranks_reads_what_every_other_wrote(tmp_path, layout):
    storage, make = in_folder(tmp_path), LAYOUTS[layout]
    async with AsyncExitStack() as stack:
        caches = [await stack.enter_async_context(Ranks(storage, make, n)) for n in (1, 2, 4)]
        for first, writer in zip((0, 10, 20), caches, strict=True):
            numbers = range(first, first + 3)
            assert await writer.put(*numbers) == [[OK] * 3] * writer.ranks
            for reader in caches:
                assert await reader.get(first, 99, *numbers[1:]) == [OK, MISS, OK, OK]
                assert await reader.put(*numbers) == [[EXISTS] * 3] * reader.ranks
                for store in reader.stores:
                    assert await store.ask(keys([*numbers, 99, first]), never) == 3
        await caches[1].stores[1].clear()
        for reader in caches:
            assert await reader.get(0, 10, 20) == [MISS] * 3
        await caches[1].put(0)
        for reader in caches:
            assert await reader.get(0) == [OK]


async def test_objects_are_those_of_as_many_ranks_without_the_setting(tmp_path):
    make = LAYOUTS["plain"]
    async with (
        Ranks(in_folder(tmp_path, head_ranges=None), make, 4) as four,
        Ranks(in_folder(tmp_path), make, 1) as one,
        Ranks(in_folder(tmp_path, head_ranges=2), make, 1) as others,
    ):
        await four.put(1)
        assert await one.get(1) == [OK]
        assert await others.get(1) == [MISS]
        await one.put(2)
        assert await four.get(2) == [OK]
    folders = {path.parents[2].name for path in tmp_path.rglob(key(2).hex())}
    assert folders == {f"rank-{rank}-of-4" for rank in range(4)}


async def test_numbers_of_ranks_share_a_server(valkey):
    config = StorageConfig(
        backend="valkey", valkey=ValkeyConfig(url=valkey.url), head_ranges=RANGES, namespace="n"
    )
    async with AsyncExitStack() as stack:
        one, two, four = [
            await stack.enter_async_context(Ranks(config, LAYOUTS["plain"], n)) for n in (1, 2, 4)
        ]
        await two.put(*range(40))
        assert await one.get(*range(40)) == await four.get(*range(40)) == [OK] * 40
        prefix = four.stores[3]._prefix.encode()
        [name] = [n for n in valkey.client().keys("*" + key(7).hex()) if n.startswith(prefix)]
        valkey.client().delete(name)
        assert await one.get(6, 7) == await two.get(6, 7) == [OK, MISS]
        store = one.stores[0]
        assert (store.removed_outside, store.take_removed()) == (False, [])
        store.stores[1]._gone.append(key(7))
        store.stores[2]._gone.extend(keys([7, 3]))
        assert (store.removed_outside, store.take_removed()) == (True, keys([7, 3]))
        assert not store.removed_outside


async def test_the_stores_of_a_pool_have_one_client(pool):
    """It is opened and left once, and every window of it is registered."""
    config, clients = pool
    for ranks in (2, 1):
        async with Ranks(config, LAYOUTS["plain"], ranks) as cache:
            if ranks == 2:
                await cache.put(*range(20))
            assert await cache.get(*range(20)) == [OK] * 20
            assert await cache.stores[0].ask(keys([*range(20), 99]), never) == 20
    assert [one.calls.count("setup") for one in clients] == [1, 1, 1]
    assert [one.calls.count("close") for one in clients] == [1, 1, 1]
    assert [one.calls.count("register_buffer") for one in clients] == [2, 2, 4]


# -- objects that are missing or wrong


def damage(what: str, files: list) -> None:
    """Change the last object of a block, for readers at once."""
    data = bytearray(files[3].read_bytes())
    if what == "missing":
        files[3].unlink()
        return
    if what == "cut":
        del data[-1]
    elif what == "flipped":
        data[7] ^= 1
    else:  # a range of the same block, which has the same size
        data[:] = files[2].read_bytes()
    changed = files[3].with_name("changed")
    changed.write_bytes(data)
    changed.replace(files[3])


@pytest.mark.parametrize(
    ("what", "outcome"),
    [("missing", MISS), ("cut", CORRUPT), ("flipped", CORRUPT), ("foreign", CORRUPT)],
    ids=["missing", "cut", "flipped", "foreign"],
)
async def test_a_block_with_a_wrong_range_is_no_hit_until_it_is_written_again(
    tmp_path, what, outcome
):
    """A rank with other ranges of it only is served. Bytes of a slot are left alone."""
    make = LAYOUTS["plain"]
    async with (
        Ranks(in_folder(tmp_path), make, 1) as one,
        Ranks(in_folder(tmp_path), make, 2) as two,
    ):
        await two.put(1, 2)
        damage(what, sorted(tmp_path.rglob(key(1).hex())))
        first, second = two.stores
        assert await first.exists_many(keys([1, 2]), never) == [True, True]
        if what == "missing":  # what a look-up can see
            assert await second.exists_many(keys([1, 2]), never) == [False, True]
            assert await one.stores[0].ask(keys([1, 2]), never) == 0
        view = one.arenas[0].view(0)
        view[:] = b"\xee" * len(view)
        report = await one.stores[0].read(keys([1]), [view], never)
        assert (list(report.outcomes), report.gone) == ([outcome], [key(1)])
        assert bytes(view) == b"\xee" * len(view)
        assert await one.get(1, 2) == [MISS, OK]
        assert (await one.put(1))[0][0] == OK
        assert await two.get(1, 2) == [OK, OK]


async def test_a_half_written_block_is_a_miss(tmp_path):
    """The second of two ranks ends before it writes."""
    make = LAYOUTS["plain"]
    async with (
        Ranks(in_folder(tmp_path), make, 2) as two,
        Ranks(in_folder(tmp_path), make, 1) as one,
        Ranks(in_folder(tmp_path), make, 4) as four,
    ):
        ended = two.stores.pop()
        two.ranks = 2
        two.arenas.pop()
        await two.put(1)
        assert await one.stores[0].ask(keys([1]), never) == 0
        assert await one.get(1) == await four.get(1) == [MISS]
        assert await one.put(1) == [[OK]], "the half that lacks is written"
        assert await four.get(1) == [OK]
        await ended.close()


async def test_a_range_without_an_answer_ends_the_batch(tmp_path, monkeypatch):
    """Each part of it would take the time-out of the store."""
    asked = []

    async def silent(keys, views, expired):
        asked.append(len(keys))
        return bytes([Outcome.UNAVAILABLE]) * len(keys)

    monkeypatch.setattr("kvactors.storage.head_ranges.MOST_BLOCKS", 4)
    async with Ranks(in_folder(tmp_path), LAYOUTS["plain"], 1) as one:
        await one.put(*range(10))
        assert await one.get(*range(10)) == [OK] * 10, "in parts"
        monkeypatch.setattr(one.stores[0].stores[2], "get", silent)
        assert await one.get(*range(10)) == [Outcome.UNAVAILABLE] * 10
        assert asked == [4]


@pytest.mark.parametrize("seed", range(3))
async def test_caches_that_write_remove_and_damage_at_once_read_no_wrong_byte(tmp_path, seed):
    draw = random.Random(seed)
    async with AsyncExitStack() as stack:
        caches = [
            await stack.enter_async_context(Ranks(in_folder(tmp_path), LAYOUTS["uneven"], n))
            for n in (1, 2, 4)
        ]

        async def work(cache: Ranks) -> int:
            hits = 0
            for _ in range(25):
                numbers = draw.sample(range(12), 4)
                match draw.randrange(8):
                    case 0:
                        await draw.choice(cache.stores).remove(keys(numbers[:1]))
                    case 1:
                        await draw.choice(cache.stores).clear()
                    case 2:
                        files = sorted(tmp_path.rglob(key(numbers[0]).hex()))
                        # Another cache may be removing them.
                        with suppress(FileNotFoundError, IndexError):
                            damage(draw.choice(["cut", "flipped", "foreign"]), files)
                    case 3 | 4:
                        await cache.put(*numbers)
                    case _:
                        found = await cache.get(*numbers)
                        assert set(found) <= {OK, MISS, CORRUPT}
                        hits += found.count(OK)
            return hits

        assert sum(await asyncio.gather(*map(work, caches))) > 0
        await caches[1].put(*range(12))
        for cache in caches:
            found = await cache.get(*range(12))
            assert set(found) <= {OK, MISS, CORRUPT}


# -- settings


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_a_range_does_not_depend_on_the_number_of_ranks(layout):
    """It is that of as many ranks. The ranks may be one cache's, or have a cache each."""
    make, storage = LAYOUTS[layout], StorageConfig(backend="object", head_ranges=RANGES)
    wanted = make(RANGES)
    for ranks in (1, 2, 4):
        for found in (
            object_layout(storage, make(ranks), ranks),
            object_layout(replace(storage, ranks=ranks), make(ranks)),
        ):
            assert found.fingerprint == wanted.fingerprint
            assert (found.pieces, found.block_bytes) == (wanted.pieces, wanted.block_bytes)


@pytest.mark.parametrize(
    ("layout", "storage", "text"),
    [
        (MLALayout(2, BLOCK, 8, 4), {"head_ranges": 2}, "a mla layout are not divided by KV heads"),
        (DSALayout(2, BLOCK), {"head_ranges": 2}, "a dsa layout are not divided by KV heads"),
        (GQALayout(2, 3, 8, BLOCK), {"head_ranges": 2}, r"'key' of layer 0 .* no 2 equal ranges"),
        (GQALayout(2, [4, 2], 8, BLOCK), {"head_ranges": 4}, "'key' of layer 1 .* no 4 equal"),
        (GQALayout(2, 1, 8, BLOCK), {"head_ranges": 8, "ranks": 4}, "no 2 equal ranges"),
        (GQALayout(2, 2, 8, BLOCK), {"head_ranges": 3, "ranks": 2}, "multiple of the number of"),
        (GQALayout(2, 2, 8, BLOCK), {"head_ranges": 2, "ranks": 4}, "multiple of the number of"),
    ],
)
def test_heads_that_cannot_be_divided_are_a_named_error(layout, storage, text):
    with pytest.raises(ConfigError, match=f"storage.head_ranges = .*{text}"):
        object_layout(StorageConfig(backend="object", **storage), layout)


@pytest.mark.parametrize("backend", ["memory", "file", "attention_store", "package.module:Class"])
def test_only_shared_stores_have_ranges(backend):
    with pytest.raises(ConfigError, match=r"storage.head_ranges has no use with storage.backend"):
        Config.from_mapping({"storage": {"backend": backend, "head_ranges": 2}})


async def test_a_layout_that_cannot_be_divided_is_refused_when_a_cache_is_opened(tmp_path):
    table = {"kind": "mla", "num_layers": 1, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    with pytest.raises(ConfigError, match=r"storage.head_ranges = 4: blocks of a mla layout"):
        async with kvactors.open(config(tmp_path, 1, layout=table)):
            pass


# -- whole caches


def config(folder, ranks: int, **tables) -> Config:
    return Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCK},
            "device": {"num_blocks": 16},
            "host": {"transit_slots": 32},
            "layout": {
                "num_layers": 2,
                "num_kv_heads": HEADS,
                "head_dim": 8,
                "tensor_parallel": ranks,
            },
            "storage": {
                "backend": "object",
                "url": f"file://{folder}",
                "write_policy": "write_through",
                "head_ranges": RANGES,
                "timeout_s": 20.0,
            },
            "ranks": {"count": ranks, "endpoint": "memory://ranges" if ranks > 1 else ""},
            **tables,
        }
    )


@asynccontextmanager
async def opened(folder, ranks: int):
    """A cache, and the devices of its ranks."""
    settings = config(folder, ranks)
    layout = make_layout(settings.layout, BLOCK)
    devices = [HostDevice(layout, 16) for _ in range(ranks)]
    if ranks == 1:
        async with kvactors.open(settings, device=devices[0]) as cache:
            yield cache, devices
        return
    serving = [
        asyncio.create_task(
            serve_rank("memory://ranges", one, rank=rank, ranks=ranks, config=settings)
        )
        for rank, one in enumerate(devices)
    ]
    try:
        async with kvactors.open(settings) as cache:
            yield cache, devices
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def request(folder, ranks: int, *, write: bool):
    """Serve one prompt in a new cache. Returns the block hashes and the blocks from storage."""
    whole = make_layout(config(folder, 1).layout, BLOCK)
    async with opened(folder, ranks) as (cache, devices):
        lease = await cache.acquire("r", [*range(3 * BLOCK), 1])
        await lease.wait_ready()
        for i, block in enumerate(lease.block_table[:3]):
            for rank, one in enumerate(devices):
                wanted, at = share(whole, body(whole, i), rank, ranks), 0
                for piece in one.layout.pieces:
                    region = one.region(piece.layer, piece.role)
                    data, at = wanted[at : at + piece.nbytes], at + piece.nbytes
                    if write:
                        region[block] = np.frombuffer(data, np.uint8)
                    assert region[block].tobytes() == data
        found = lease.hashes(0, 3), lease.hits.storage
        await lease.commit(3 * BLOCK + 1)
        await lease.finish()
        await cache.wait_idle()
    return found


@pytest.mark.parametrize("writers", [2, 1])
async def test_a_cache_finds_the_blocks_of_one_with_another_number_of_ranks(tmp_path, writers):
    hashes, _ = await request(tmp_path, writers, write=True)
    for ranks in (1, 2, 4):
        assert await request(tmp_path, ranks, write=False) == (hashes, 3)


async def test_a_rank_with_other_ranges_than_the_leader_is_refused(tmp_path):
    settings = config(tmp_path, 2)
    other = replace(settings, storage=replace(settings.storage, head_ranges=8))
    device = HostDevice(make_layout(settings.layout, BLOCK), 16)
    rank = asyncio.create_task(serve_rank("memory://ranges", device, rank=0, ranks=2, config=other))

    async def lead() -> None:
        async with kvactors.open(settings):
            raise AssertionError("the leader admits the rank")

    leader = asyncio.create_task(lead())
    with pytest.raises(RankError, match=r"rank 0 has layout or storage.head_ranges"):
        await rank
    leader.cancel()
    await asyncio.gather(leader, return_exceptions=True)
