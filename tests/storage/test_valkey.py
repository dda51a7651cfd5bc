"""Valkey or Redis as a store, with a real server: processes that share it, and what can go wrong."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
import rich.pretty
import structlog

import kvactors
from kvactors import Config, ConfigError
from kvactors.device.arena import Arena
from kvactors.errors import StoreError, StoreUnavailable
from kvactors.identity import StoreIdentity
from kvactors.settings import StorageConfig
from kvactors.settings.valkey import VARIABLES, ValkeyConfig, with_variables
from kvactors.storage import attempts, valkey
from kvactors.storage.messages import Outcome
from kvactors.storage.valkey import ValkeyBackend
from kvactors.testing.store_contract import Bench, StoreContract, key, never
from tests.storage import valkey_child
from tests.support.cache import serve
from tests.support.valkey import MISSING, PROGRAM, valkey_cluster, valkey_server

pytestmark = [pytest.mark.full, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]

SIZE = 40_000
IDENTITY = StoreIdentity("m", "n", bytes(range(32)))
PASSWORD = "p/w@'d"
ENCODED = "p%2Fw%40'd"
EVICTS = ("--maxmemory-policy", "allkeys-lru", "--notify-keyspace-events", "Eex")


@pytest.fixture(scope="module")
def server():
    with valkey_server() as one:
        yield one


@pytest.fixture
def emptied(server):
    server.client().flushall()
    return server


class Node(Bench):
    """A back end on a server, and its arena."""

    def __init__(self, url, slots=64, identity=IDENTITY, **settings) -> None:
        store = ValkeyBackend(ValkeyConfig(url=url, **settings), identity, SIZE)
        super().__init__(store, Arena(slots, SIZE, trailer=store.slot_trailer_bytes))

    async def __aenter__(self) -> Self:
        try:
            await self.store.open()
        except BaseException:
            await self.store.close()
            raise
        await self.store.attach(self.arena)
        return self

    async def __aexit__(self, *error) -> None:
        await self.store.close()
        assert not self.store.stuck
        self.arena.close()


async def repeated(call, wanted):
    """The result of a call, once it is the wanted one."""
    for _ in range(400):
        if (found := await call()) == wanted:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"{found}, not {wanted}")


# -- the contract


class TestValkey(StoreContract):
    evicts = False
    numbers = itertools.count()

    @pytest.fixture(autouse=True)
    def _at(self, server):
        self.url = server.url

    async def make(self, folder, capacity):
        fingerprint = next(self.numbers).to_bytes(32, "big")
        identity = StoreIdentity("m", "contract", fingerprint)
        return ValkeyBackend(ValkeyConfig(url=self.url), identity, self.block_bytes)


class TestValkeyUnixSocket(TestValkey):
    @pytest.fixture(autouse=True)
    def _at(self, server):
        self.url = f"unix://{server.socket}?db=3"


async def test_nodes_of_one_identity_share_objects_and_others_do_not(emptied):
    stranger = IDENTITY._replace(namespace="other")
    async with (
        Node(emptied.url) as one,
        Node(emptied.url) as other,
        Node(emptied.url, identity=stranger) as third,
    ):
        emptied.client().set(f"{one.store._prefix}of a stranger", "")
        assert await one.put(*range(40)) == [Outcome.OK] * 40
        assert await third.put(3) == [Outcome.OK]
        assert await other.store.ask([key(n) for n in range(40)], never) == 40
        assert await other.get(3, 999, 39) == [Outcome.OK, Outcome.MISS, Outcome.OK]
        asked = [key(n) for n in (5, 999, 6)]
        assert await other.store.ask(asked, never) == 1
        assert await other.store.exists_many(asked, never) == [True, False, True]
        await one.store.clear()
        assert await other.store.ask([key(3)], never) == 0
        assert await third.get(3) == [Outcome.OK]
        assert one.store.keys() == []
        [name] = emptied.client().keys("*")
        assert name.decode() == f"kvactors/{stranger.digest.hex()}/{key(3).hex()}"


async def test_views_outside_of_the_arena_are_moved(emptied):
    async with Node(emptied.url) as one:
        memory = memoryview(bytearray(one.pattern(1) + bytes(SIZE)))
        written = await one.store.write([key(1)], [memory[:SIZE]], never)
        assert bytes(memory[SIZE:]) == bytes(SIZE), "the memory behind a view is not the store's"
        read = await one.store.read([key(1)], [memory[SIZE:]], never)
        assert (written.outcomes, read.outcomes) == (bytes([Outcome.OK]),) * 2
        assert bytes(memory[SIZE:]) == one.pattern(1)


async def test_wrong_bytes_under_a_key_are_corrupt_and_removed(emptied):
    client = emptied.client()
    stranger = IDENTITY._replace(model="other")
    async with Node(emptied.url) as one, Node(emptied.url, identity=stranger) as other:
        await one.put(1, 2)
        await other.put(1)
        name = f"kvactors/{IDENTITY.digest.hex()}/{key(1).hex()}"
        good = client.get(name)
        assert len(good) == SIZE + 96
        bad = [good[:-97] + bytes([good[-97] ^ 1]) + good[-96:], good[:100], good + b"x", b""]
        bad += [client.get(name.replace(key(1).hex(), key(2).hex()))]
        bad += [client.get(name.replace(IDENTITY.digest.hex(), stranger.digest.hex()))]
        for value in bad:
            client.set(name, value)
            report = await one.store.read([key(1)], one.views(1), never)
            assert report == (bytes([Outcome.CORRUPT]), [key(1)])
            assert await one.get(1) == [Outcome.MISS]
        client.rpush(name, good)
        assert await one.get(1, 2) == [Outcome.CORRUPT, Outcome.OK]
        assert await one.get(1) == [Outcome.MISS]


# -- the server's memory, and time


async def test_a_server_that_evicts_takes_every_object_and_the_evicted_keys_are_reported():
    with valkey_server("--maxmemory", "4mb", *EVICTS) as small:
        async with Node(small.url) as one:
            for start in range(0, 200, 50):
                assert await one.put(*range(start, start + 50)) == [Outcome.OK] * 50
            taken = set[bytes]()

            async def missing():
                found = await one.store.exists_many([key(n) for n in range(200)], never)
                taken.update(one.store.take_removed())
                return taken == {key(n) for n in range(200) if not found[n]}

            await repeated(missing, True)
            assert len(taken) > 100
            assert not one.store.removed_outside
            assert one.store.statistics().evicted == len(taken)


async def test_a_server_that_does_not_evict_is_no_space_until_there_is_some():
    with valkey_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as small:
        with structlog.testing.capture_logs() as logs:
            async with Node(small.url) as one:
                outcomes = [*await one.put(*range(60)), *await one.put(*range(60, 120))]
                assert outcomes.count(Outcome.NO_SPACE) > 20
                assert set(outcomes) == {Outcome.OK, Outcome.NO_SPACE}
                assert "OutOfMemoryError" in one.store.trouble()
                assert await one.get(0) == [Outcome.OK]
                await one.store.clear()
                assert await one.put(7) == [Outcome.OK]
        told = [(line["event"], line["log_level"]) for line in logs]
        assert told.count(("valkey server without eviction", "warning")) == 1
        assert told.count(("valkey evictions are noticed as misses only", "info")) == 1


async def gone_from(node):
    """The first keys that the store reports to be gone."""

    async def taken():
        return bool(node.store.removed_outside)

    await repeated(taken, True)
    return node.store.take_removed()


async def test_evictions_of_another_database_are_reported():
    with valkey_server(*EVICTS) as one:
        async with Node(f"{one.url}/3", ttl_s=1) as node, Node(one.url, ttl_s=1) as other:
            one.client().set(f"{other.store._prefix}of a stranger", "", px=1)
            await node.put(1)
            await other.put(2)
            assert await gone_from(node) == [key(1)]
            assert await gone_from(other) == [key(2)]


async def test_evictions_are_reported_after_a_restart_of_the_server(monkeypatch):
    monkeypatch.setattr(valkey, "RETRY_S", 0.05)
    with valkey_server(*EVICTS) as one:
        async with Node(one.url, ttl_s=1) as node:
            one.kill()
            await asyncio.sleep(2 * valkey.POLL_S)
            one.start()
            while not one.client().pubsub_numsub("__keyevent@0__:expired")[0][1]:
                await asyncio.sleep(0.02)
            await node.put(1)
            assert await gone_from(node) == [key(1)]


async def test_objects_expire_and_are_reported(emptied):
    emptied.client().config_set("notify-keyspace-events", "AKE")
    try:
        async with Node(emptied.url, ttl_s=1) as one, Node(emptied.url) as other:
            assert await one.put(1) == [Outcome.OK]
            await other.put(2)
            assert await repeated(lambda: one.get(1), [Outcome.MISS])
            assert await gone_from(one) == [key(1)]
            assert await one.get(2) == [Outcome.OK], "written without a time to live"
    finally:
        emptied.client().config_set("notify-keyspace-events", "")


# -- access


async def test_wrong_credentials_are_named_and_never_shown():
    with valkey_server("--requirepass", PASSWORD) as locked:
        at = f"127.0.0.1:{locked.port}"
        for url, reason in (
            (locked.url, "AuthenticationError: .*required"),
            (f"valkey://:wrong-one@{at}", "AuthenticationError: .*invalid username"),
            (f"valkey://me:wrong-one@{at}", "AuthenticationError: .*invalid username"),
        ):
            with pytest.raises(StoreError, match=reason) as raised:
                async with Node(url):
                    pass
            assert "wrong-one" not in f"{raised.value} {raised.value.__cause__}"
        right = with_variables(ValkeyConfig(url=locked.url), {VARIABLES[2]: PASSWORD})
        with structlog.testing.capture_logs() as logs:
            async with Node(right.url) as one:
                assert await one.put(1) == [Outcome.OK]
            async with Node(f"valkey://default:{ENCODED}@{at}") as one:
                assert await one.get(1) == [Outcome.OK]
        shown = f"{logs} {right} {StorageConfig(valkey=right)} {rich.pretty.pretty_repr(right)}"
        assert ENCODED not in shown
        assert PASSWORD not in shown
        assert f"'{locked.url}'" in shown


async def test_a_user_who_may_not_write_is_unavailable_with_the_reason():
    with valkey_server() as one:
        rules = ("on", ">secret", "~kvactors/*", "+get", "+exists", "+info", "+scan")
        one.client().execute_command("ACL", "SETUSER", "reader", *rules)
        async with Node(f"valkey://reader:secret@127.0.0.1:{one.port}") as node:
            assert await node.put(1) == [Outcome.UNAVAILABLE]
            assert "NoPermissionError" in node.store.trouble()
            assert await node.get(1) == [Outcome.MISS]
            one.client().set(f"{node.store._prefix}{key(1).hex()}", "")
            with pytest.raises(StoreUnavailable, match="NoPermissionError"):
                await node.store.clear()


def with_least_rights(server):
    """Add the user of the page for operators to a server."""
    page = (Path(kvactors.__file__).parents[1] / "docs" / "how-to" / "valkey.md").read_text()
    [rules] = re.findall("^ACL SETUSER .*", page, re.MULTILINE)
    server.client().execute_command(*rules.split())


async def test_the_rights_that_the_page_gives_are_enough():
    with valkey_server(*EVICTS) as one:
        with_least_rights(one)
        async with Node(f"valkey://kvactors:SECRET@127.0.0.1:{one.port}/1", ttl_s=1) as node:
            assert await node.put(1) == [Outcome.OK]
            assert await gone_from(node) == [key(1)]
            assert await node.put(3) == [Outcome.OK]
            assert await node.found(1) == 0
            await node.store.remove([key(3)])
            assert await node.get(3) == [Outcome.MISS]
            await node.store.clear()
            assert node.store.trouble() == ""


async def test_a_user_who_may_not_ask_gets_the_reason():
    with valkey_server() as one:
        one.client().execute_command("ACL", "SETUSER", "writer", "on", ">secret", "~*", "+info")
        async with Node(f"valkey://writer:secret@127.0.0.1:{one.port}") as node:
            for look_up in (node.store.ask, node.store.exists_many):
                with pytest.raises(StoreUnavailable, match="NoPermissionError"):
                    await look_up([key(1)], never)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    made = ("-keyout", str(folder / "key"), "-out", str(folder / "cert"), "-subj", "/CN=localhost")
    name = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    subprocess.run([*command, *made, *name], check=True, capture_output=True)
    return folder / "cert", folder / "key"


@contextmanager
def tls_server(certificate, *, clients: str):
    cert, private = map(str, certificate)
    files = ("--tls-cert-file", cert, "--tls-key-file", private, "--tls-ca-cert-file", cert)
    with valkey_server(*files, "--tls-auth-clients", clients, "--tls-port", "0") as one:
        one.client().config_set("port", 0)
        one.client().config_set("tls-port", one.port)
        yield one


async def test_tls_is_verified(certificate):
    cert, private = certificate
    with tls_server(certificate, clients="yes") as one:
        url = f"valkeys://127.0.0.1:{one.port}?ssl_ca_certs={cert}"
        async with Node(f"{url}&ssl_certfile={cert}&ssl_keyfile={private}") as node:
            assert await node.put(1) == [Outcome.OK]
            assert await node.get(1) == [Outcome.OK]
        for refused in (f"valkeys://127.0.0.1:{one.port}", url, one.url):
            with pytest.raises(StoreError, match=r"cannot be used: valkey\S+ \w+Error"):
                async with Node(refused, timeout_s=1.0):
                    pass


# -- a server that fails


async def test_a_killed_server_is_unavailable_and_a_restarted_one_is_used_again():
    with valkey_server() as one:
        async with Node(one.url) as node:
            assert await node.put(1) == [Outcome.OK]
            one.kill()
            assert await node.get(1, 2) == [Outcome.UNAVAILABLE] * 2
            assert await node.put(1) == [Outcome.UNAVAILABLE]
            with pytest.raises(StoreUnavailable, match="ConnectionError"):
                await node.store.ask([key(1)], never)
            with pytest.raises(StoreUnavailable, match="ConnectionError"):
                await node.store.clear()
            await node.store.remove([key(1)])
            one.start()
            assert await node.put(2) == [Outcome.OK]
            assert await node.get(1, 2) == [Outcome.MISS, Outcome.OK]


async def test_a_server_that_restarts_between_two_calls_is_not_noticed(emptied):
    with valkey_server() as one:
        async with Node(one.url) as node:
            await node.put(1)
            one.kill()
            one.start()
            assert await node.put(2) == [Outcome.OK]


async def test_a_server_that_hangs_costs_its_time_out_and_touches_no_slot_later():
    with valkey_server() as one:
        async with Node(one.url, timeout_s=2.0) as node:
            await node.put(*range(60))
            one.signal(signal.SIGSTOP)
            reading = asyncio.create_task(node.get(*range(30)))
            writing = asyncio.create_task(
                node.store.write([key(100 + n) for n in range(30)], node.views(30, 30), never)
            )
            turns = 0
            while not (reading.done() and writing.done()):
                await asyncio.sleep(0.005)
                turns += 1
            assert turns > 1, "the loop goes on"
            assert await reading == [Outcome.UNAVAILABLE] * 30
            assert (await writing).outcomes == bytes([Outcome.UNAVAILABLE]) * 30
            for view in node.views(60):
                view[:] = b"\xee" * SIZE
            one.signal(signal.SIGCONT)
            await repeated(lambda: node.get(59), [Outcome.OK])
            assert bytes(node.arena.view(50)) == b"\xee" * SIZE
            outcomes = set(await node.get(*range(100, 130)))
            assert outcomes <= {Outcome.MISS, Outcome.CORRUPT, Outcome.OK}


async def test_a_call_that_timed_out_is_not_repeated():
    with valkey_server() as one:
        async with Node(one.url, timeout_s=2.0) as node:
            await node.put(1)
            before = one.client().info()["total_connections_received"]
            one.signal(signal.SIGSTOP)
            assert await node.get(1) == [Outcome.UNAVAILABLE]
            one.signal(signal.SIGCONT)
            assert one.client().info()["total_connections_received"] == before + 1


async def test_a_connection_that_the_server_cuts_is_made_again():
    with valkey_server() as one:
        admin = one.client()
        async with Node(one.url) as node:
            admin.execute_command("CLIENT", "PAUSE", "60000", "WRITE")
            writing = asyncio.create_task(node.put(1))
            while not admin.info()["blocked_clients"]:
                await asyncio.sleep(0.01)
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            admin.execute_command("CLIENT", "UNPAUSE")
            assert await writing == [Outcome.OK]


async def test_no_server_or_no_cluster_is_a_named_error():
    with pytest.raises(StoreError, match=r"used: valkey://127\.0\.0\.1:1: ConnectionError"):
        async with Node("valkey://user:secret-one@127.0.0.1:1"):
            pass
    with (
        valkey_server() as one,
        valkey_server() as two,
        pytest.raises(StoreError, match="no cluster"),
    ):
        async with Node(f"{one.url},127.0.0.1:{two.port}"):
            pass


# -- a cluster


async def test_a_cluster_is_used_by_any_of_its_addresses_and_reports_its_evictions():
    with valkey_cluster(3, "--maxmemory", "4mb", *EVICTS) as nodes:
        for node in nodes:
            with_least_rights(node)
        hosts = f"127.0.0.1:1,127.0.0.1:{nodes[1].port}"
        with pytest.raises(StoreError, match="SELECT"):
            async with Node(f"valkey://{hosts}/1"):
                pass
        async with Node(f"valkey://kvactors:SECRET@{hosts}") as one:
            assert await one.put(*range(30)) == [Outcome.OK] * 30
            assert await one.get(*range(30), 99) == [Outcome.OK] * 30 + [Outcome.MISS]
            assert min(node.client().dbsize() for node in nodes) > 0
            await one.store.clear()
            assert sum(node.client().dbsize() for node in nodes) == 0
            for start in range(0, 600, 60):
                assert await one.put(*range(start, start + 60)) == [Outcome.OK] * 60
            taken = set[bytes]()

            async def missing():
                found = await one.store.exists_many([key(n) for n in range(600)], never)
                taken.update(one.store.take_removed())
                return taken == {key(n) for n in range(600) if not found[n]}

            await repeated(missing, True)
            nodes[0].kill()
            assert Outcome.UNAVAILABLE in await one.get(*range(540, 600))
            for node in nodes[1:]:
                node.kill()
            assert await one.get(1) == [Outcome.UNAVAILABLE]
            assert await one.put(1) == [Outcome.UNAVAILABLE]
            with pytest.raises(StoreUnavailable):
                await one.store.ask([key(1)], never)


# -- settings


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://h:1",
        "valkey://",
        "valkey://h:x",
        "valkey://h:1,",
        "unix://",
        "valkey://u:QQ?ss@h:1",
        "valkey://u:QQ#ss@h:1",
        "valkey://u:QQ/ss@h:1",
        "valkey://h:1/x",
        "valkey://h:1?decode_responses=yes",
        "valkeys://h:1?ssl_check_hostname=no",
        "valkey://h:1?ssl_ca_certs=/x",
        "unix:///x?db=x",
        "valkey://[::1",
    ],
)
def test_a_url_that_cannot_be_is_an_error_without_its_text(url):
    with pytest.raises(ConfigError, match=r"storage\.valkey\.url") as raised:
        Config.from_env({}, Config.from_mapping(settings(url)))
    assert "QQ" not in str(raised.value)
    assert "ss@" not in str(raised.value)


def test_credentials_come_from_variables_where_the_url_has_none():
    variables = dict(zip(VARIABLES, ("valkeys://one,[::1]:7", "me", PASSWORD), strict=True))
    for url, wanted in (
        ("", ["rediss://me:{}@one:6379", "rediss://me:{}@[::1]:7"]),
        ("valkey://h:1/2", ["redis://me:{}@h:1/2"]),
        ("valkey://you:own@h:1", ["redis://you:own@h:1"]),
        ("unix:///s?db=1", ["unix://me:{}@/s?db=1"]),
    ):
        found = Config.from_env(variables, Config.from_mapping(settings(url))).storage.valkey
        assert found.addresses() == [one.format(ENCODED.replace("'", "%27")) for one in wanted]


def test_a_pool_is_not_exclusive():
    with pytest.raises(ConfigError, match=r"storage\.exclusive"):
        valkey_child.backend(settings("valkey://h", exclusive=True))


# -- a whole cache


def settings(url: str, *, exclusive: bool = False) -> dict:
    return valkey_child.settings(url, exclusive=exclusive)


async def request(cache, seed: int) -> int:
    return (await serve(cache, f"r{seed}", [seed] * 129)).hits.storage


@pytest.fixture
def written(emptied):
    """The server, after another process has written to it."""
    child = [sys.executable, "-m", "tests.storage.valkey_child", emptied.url]
    subprocess.run(child, check=True, cwd=Path(__file__).parents[2])
    return emptied


async def test_a_new_process_hits_what_another_one_wrote(written):
    async with kvactors.open(Config.from_mapping(settings(written.url))) as cache:
        assert [await request(cache, seed) for seed in range(6)] == [8] * 6
        await cache.wait_flushed()
        assert cache.count_divergent_blocks() == 0
        assert cache.check() == []


async def test_a_cache_degrades_without_its_server_and_recovers(monkeypatch):
    monkeypatch.setattr(attempts, "PAUSE_S", 0.05)
    with valkey_server() as one:
        async with kvactors.open(Config.from_mapping(settings(one.url))) as cache:
            assert await request(cache, 0) == 0
            await cache.wait_idle()
            one.kill()
            for seed in range(1, 20):
                assert await request(cache, seed) == 0
            await cache.wait_idle()
            health = cache.health()
            assert health.status == "degraded"
            assert "ConnectionError" in str(health)
            one.start()
            for seed in itertools.count(20):
                await request(cache, seed)
                await cache.wait_idle()
                if cache.health().status == "ok":
                    break
            assert cache.check() == []
