"""Object stores and shared folders: the contract, nodes that share one, and what can go wrong. The
S3 server is a real one, in its own process."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import signal
from typing import Self

import pytest

from kvactors.device.arena import Arena
from kvactors.errors import ConfigError, StoreError, StoreUnavailable
from kvactors.identity import StoreIdentity
from kvactors.settings import Config, StorageConfig
from kvactors.storage.factory import make_backend
from kvactors.storage.messages import Outcome
from kvactors.storage.object import ObjectBackend, prefix_of
from kvactors.testing.store_contract import Bench, StoreContract, key, never
from kvactors.tier_cache.settings import checked_config
from tests.support.s3 import CREDENTIALS, s3_server

pytestmark = pytest.mark.full

SIZE = 40_000
IDENTITY = StoreIdentity("m/1", "weights 2%", bytes(range(32)))
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server():
    with s3_server() as one:
        yield one


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def in_folder(folder, **more):
    return {"backend": "object", "url": f"file://{folder}", **more}


class OfObjects(StoreContract):
    evicts = False

    async def make(self, folder, capacity):
        folder.mkdir(exist_ok=True)
        storage = StorageConfig(**self.storage(folder))
        return ObjectBackend(storage, prefix_of(IDENTITY), self.block_bytes)


class TestInABucket(OfObjects):
    @pytest.fixture(autouse=True)
    def _at(self, server):
        self.server = server

    def storage(self, folder):
        return self.server.storage(str(folder).lstrip("/"), timeout_s=30.0)


class TestInAFolder(OfObjects):
    storage = staticmethod(in_folder)


# -- nodes that share a store


class Node(Bench):
    """A back end and its arena."""

    def __init__(self, storage, identity=IDENTITY, **changes) -> None:
        config = StorageConfig(**{"timeout_s": 20.0, **storage, **changes})
        super().__init__(ObjectBackend(config, prefix_of(identity), SIZE), Arena(64, SIZE))

    async def __aenter__(self) -> Self:
        try:
            await self.store.open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error) -> None:
        await self.store.close()
        self.arena.close()

    def name(self, number: int) -> str:
        return self.store.name(key(number))

    async def raw(self, number: int) -> bytes:
        return bytes(await (await self.store.store.get_async(self.name(number))).bytes_async())

    async def set_raw(self, number: int, data: bytes) -> None:
        await self.store.store.put_async(self.name(number), data)


@pytest.fixture(params=["bucket", "folder"])
def shared(request, tmp_path):
    """The settings of a new store."""
    if request.param == "folder":
        return in_folder(tmp_path)
    return request.getfixturevalue("server").storage(f"{tmp_path.name}/{next(NUMBERS)}")


async def test_blocks_written_by_one_node_are_loaded_by_the_other(shared):
    async with Node(shared) as one, Node(shared) as other:
        numbers = range(40)
        assert await one.put(*numbers) == [Outcome.OK] * 40
        assert await other.put(*numbers) == [Outcome.EXISTS] * 40
        assert await other.store.ask([key(n) for n in numbers], never) == 40
        assert await other.get(3, 999, 30) == [Outcome.OK, Outcome.MISS, Outcome.OK]
        assert await other.store.ask([key(5), key(999), key(6)], never) == 1
        found = await other.store.exists_many([key(5), key(999), key(6)], never)
        assert found == [True, False, True]
        await one.store.remove([key(5), key(999)])
        assert await other.get(5) == [Outcome.MISS]
        await one.store.clear()
        assert await other.get(*numbers) == [Outcome.MISS] * 40
        assert one.store.keys() == []
        assert not one.store.is_complete


async def test_a_clear_leaves_the_objects_of_other_identities(shared):
    async with Node(shared) as one, Node(shared, IDENTITY._replace(ranks=2)) as other:
        await one.put(1)
        assert await other.get(1) == [Outcome.MISS]
        await other.put(1)
        await one.store.clear()
        assert await one.get(1) == [Outcome.MISS]
        assert await other.get(1) == [Outcome.OK]


async def test_a_bad_object_is_corrupt_and_goes(shared):
    """Changed bytes, other sizes, an object of another key, and one of another identity."""
    async with Node(shared) as one, Node(shared, IDENTITY._replace(model="other")) as other:
        await one.put(1, 2)
        await other.put(1)
        good = await one.raw(1)
        assert len(good) == SIZE + 96
        for bad in (
            bytes([good[0] ^ 1]) + good[1:],
            good[:-1] + bytes([good[-1] ^ 1]),
            good[: SIZE // 2],
            b"",
            good + b"x",
            await one.raw(2),
            await other.raw(1),
        ):
            await one.set_raw(1, bad)
            assert await one.get(1) == [Outcome.CORRUPT]
            assert await one.get(1) == [Outcome.MISS]
            assert await one.put(1) == [Outcome.OK]
        assert await one.get(1, 2) == [Outcome.OK] * 2


async def test_an_object_of_another_size_is_not_found_and_is_written_again(shared):
    async with Node(shared) as one:
        await one.set_raw(1, b"torn")
        assert await one.found(1) == 0
        assert await one.put(1) == [Outcome.OK]
        assert await one.get(1) == [Outcome.OK]


class Counting:
    """A client of a store that counts the requests at once, and in all."""

    def __init__(self, inner) -> None:
        self.inner, self.now, self.most, self.all = inner, 0, 0, 0

    def __getattr__(self, name):
        async def call(*arguments, **more):
            self.now, self.all = self.now + 1, self.all + 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.001)
            try:
                return await getattr(self.inner, name)(*arguments, **more)
            finally:
                self.now -= 1

        return call


async def test_requests_at_once_are_bounded_over_all_batches(tmp_path):
    async with Node(in_folder(tmp_path, io_depth=3, io_write_depth=2)) as one:
        client = one.store.store = Counting(one.store.store)
        batches = [range(20), range(20, 40)]
        views = [one.filled(some, some[0]) for some in batches]
        await asyncio.gather(
            *(
                one.store.write([key(n) for n in some], view, never)
                for some, view in zip(batches, views, strict=True)
            )
        )
        assert client.most == 2
        await asyncio.gather(one.get(*range(20)), one.found(*range(40)))
        assert client.most == 3


async def test_a_path_that_is_not_there_costs_one_request(tmp_path):
    async with Node(in_folder(tmp_path)) as one:
        client = one.store.store = Counting(one.store.store)
        assert await one.found(*range(40)) == 0
        assert client.all == 1


async def test_keys_are_spread_over_folders_and_no_temporary_file_stays(tmp_path):
    async with Node(in_folder(tmp_path)) as one:
        spread = [hashlib.sha256(bytes([n])).digest() for n in range(20)]
        await one.store.write(spread, one.filled(range(20)), never)
    root = tmp_path / prefix_of(IDENTITY)
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    names = [f"{one.hex()[:3]}/{one.hex()}" for one in spread]
    assert files == sorted(names)


# -- a server that fails


@pytest.fixture
def failing(server):
    """The settings of a new store, whose server fails as the test sets it to."""
    yield server.storage(f"failing/{next(NUMBERS)}", timeout_s=5.0)
    server.fault("none")


@pytest.mark.parametrize("kind", ["503", "403"])
async def test_a_server_that_refuses_is_unavailable_until_it_does_not(server, failing, kind):
    async with Node(failing) as one:
        await one.put(1)
        server.fault(kind)
        assert await one.get(1, 2) == [Outcome.UNAVAILABLE] * 2
        assert await one.put(3) == [Outcome.UNAVAILABLE]
        with pytest.raises(StoreUnavailable, match=r"403|503"):
            await one.store.ask([key(1)], never)
        with pytest.raises(StoreError, match="was not cleared"):
            await one.store.clear()
        await one.store.remove([key(1)])
        assert key(1).hex() not in one.store.trouble()
        server.fault("none")
        assert await one.get(1, 3) == [Outcome.OK, Outcome.MISS]
        assert await one.put(3) == [Outcome.OK]


async def test_a_request_that_is_refused_once_is_tried_again(server, failing):
    async with Node(failing) as one:
        server.fault("once")
        assert await one.put(1) == [Outcome.OK]
        server.fault("once")
        assert await one.get(1) == [Outcome.OK]


async def test_bytes_that_change_on_the_way_are_corrupt(server, failing):
    async with Node(failing) as one:
        await one.put(1, 2)
        server.fault("flip")
        assert await one.get(1, 2) == [Outcome.CORRUPT] * 2


async def test_a_slow_server_costs_its_deadline_and_no_more(server, failing):
    """Requests that have not ended are UNAVAILABLE, and those that have not begun are LATE."""
    async with Node(failing, timeout_s=3.0, io_depth=1) as one:
        await one.put(*range(8))
        server.fault("slow")
        outcomes = await one.get(*range(8))
        assert outcomes[-4:] == [Outcome.LATE] * 4
        assert outcomes.count(Outcome.UNAVAILABLE) >= 1
        assert "no answer" in one.store.trouble()


async def test_a_clear_waits_for_a_write_that_was_given_up(server, failing):
    async with Node(failing, timeout_s=3.0) as one:
        server.fault("late")
        writing = asyncio.create_task(one.put(1))
        await asyncio.sleep(0.5)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await one.store.clear()
        server.fault("none")
        await asyncio.sleep(2.0)
        assert await one.get(1) == [Outcome.MISS]


async def test_a_server_that_hangs_costs_its_time_out_and_closing_does_not_wait(server, failing):
    async with Node(failing, timeout_s=2.0) as one:
        await one.put(1)
        server.signal(signal.SIGSTOP)
        try:
            assert await one.get(1) == [Outcome.UNAVAILABLE]
            assert await one.put(2) == [Outcome.UNAVAILABLE]
            await one.store.close()
        finally:
            server.signal(signal.SIGCONT)


async def test_a_server_that_is_killed_and_started_again_serves_again():
    with s3_server() as server:
        async with Node(server.storage(timeout_s=3.0)) as one:
            assert await one.put(1) == [Outcome.OK]
            server.kill()
            assert await one.get(1) == [Outcome.UNAVAILABLE]
            assert await one.put(2) == [Outcome.UNAVAILABLE]
            with pytest.raises(StoreUnavailable):
                await one.store.ask([key(1)], never)
            server.start()
            assert await one.get(1) == [Outcome.MISS], "its objects ended with it"
            assert await one.put(1) == [Outcome.OK]
            assert await one.get(1) == [Outcome.OK]


async def test_a_bucket_that_goes_is_missed_by_reads_and_named_by_writes(server):
    storage = {**server.storage(), "url": f"s3://going-{next(NUMBERS)}/p"}
    bucket = storage["url"].split("/")[2]
    server.request(bucket, "PUT")
    async with Node(storage) as one:
        await one.put(1)
        await one.store.clear()
        server.request(bucket, "DELETE")
        assert await one.get(1) == [Outcome.MISS]
        assert await one.put(1) == [Outcome.UNAVAILABLE]
        assert "404" in one.store.trouble()


# -- stores that cannot be opened, and settings


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"url": "s3://no-such-bucket/p"}, "no-such-bucket"),
        ({"endpoint": "http://127.0.0.1:1"}, "127.0.0.1:1"),
    ],
    ids=["missing bucket", "no server"],
)
async def test_a_store_that_cannot_be_used_is_found_at_the_start(server, change, complaint):
    with pytest.raises(StoreError, match=complaint):
        async with Node({**server.storage(timeout_s=3.0), **change}):
            pass


async def test_credentials_that_are_missing_are_found_at_the_start(server, monkeypatch):
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match="cannot be used"):
        async with Node(server.storage(timeout_s=3.0)):
            pass


async def test_a_folder_that_is_missing_is_not_made(tmp_path):
    with pytest.raises(StoreError, match="Mount the folder, or create it"):
        async with Node(in_folder(tmp_path / "mount")):
            pass
    assert not (tmp_path / "mount").exists()


async def test_a_setting_that_the_store_does_not_have_is_named():
    with pytest.raises(ConfigError, match=r"storage.url 'gs://b/p': .*endpoint"):
        async with Node({"backend": "object", "url": "gs://b/p", "endpoint": "http://h"}):
            pass


@pytest.mark.parametrize(
    ("storage", "complaint"),
    [
        ({}, "storage.url must be s3://"),
        ({"url": "/mnt/shared"}, "storage.url must be s3://"),
        ({"url": "http://host/bucket"}, "storage.url must be s3://"),
        ({"url": "s3://"}, "storage.url must be s3://"),
        ({"url": "s3://["}, "storage.url must be s3://"),
        ({"url": "s3://key:secret@bucket/p"}, "no password"),
        ({"url": "file://mnt/shared"}, "three slashes"),
        ({"url": "file:///mnt", "region": "x"}, "no storage.endpoint or storage.region"),
        ({"url": "s3://b", "endpoint": "minio:9000"}, "storage.endpoint must be http"),
        ({"url": "s3://b", "capacity_bytes": "1GB"}, "capacity_bytes has no use"),
        ({"url": "s3://b", "directory": "/x"}, "storage.directory has no use"),
    ],
)
def test_a_setting_that_cannot_be_is_named(storage, complaint):
    table = {"backend": "object", **storage}
    with pytest.raises(ConfigError, match=complaint):
        Config.from_mapping({"cache": {"model": "m"}, "storage": table})
    if "has no use" not in complaint:
        with pytest.raises(ConfigError, match=complaint):
            checked_config({"model": "m", "block_bytes": 96, "num_slots": 1, "storage": table})


def test_a_block_does_not_leave_a_shared_store_when_it_is_read():
    storage = StorageConfig(backend="object", url="file:///mnt", exclusive=True)
    with pytest.raises(ConfigError, match="exclusive"):
        make_backend(storage, "m", bytes(32), SIZE)
