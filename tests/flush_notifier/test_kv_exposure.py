"""A publisher of KV events and unknown clients: where it listens, how much it takes from them, and
that it goes on."""

from __future__ import annotations

import asyncio
import os
import socket as system_socket
import stat
from contextlib import AsyncExitStack

import pytest
import structlog
import zmq

from kvactors.errors import ConfigError, SinkError
from kvactors.flush_notifier.sinks.kv_events import READERS, KvEventsSink, Window
from kvactors.flush_notifier.sinks.kv_sockets import MAX_REQUEST_BYTES
from kvactors.flush_notifier.sinks.kv_wire import END
from kvactors.settings import Config
from kvactors.settings.sinks import Endpoint, KvEventsSinkConfig, of_rank
from tests.flush_notifier.test_kv_events import (
    BLOCK,
    answers,
    number,
    opened,
    receive,
    socket,
    task,
)

pytestmark = pytest.mark.full


def sinks(*tables):
    return Config.from_mapping(
        {
            "flush": {
                "sinks": [{"kind": "kv_events", "name": f"s{i}", **t} for i, t in enumerate(tables)]
            }
        }
    )


# -- settings


def test_by_default_this_machine_alone_can_read():
    assert KvEventsSinkConfig().endpoint == "tcp://127.0.0.1:5557"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            {"endpoint": "tcp://*:99999"},
            r"endpoint must have a port of at most 65535, not 'tcp://\*:99999'",
        ),
        ({"endpoint": "tcp://*:65535", "dp_rank": 1}, "65536"),
        ({"endpoint": "tcp://127.0.0.1"}, "number for the port"),
        ({"endpoint": "tcp://:5557"}, "host:port"),
        ({"endpoint": "tcp://127.0.0.1:-1"}, "number for the port"),
        ({"endpoint": "tcp://127.0.0.1:\uff15"}, "number for the port"),
        ({"endpoint": "tcp://::1:5557"}, "in brackets"),
        ({"endpoint": "ipc://"}, "a path after"),
        ({"replay_endpoint": "inproc://"}, "a name after"),
        ({"dp_rank": 65_536}, "dp_rank"),
        (
            {"endpoint": "ipc:///tmp/a", "replay_endpoint": "ipc:///tmp/a"},
            "replay_endpoint 'ipc:///tmp/a' is taken by endpoint",
        ),
        (
            {"endpoint": "tcp://127.0.0.1:7000", "replay_endpoint": "tcp://*:7000"},
            "is taken by endpoint",
        ),
        (
            {"endpoint": "tcp://[::1]:7000", "replay_endpoint": "tcp://[::1]:7000"},
            "replay_endpoint 'tcp://.::1.:7000' is taken by endpoint",
        ),
    ],
)
def test_an_endpoint_that_cannot_be_is_named(settings, names):
    with pytest.raises(ConfigError, match=names):
        sinks(settings)


def test_two_sinks_do_not_listen_at_one_endpoint():
    with pytest.raises(ConfigError, match="'s1' and 's0' have the same endpoint"):
        sinks(
            {"endpoint": "tcp://127.0.0.1:7000"},
            {"endpoint": "tcp://127.0.0.1:7001", "replay_endpoint": "tcp://*:7000"},
        )
    sinks({"endpoint": "tcp://127.0.0.1:0"}, {"endpoint": "tcp://127.0.0.1:0"})
    sinks({"endpoint": "tcp://router:7000"}, {"endpoint": "tcp://router:7000"})  # both connect
    sinks({"endpoint": "tcp://*:7000"}, {"endpoint": "tcp://*:7000", "dp_rank": 1})


@pytest.mark.parametrize(
    "text",
    [
        "tcp://*:1",
        "tcp://0.0.0.0:1",
        "tcp://[::]:1",
        "tcp://[0::0]:1",
        "tcp://[0:0:0:0:0:0:0:0]:1",
        "tcp://[::ffff:0.0.0.0]:1",
    ],
)
def test_endpoints_that_every_interface_listens_at(text):
    assert Endpoint.of(text).any_host
    assert of_rank(text, 2).endswith(":3")


# -- where it listens


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
async def test_listening_on_every_interface_is_one_warning(tmp_path, host):
    with structlog.testing.capture_logs() as logs:
        async with opened(tmp_path, endpoint=f"tcp://{host}:0", replay_endpoint=f"tcp://{host}:0"):
            pass
    (warning,) = logs
    assert warning["log_level"] == "warning"
    assert warning["endpoints"] == [f"tcp://{host}:0"] * 2
    with structlog.testing.capture_logs() as logs:
        async with opened(
            tmp_path, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"
        ):
            pass
    assert logs == []


@pytest.mark.parametrize("host", ["[::1]", "[::]", "[0:0:0:0:0:0:0:1]"])
async def test_ipv6(tmp_path, host):
    async with AsyncExitStack() as stack:
        try:
            sink = await stack.enter_async_context(
                opened(tmp_path, endpoint=f"tcp://{host}:0", replay_endpoint=f"tcp://{host}:0")
            )
        except SinkError:
            with pytest.raises(OSError), system_socket.socket(system_socket.AF_INET6) as one:
                one.bind(("::1", 0))  # this machine has no IPv6
            return
        port = sink.endpoint.rpartition(":")[2]
        reader = zmq.asyncio.Context.instance().socket(zmq.SUB)
        stack.callback(reader.close, 0)
        reader.setsockopt(zmq.IPV6, 1)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(f"tcp://[::1]:{port}")
        for _ in range(100):
            await sink.begin_epoch(7)
            if await reader.poll(50):
                break
        else:
            raise AssertionError("nothing came")


async def test_a_socket_file_is_for_its_user_alone_and_takes_no_place_of_another(tmp_path):
    old = os.umask(0)
    try:
        async with opened(tmp_path, endpoint=f"ipc://{tmp_path}/mine") as sink:
            assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o600
            with pytest.raises(SinkError, match="in use"):
                await KvEventsSink(
                    KvEventsSinkConfig(endpoint=f"ipc://{tmp_path}/mine"), BLOCK
                ).open()
            async with socket(zmq.SUB, sink.endpoint) as reader:
                await sink.begin_epoch(7)
                assert await receive(reader)
    finally:
        os.umask(old)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(SinkError, match="no socket"):
        await KvEventsSink(KvEventsSinkConfig(endpoint=f"ipc://{tmp_path}/file"), BLOCK).open()
    assert (tmp_path / "file").read_text() == "precious"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(SinkError, match="no socket"):
        await KvEventsSink(KvEventsSinkConfig(endpoint=f"ipc://{tmp_path}/link"), BLOCK).open()
    left = system_socket.socket(system_socket.AF_UNIX)
    left.bind(str(tmp_path / "left"))
    left.close()
    async with opened(tmp_path, endpoint=f"ipc://{tmp_path}/left"):
        pass


# -- requests that it accepts


async def test_a_large_frame_ends_its_connection_before_it_is_read(tmp_path):
    async with opened(
        tmp_path, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"
    ) as sink:
        await sink.begin_epoch(7)
        for where in (sink.replay_endpoint, sink.endpoint):
            async with socket(
                zmq.DEALER if where is sink.replay_endpoint else zmq.SUB, where
            ) as stranger:
                if where is sink.replay_endpoint:
                    await stranger.send_multipart([b"", bytes(MAX_REQUEST_BYTES + 1)])
                else:
                    stranger.setsockopt(zmq.SUBSCRIBE, bytes(100_000))
                await asyncio.sleep(0.1)
        async with socket(zmq.DEALER, sink.replay_endpoint) as dealer:
            await dealer.send_multipart([b"", bytes(8)])
            assert len(await answers(dealer)) == 2
        assert (sink.server.requests, sink.server.malformed) == (1, 0), "the large one never came"


def test_a_window_takes_any_number():
    window = Window(10, 1000)
    window.add(0, b"x")
    assert [window.since(n) for n in (2**63, 2**64 - 1, 1)] == [[], [], []]


async def test_many_readers_at_once_all_get_their_answer(tmp_path):
    async with opened(tmp_path) as sink, AsyncExitStack() as stack:
        await sink.begin_epoch(7)
        for i in range(200):
            await sink.deliver([task(i % 8, 1)])
        readers = [
            await stack.enter_async_context(socket(zmq.DEALER, sink.replay_endpoint))
            for _ in range(READERS + 24)
        ]
        for reader in readers:
            await reader.send_multipart([b"", bytes(8)])
        assert [len(got) for got in await asyncio.gather(*map(answers, readers))] == [202] * len(
            readers
        )


async def test_a_reader_that_asks_again_has_one_answer_at_a_time(tmp_path):
    async with opened(tmp_path) as sink, socket(zmq.DEALER, sink.replay_endpoint) as dealer:
        await sink.begin_epoch(7)
        for _ in range(50):
            await dealer.send_multipart([b"", bytes(8)])
        while sink.server.requests < 50:
            await asyncio.sleep(0.01)
        assert len(sink.server._answers) <= 1
        while await dealer.poll(100):
            last = await dealer.recv_multipart()
        assert number(last[-2]) == END


async def test_a_state_that_cannot_be_made_costs_its_reader_alone(tmp_path):
    def broken():
        raise RuntimeError("no holdings")

    async with (
        opened(tmp_path, replay_window=1) as sink,
        socket(zmq.DEALER, sink.replay_endpoint) as dealer,
    ):
        sink.set_snapshot_source(broken)
        await sink.begin_epoch(7)
        await sink.deliver([task(0, 1)])
        await dealer.send_multipart([b"", bytes(8)])
        assert len(await answers(dealer)) == 1, "the end marker alone"
        assert sink.server.given_up == 1
        await dealer.send_multipart([b"", (1).to_bytes(8, "big")])
        assert len(await answers(dealer)) == 2


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_publisher_can_be_opened_again_at_once_where_it_was_closed(tmp_path, transport):
    """ZMQ frees an endpoint in its own thread, some time after the close."""
    with system_socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    where = f"ipc://{tmp_path}/again" if transport == "ipc" else f"tcp://127.0.0.1:{port}"
    reader = zmq.asyncio.Context.instance().socket(zmq.SUB)
    reader.setsockopt(zmq.LINGER, 0)
    reader.connect(where)  # before there is a publisher
    try:
        for _ in range(30):
            async with opened(tmp_path, endpoint=where) as sink:
                await sink.begin_epoch(7)
    finally:
        reader.close()


async def test_an_endpoint_that_becomes_free_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("kvactors.flush_notifier.sinks.kv_sockets.BIND_TIMEOUT_S", 30.0)
    held = system_socket.socket(system_socket.AF_UNIX)
    held.bind(str(tmp_path / "held"))
    held.listen()
    sink = KvEventsSink(KvEventsSinkConfig(endpoint=f"ipc://{tmp_path}/held"), BLOCK)
    opening = asyncio.create_task(sink.open())
    await asyncio.sleep(0.1)
    assert not opening.done()
    held.close()
    await opening
    await sink.close()
