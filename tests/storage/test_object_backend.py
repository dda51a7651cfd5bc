"""Object stores and shared folders: the contract, nodes that share one, and what can go wrong. The
S3 server is a real one, in its own process."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import anyio
import msgspec
import pytest
from obstore.exceptions import GenericError

import kvactors
from kvactors.cli import main
from kvactors.device.arena import Arena
from kvactors.errors import ConfigError, StoreError, StoreUnavailable, StoreUnsupported
from kvactors.identity import StoreIdentity
from kvactors.settings import Config, StorageConfig
from kvactors.storage import attempts, inspect_objects
from kvactors.storage import object as object_module
from kvactors.storage.factory import make_backend
from kvactors.storage.messages import Outcome
from kvactors.storage.object import Listed, ObjectBackend, open_store, prefix_of
from kvactors.testing.store_contract import Bench, StoreContract, key, never
from kvactors.tier_cache.settings import checked_config
from tests.support import cache as support
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


async def test_a_deletion_by_one_node_is_a_hit_or_a_miss_for_the_other(shared):
    async with Node(shared, io_depth=4) as one, Node(shared, io_depth=4) as other:
        numbers = range(60)
        await one.put(*numbers)
        reading = asyncio.create_task(other.get(*numbers))
        await one.store.remove([key(n) for n in numbers])
        assert set(await reading) <= {Outcome.OK, Outcome.MISS}
        assert await other.get(*numbers) == [Outcome.MISS] * 60


async def test_a_clear_leaves_the_objects_of_other_identities(shared):
    async with Node(shared) as one, Node(shared, IDENTITY._replace(fingerprint=bytes(32))) as other:
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


async def test_an_object_of_another_size_is_found_for_a_read_and_is_written_again(shared):
    """The read counts it as corrupt, and removes it."""
    async with Node(shared) as one:
        await one.set_raw(1, b"torn")
        assert await one.found(1) == 1
        assert await one.put(1) == [Outcome.OK]
        assert await one.get(1) == [Outcome.OK]


async def test_an_object_of_another_size_is_not_fetched(shared):
    async with Node(shared) as one:
        await one.set_raw(1, bytes(3 * SIZE))
        client = one.store.store

        class Unread:
            async def get_async(self, name):
                found = await client.get_async(name)
                return SimpleNamespace(meta=found.meta)

            def __getattr__(self, name):
                return getattr(client, name)

        one.store.store = Unread()
        assert await one.get(1) == [Outcome.CORRUPT]


async def test_a_clear_deletes_every_page(shared, monkeypatch):
    monkeypatch.setattr(object_module, "PAGE_OBJECTS", 5)
    async with Node(shared) as one:
        await one.put(*range(18))
        await one.store.clear()
        assert await one.get(*range(18)) == [Outcome.MISS] * 18


async def test_two_clears_at_once_leave_nothing(tmp_path):
    async with Node(in_folder(tmp_path)) as one, Node(in_folder(tmp_path)) as other:
        await one.put(*range(60))
        await asyncio.gather(one.store.clear(), other.store.clear())
        assert await one.get(*range(60)) == [Outcome.MISS] * 60


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


async def test_requests_at_once_are_bounded(tmp_path):
    async with Node(in_folder(tmp_path, io_depth=3, io_write_depth=2)) as one:
        client = one.store.store = Counting(one.store.store)
        await one.put(*range(20))
        assert client.most == 2
        assert await one.found(*range(20)) == 20
        await one.get(*range(20))
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
    async with Node(failing, timeout_s=20.0) as one:
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
        async with Node(server.storage(timeout_s=20.0)) as one:
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
    ids=["missing-bucket", "no-server"],
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


async def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(StoreError, match=r"pip install '/path/to/kvactors\[object\]'"):
        async with Node(in_folder(tmp_path)):
            pass


async def test_a_folder_that_is_missing_is_not_made(tmp_path):
    with pytest.raises(StoreError, match="Mount the folder, or create it"):
        async with Node(in_folder(tmp_path / "mount")):
            pass
    assert not (tmp_path / "mount").exists()


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://b/p", "S3Store"),
        ("gs://b/p", "GCSStore"),
        ("az://c/p", "AzureStore"),
        ("abfss://c@account.dfs.core.windows.net/p", "AzureStore"),
    ],
)
def test_each_provider_takes_the_settings(url, kind, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    store = open_store(StorageConfig(backend="object", url=url, timeout_s=3.0))
    assert (type(store).__name__, store.prefix) == (kind, "p")
    assert store.client_options["timeout"] == "1s 500ms"
    assert store.retry_config["max_retries"] == 3


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
        ({"url": "file://mnt/shared"}, "storage.url must be s3://"),
        ({"url": "file:///mnt/a#b"}, "with no password, query or"),
        ({"url": "s3://b/p?secret=x"}, "with no password, query or"),
        ({"url": "s3://b/../p"}, "with no password, query or"),
        ({"url": "s3://b", "endpoint": "http://user:word@h"}, "without password, not 'h'"),
        ({"url": "s3://b", "endpoint": "http://[::1"}, "storage.endpoint must be http"),
        ({"url": "s3://b", "endpoint": "http://h:99999"}, "storage.endpoint must be http"),
        ({"url": "file:///mnt", "region": "x"}, "storage.region have no use with file:///mnt"),
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


@pytest.mark.parametrize(
    "text",
    [
        "Unable to copy data to file: No space left (os error 28)",
        "403 Forbidden: <?xml version='1.0'?><Error><Code>QuotaExceeded</Code></Error>",
    ],
)
async def test_a_full_folder_or_bucket_is_no_space(tmp_path, text):
    async with Node(in_folder(tmp_path)) as one:

        class Full:
            def __getattr__(self, name):
                return getattr(client, name)

            async def put_async(self, *arguments, **more):
                raise GenericError(text)

        client, one.store.store = one.store.store, Full()
        assert await one.put(1) == [Outcome.NO_SPACE]


async def test_a_file_that_hangs_costs_its_time_out_and_the_others_nothing(tmp_path):
    """A FIFO without a writer stands for a file on a mount that does not answer."""
    async with Node(in_folder(tmp_path, timeout_s=2.0)) as one:
        await one.put(1, 2)
        path = tmp_path / one.name(1)
        path.unlink()
        os.mkfifo(path)
        assert await one.get(1, 2) == [Outcome.UNAVAILABLE, Outcome.OK]
        assert "no answer within 1.8 s" in one.store.trouble()
        with path.open("wb"):  # ends the call of the library
            pass


# -- whole caches


def config(storage, **more):
    return Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": 16},
            "device": {"num_blocks": 32},
            "host": {"slots": 16},
            "layout": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32},
            "storage": {"write_policy": "write_through", "timeout_s": 20.0, **storage, **more},
            "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
        }
    )


async def request(cache, seed: int) -> int:
    return (await support.serve(cache, f"r{seed}", [seed] * 129)).hits.storage


async def test_two_caches_share_a_store_and_a_third_finds_it_later(shared):
    async with kvactors.open(config(shared)) as one, kvactors.open(config(shared)) as other:
        for seed in range(6):
            assert await request(one, seed) == 0
        await one.wait_idle()
        assert [await request(other, seed) for seed in range(6)] == [8] * 6
        await other.wait_flushed()
        for cache in (one, other):
            assert cache.count_divergent_blocks() == 0
            assert cache.check() == []
    async with kvactors.open(config(shared)) as third:
        assert [await request(third, seed) for seed in range(6)] == [8] * 6
        assert third.statistics().store.corrupt == 0
        with pytest.raises(StoreUnsupported, match="nothing was cleared"):
            await third.clear(salt="tenant", storage=True)
        await third.clear(storage=True)
        assert await request(third, 1) == 0


async def test_a_server_that_is_gone_shows_in_health_and_comes_back_alone(monkeypatch):
    monkeypatch.setattr(attempts, "PAUSE_S", 0.2)
    with s3_server() as server:
        async with kvactors.open(config(server.storage(), timeout_s=20.0)) as cache:
            assert await request(cache, 0) == 0
            await cache.wait_idle()
            assert cache.health().status == "ok"
            server.kill()
            for seed in range(1, 30):
                assert await request(cache, seed) == 0
                await cache.wait_idle()
                if cache.health().status != "ok":
                    break
            assert "error sending request" in str(cache.health().reasons)
            server.start()
            with anyio.fail_after(60):
                for seed in itertools.count(100):
                    await request(cache, seed)
                    await cache.wait_idle()
                    if (
                        cache.health().status == "ok"
                        and cache.statistics().store.breaker == "closed"
                    ):
                        break
            await cache.clear()
            assert await request(cache, seed) == 8


def test_objects_cannot_be_counted_to_a_tenant():
    with pytest.raises(ConfigError, match=r"quota.storage needs a store whose space this process"):
        Config.from_mapping(
            {
                "cache": {"model": "m"},
                "storage": {"backend": "object", "url": "s3://b"},
                "quota": {"storage": 5},
            }
        )


# -- the command


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["store", *(str(one) for one in arguments)])
    return int(ended.value.code or 0)


def point_to(server, monkeypatch) -> None:
    """The library's own variables, as the command needs them."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


async def filled(shared, identity, *numbers):
    async with Node(shared, identity) as one:
        await one.put(*numbers)


def kept(url, tmp_path, *arguments) -> list[tuple[str, int]]:
    """Namespaces and objects after a prune."""
    assert run("prune", url, *arguments) == 0
    out = tmp_path / "found.json"
    if run("list", url, "--json", out):
        return []
    return [(one["namespace"], one["objects"]) for one in msgspec.json.decode(out.read_bytes())]


def test_the_stores_of_a_url_are_listed_and_the_oldest_objects_removed(
    shared, server, monkeypatch, tmp_path, capsys
):
    point_to(server, monkeypatch)
    other = IDENTITY._replace(namespace="b", rank=1, ranks=2)
    asyncio.run(filled(shared, IDENTITY, 1, 2, 3))
    asyncio.run(filled(shared, other, 1))
    url, whole = shared["url"], SIZE + 96
    assert run("list", url) == 0
    said = capsys.readouterr().out
    assert "namespace 'weights 2%', rank 0 of 1" in said
    assert f"identity {IDENTITY.digest.hex()[:16]}, blocks of {SIZE:,} bytes" in said
    assert f"3 objects, {3 * whole:,} bytes\n" in said
    assert "namespace 'b', rank 1 of 2" in said
    everything = [("b", 1), ("weights 2%", 3)]
    assert sorted(kept(url, tmp_path, "--max-bytes", 4 * whole)) == everything
    nothing = ("--max-bytes", 0, "--dry-run")
    assert sorted(kept(url, tmp_path, *nothing)) == everything
    assert f"{4 * whole:,} bytes would be freed" in capsys.readouterr().out
    assert kept(url, tmp_path, "--max-bytes", 0, "--namespace", "b") == [("weights 2%", 3)]
    assert kept(url, tmp_path, "--max-bytes", whole) == []


def test_the_oldest_objects_of_a_folder_go_first(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    asyncio.run(filled(in_folder(folder), IDENTITY, 1, 2, 3))
    ages = {1: 500, 2: 9000, 3: 200}
    root = folder / prefix_of(IDENTITY)
    for number, minutes in ages.items():
        then = time.time() - 60 * minutes
        os.utime(root / key(number).hex()[:3] / key(number).hex(), (then, then))
    name = key(3).hex()
    young, old = (root / name[:3] / f"{name}#{number}" for number in (1, 2))
    others = [root / name[:3] / "#notes#", root / "notes#2", folder / "x#1"]
    for file in (young, old, *others):
        file.touch()
    for file in (old, *others):
        os.utime(file, (then, then))
    whole = SIZE + 96
    assert kept(f"file://{folder}", tmp_path, "--max-bytes", 2 * whole) == [("weights 2%", 2)]
    assert (young.exists(), old.exists()) == (True, False)
    assert all(file.exists() for file in others)

    async def left():
        async with Node(in_folder(folder)) as one:
            return await one.get(1, 2, 3)

    assert asyncio.run(left()) == [Outcome.OK, Outcome.MISS, Outcome.OK]


def test_files_that_are_no_objects_are_neither_counted_nor_removed(tmp_path):
    """Also not those outside the folder, to which a symbolic link leads. None stops a listing."""
    folder, outside = tmp_path / "shared", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    asyncio.run(filled(in_folder(folder), IDENTITY, 1))
    root = folder / prefix_of(IDENTITY)
    others = [outside / "passwd", root / "notes", root / "000" / "notes"]
    for file in others:
        file.write_text("x")
    for link in (root / "link", root / "000" / "link"):
        link.symlink_to(outside)
    for link in ("self", "00f"):
        (root / link).symlink_to(link)
    (root / "000" / "above").symlink_to(root)
    (root / "000" / ("0" * 64)).mkdir()
    os.mkfifo(root / "000" / "fifo")
    for name in (b"\xff", b"a\nb"):
        others.append(Path(os.fsdecode(bytes(root) + b"/" + name)))
        others[-1].touch()

    async def cleared():
        async with Node(in_folder(folder)) as one:
            await one.store.clear()
            assert await one.get(1) == [Outcome.MISS]
            await one.put(1)

    asyncio.run(cleared())
    assert all(file.exists() for file in others)
    url = f"file://{folder}"
    assert kept(url, tmp_path, "--max-bytes", SIZE + 96) == [("weights 2%", 1)]
    assert kept(url, tmp_path, "--max-bytes", 0) == []
    assert all(file.exists() for file in others)


def unreadable(monkeypatch, name):
    """Refuse to list the folders of this name."""
    real = Path.iterdir

    def listed(path):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", listed)


def test_a_folder_that_cannot_be_read_is_named_if_it_may_have_objects(
    tmp_path, monkeypatch, capsys
):
    asyncio.run(filled(in_folder(tmp_path), IDENTITY, 1))
    (tmp_path / "kvactors" / "private").mkdir()
    unreadable(monkeypatch, "private")
    assert run("list", f"file://{tmp_path}") == 0
    for name in ("kvactors", key(1).hex()[:3]):
        unreadable(monkeypatch, name)
        assert run("list", f"file://{tmp_path}") != 0
        assert "cannot be listed: [Errno 13] Permission denied" in capsys.readouterr().err
        monkeypatch.undo()
    unreadable(monkeypatch, name)

    async def cleared():
        async with Node(in_folder(tmp_path)) as one:
            await one.store.clear()

    with pytest.raises(StoreError, match=r"was not cleared: .* Permission denied"):
        asyncio.run(cleared())


def test_a_temporary_file_that_is_renamed_during_a_prune_is_passed_over(tmp_path, monkeypatch):
    renamed = Listed(f"{prefix_of(IDENTITY)}/000/{'0' * 64}#1", 1, 0.0)
    monkeypatch.setattr(inspect_objects, "files_below", lambda *_: [renamed])
    inspect_objects.remove_left_over(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("list", "file:///nonexistent-folder"), "Mount the folder"),
        (("list", "ftp://x"), "storage.url must be"),
        (("verify", "s3://b/p"), "verified when a cache reads them"),
        (("prune", "s3://b/p"), "--max-bytes is for a URL, and is needed"),
        (("prune", "/some/directory", "--max-bytes", "1GB"), "--max-bytes is for a URL"),
    ],
)
def test_what_a_command_cannot_do_is_said(arguments, complaint, capsys):
    assert run(*arguments) != 0
    assert complaint in capsys.readouterr().err


def test_a_url_without_objects_is_an_error(tmp_path, capsys):
    assert run("list", f"file://{tmp_path}") != 0
    assert "no objects of kvactors here" in capsys.readouterr().err


def test_the_exit_waits_for_threads_that_the_library_has_in_python():
    begun, left = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.2)
        left.set()

    start_new_thread(work, ())
    assert begun.wait(60)
    object_module.threads_have_left()
    assert left.is_set()
