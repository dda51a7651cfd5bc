"""Unauthenticated clients at the endpoint of ranks: refused with bounded memory, counted and logged
once."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from contextlib import asynccontextmanager

import msgspec
import pytest
import structlog

import kvactors
from kvactors.data_plane.ranks import connection
from kvactors.data_plane.ranks.connection import Listener, check_leader, connect, mac
from kvactors.data_plane.ranks.leader import UNCLAIMED
from kvactors.data_plane.ranks.protocol import (
    NONCE_BYTES,
    UNPROVEN_BYTES,
    VERSION,
    Challenge,
    Hello,
    Proof,
    Refused,
)
from kvactors.device.host import HostDevice
from kvactors.layout import make_layout
from kvactors.settings import Config, LayoutConfig
from kvactors.settings.ranks import RanksConfig, Secret, split_endpoint
from tests.ranks.manual import (
    ENDPOINT,
    SECRET,
    authenticated,
    come,
    group_at,
    identity,
    opened,
    settle,
    simulated,
)

OTHER = "another secret of some length"


# -- the secret


@simulated
async def test_a_rank_with_another_secret_or_none_is_refused_and_nothing_changes():
    async with opened() as (group, _, _):
        for wrong in (OTHER, ""):
            with pytest.raises(kvactors.RankError, match="secret is not the leader's"):
                await check_leader(await connect(ENDPOINT), Secret(wrong))
        await settle()
        assert group.healthy
        assert [rank.losses for rank in group.statistics()] == [0, 0]
        assert group.refused["not authenticated"] == 2


@simulated
async def test_a_leader_with_another_secret_is_not_served():
    async def impostor(wire) -> None:
        hello = await wire.receive()
        nonce = bytes(NONCE_BYTES)
        wire.send(Challenge(VERSION, nonce))
        await wire.receive()
        wire.send(Proof(mac(Secret(OTHER), b"leader", hello.nonce, nonce)))
        assert await wire.receive() is None

    listener = Listener(impostor)
    await listener.start("memory://impostor")
    wire = await connect("memory://impostor")
    with pytest.raises(kvactors.RankError, match="leader's secret is not the rank's"):
        await check_leader(wire, Secret(SECRET))
    wire.close()
    await listener.stop()


@simulated
async def test_a_proof_cannot_be_sent_back_or_replayed():
    async with opened() as (group, _, _):
        first = await connect(ENDPOINT)
        first.send(Hello(VERSION, bytes(NONCE_BYTES)))
        challenge = await first.receive()
        stolen = mac(Secret(SECRET), b"rank", bytes(NONCE_BYTES), challenge.nonce)
        mirrored = mac(Secret(SECRET), b"leader", bytes(NONCE_BYTES), challenge.nonce)
        first.send(Proof(mirrored))  # the role is part of the proof
        assert isinstance(await first.receive(), Refused)
        second = await connect(ENDPOINT)
        second.send(Hello(VERSION, bytes(NONCE_BYTES)))
        assert (await second.receive()).nonce != challenge.nonce
        second.send(Proof(stolen))  # so is the leader's nonce
        assert isinstance(await second.receive(), Refused)
        assert group.healthy


def test_the_secret_is_in_no_repr_or_log():
    config = Config(ranks=RanksConfig(2, "tcp://h:1", secret=SECRET))
    group = group_at()
    shown = [
        repr(config),
        str(config.ranks),
        repr(list(config.ranks.__rich_repr__())),
        repr(Secret(SECRET)),
        repr(vars(group)),
    ]
    shown.append(repr(group.statistics()) + repr(group.refused))
    assert not [text for text in shown if SECRET in text]
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


@pytest.mark.parametrize(
    ("settings", "environ", "word"),
    [
        ({"endpoint": "tcp://10.0.0.1:7000"}, {}, "need a shared secret"),
        (
            {"endpoint": "tcp://10.0.0.1:7000"},
            {"KVACTORS_RANKS_SECRET": ""},
            "need a shared secret",
        ),
        (
            {"endpoint": "tcp://10.0.0.1:7000"},
            {"KVACTORS_RANKS_SECRET": "short"},
            "at least 16 characters",
        ),
        ({"endpoint": "unix:///run/x", "secret": "short"}, {}, "at least 16 characters"),
    ],
)
def test_tcp_needs_a_secret_that_is_long_enough(settings, environ, word):
    base = Config(layout=LayoutConfig(tensor_parallel=2), ranks=RanksConfig(2, **settings))
    with pytest.raises(kvactors.ConfigError, match=word) as raised:
        Config.from_env(environ, base)
    assert "short" not in str(raised.value)


def test_the_secret_of_the_environment_is_used_where_none_is_set():
    base = Config(
        layout=LayoutConfig(tensor_parallel=2), ranks=RanksConfig(2, "tcp://10.0.0.1:7000")
    )
    assert Config.from_env({"KVACTORS_RANKS_SECRET": SECRET}, base).ranks.secret == SECRET
    base = Config(
        layout=LayoutConfig(tensor_parallel=2),
        ranks=RanksConfig(2, "tcp://10.0.0.1:7000", secret=OTHER),
    )
    assert Config.from_env({"KVACTORS_RANKS_SECRET": SECRET}, base).ranks.secret == OTHER
    assert Config.from_env({"KVACTORS_RANKS_SECRET": SECRET}).ranks.secret == ""


async def test_a_rank_for_tcp_needs_a_secret_too():
    config = Config()
    device = HostDevice(make_layout(config.layout, config.cache.block_size), 8)
    with pytest.raises(kvactors.ConfigError, match="need a shared secret"):
        await kvactors.serve_rank("tcp://127.0.0.1:1", device, rank=0, ranks=2, config=config)


# -- limits before authentication


@simulated
async def test_unauthenticated_clients_hold_no_more_connections_than_the_limit_and_displace_no_rank():
    async with opened() as (group, _, _):
        most = UNCLAIMED + 2 * group.config.count
        strangers = [await connect(ENDPOINT) for _ in range(3 * most)]
        await settle()
        assert len(group._unclaimed) == most
        assert [await wire.receive() for wire in strangers[: 2 * most]] == [None] * (2 * most)
        assert group.refused["too many connections"] == 2 * most
        assert group.healthy
        assert (await authenticated()) is not None  # beside all allowed unauthenticated ones
        assert [rank.losses for rank in group.statistics()] == [0, 0]


async def test_an_unauthenticated_client_makes_the_leader_read_no_more_than_a_small_message(
    tmp_path,
):
    group = group_at(f"unix://{tmp_path}/ranks", startup_timeout_s=100.0)
    opening = asyncio.ensure_future(group.open())
    while not (tmp_path / "ranks").exists():
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "ranks"))
    with structlog.testing.capture_logs() as logs:
        writer.write(
            (UNPROVEN_BYTES + 1).to_bytes(4, "little")
        )  # its length alone ends the connection
        assert await reader.read() == b""
    assert [log["reason"] for log in logs] == [
        "a message of 1025 bytes, at most 1024 are accepted here"
    ]
    writer.close()
    ranks = [await come(rank, endpoint=f"unix://{tmp_path}/ranks") for rank in range(2)]
    await opening
    assert group.refused == {"not authenticated": 1}
    await group.close()
    for wire in ranks:
        wire.close()


# -- unix sockets


@asynccontextmanager
async def listening_at(path, met=None):
    async def nothing(wire) -> None:
        await wire.receive()

    listener = Listener(met or nothing)
    await listener.start(f"unix://{path}")
    try:
        yield listener
    finally:
        await listener.stop()


async def test_a_socket_is_for_its_user_alone_and_is_removed(tmp_path):
    path = tmp_path / "ranks"
    before = os.umask(0)
    try:
        async with listening_at(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert not path.exists()


async def test_a_stale_socket_is_replaced_and_one_in_use_is_not(tmp_path):
    path = tmp_path / "ranks"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    async with listening_at(path):
        inode = path.stat().st_ino
        with pytest.raises(kvactors.RankError, match="listens there already"):
            async with listening_at(path):
                pass
        assert path.stat().st_ino == inode
    path.write_text("not a socket")
    with pytest.raises(kvactors.RankError, match="is not a socket"):
        async with listening_at(path):
            pass
    assert path.read_text() == "not a socket"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(kvactors.RankError, match="is not a socket"):
        async with listening_at(path):
            pass


async def test_of_many_leaders_at_a_stale_socket_one_listens(tmp_path):
    path = tmp_path / "ranks"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    listeners = [Listener(lambda wire: wire.receive()) for _ in range(8)]
    results = await asyncio.gather(
        *(one.start(f"unix://{path}") for one in listeners), return_exceptions=True
    )
    assert sum(result is None for result in results) == 1
    assert all(result is None or isinstance(result, kvactors.RankError) for result in results)
    (await connect(f"unix://{path}")).close()
    for one in listeners:
        await one.stop()
    assert not path.exists()


async def test_a_socket_that_another_leader_made_stays(tmp_path):
    path = tmp_path / "ranks"
    async with listening_at(path):
        path.unlink()
        async with listening_at(path):
            inode = path.stat().st_ino
            await asyncio.sleep(0)
        async with listening_at(path):
            inode = path.stat().st_ino
    assert path.exists() is False or path.stat().st_ino == inode


async def test_other_users_are_refused_on_both_sides(tmp_path, monkeypatch):
    seen = []
    path = tmp_path / "ranks"

    async def met(wire) -> None:
        seen.append(wire)
        await wire.receive()

    listener = Listener(met, lambda source, reason: seen.append((source, reason)))
    await listener.start(f"unix://{path}")
    monkeypatch.setattr(connection, "is_trusted", lambda uid: False)
    with pytest.raises(PermissionError, match="listens at"):
        await connect(f"unix://{path}")
    while not seen:
        await asyncio.sleep(0)
    assert seen[0][0] == f"uid {os.geteuid()}"
    assert len(seen) == 1
    await listener.stop()


def test_this_user_and_root_are_trusted(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert [connection.is_trusted(uid) for uid in (1000, 0, 1001, 65534)] == [
        True,
        True,
        False,
        False,
    ]


# -- endpoints


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [
        ("unix:///run/kv/ranks", ("unix", "/run/kv/ranks", 0)),
        ("tcp://host:7000", ("tcp", "host", 7000)),
        ("tcp://[::1]:7000", ("tcp", "::1", 7000)),
        ("tcp://[fe80::1%eth0]:65535", ("tcp", "fe80::1%eth0", 65535)),
        ("memory://name", ("memory", "name", 0)),
    ],
)
def test_endpoints(endpoint, parts):
    assert split_endpoint(endpoint) == parts


@pytest.mark.parametrize(
    ("endpoint", "word"),
    [
        ("", "must be unix"),
        ("http://x:1", "must be unix"),
        ("unix://", "must be unix"),
        ("unix://relative", "absolute path"),
        ("unix:///with\0zero", "absolute path"),
        ("unix:///" + "x" * 200, "at most 107 bytes"),
        ("tcp://::1:7000", "in brackets"),
        ("tcp://[::1]", "must be|in brackets"),
        ("tcp://:7000", "tcp://host:port"),
        ("tcp://host", "tcp://host:port"),
        ("tcp://host:0", "1 to 65535"),
        ("tcp://host:65536", "at most 65535"),
        ("tcp://host:seven", "a number for the port"),
        ("tcp://host:1_0", "a number for the port"),
        ("tcp://host:-1", "a number for the port"),
    ],
)
def test_endpoints_that_cannot_be(endpoint, word):
    with pytest.raises(kvactors.ConfigError, match=word):
        split_endpoint(endpoint)


async def test_a_port_in_use_is_an_error_that_names_it(unused_tcp_port_factory):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(kvactors.RankError, match=endpoint):
            await group_at(endpoint).open()


@simulated
async def test_the_reason_of_a_refusal_is_in_the_error_of_open():
    group = group_at(startup_timeout_s=3.0)
    opening = asyncio.ensure_future(group.open())
    await settle()
    with pytest.raises(kvactors.RankError):
        await check_leader(await connect(ENDPOINT), Secret(OTHER))
    wire = await authenticated()
    wire.send(identity(0, model="model-b"))
    assert isinstance(await wire.receive(), Refused)
    wire.close()
    with pytest.raises(
        kvactors.RankError,
        match=r"ranks \[0, 1\] of 2 .*model 'model-b'.*1 connections refused: not authenticated",
    ):
        await opening
