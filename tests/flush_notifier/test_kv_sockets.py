"""How a publisher's socket sends messages, open and closed."""

from __future__ import annotations

import anyio
import pytest
import zmq
import zmq.asyncio

from kvactors.errors import SinkError
from kvactors.flush_notifier.sinks import kv_sockets
from kvactors.flush_notifier.sinks.kv_events import KvEventsSink
from kvactors.native import FrameSender
from kvactors.settings.sinks import KvEventsSinkConfig

pytestmark = pytest.mark.full


@pytest.mark.parametrize("native", [True, False])
async def test_messages_are_three_frames_with_and_without_the_library(
    tmp_path, monkeypatch, native
):
    if not native:
        monkeypatch.setattr(kv_sockets, "address_of_send", lambda: 0)
    assert bool(kv_sockets.address_of_send()) is native
    sockets = kv_sockets.Sockets("x")
    publisher = await sockets.publisher(f"ipc://{tmp_path}/p", 10, "bind")
    send = sockets.sender(publisher)
    assert isinstance(send, FrameSender) is native
    with zmq.asyncio.Context.instance().socket(zmq.SUB) as reader:
        reader.subscribe(b"topic")
        reader.connect(f"ipc://{tmp_path}/p")
        for _ in range(500):
            send(b"topic", 0, b"")
            if await reader.poll(20):
                break
        send(b"topic\0", 2**64 - 1, b"pay\0load")
        send(b"topicless", 1, bytes(100_000))
        got = [frames async for frames in frames_until(reader, b"topicless")]
    assert got[-2:] == [
        [b"topic\0", b"\xff" * 8, b"pay\0load"],
        [b"topicless", b"\0" * 7 + b"\1", bytes(100_000)],
    ]
    sockets.close()
    with pytest.raises(zmq.ZMQError) as caught:
        send(b"topic", 1, b"")
    assert caught.value.errno == zmq.ENOTSOCK


async def frames_until(reader, topic):
    with anyio.fail_after(30):
        while True:
            frames = await reader.recv_multipart()
            yield frames
            if frames[0] == topic:
                return


async def test_a_sender_ends_before_its_socket(tmp_path):
    """Its address of the socket is not used again, since other data may be there."""
    sockets = kv_sockets.Sockets("x")
    publisher = await sockets.publisher(f"ipc://{tmp_path}/p", 10, "bind")
    send = sockets.sender(publisher)
    send(b"topic", 1, b"")
    sockets._opened.clear()  # the memory is still that of a socket
    sockets.close()
    with pytest.raises(zmq.ZMQError):
        send(b"topic", 1, b"")
    publisher.close(0)


async def test_a_sender_raises_the_error_of_the_library(tmp_path):
    sockets = kv_sockets.Sockets("x")
    router = await sockets.router(f"ipc://{tmp_path}/p", 10)
    send = sockets.sender(router)  # a socket that refuses to send to an unknown peer
    with pytest.raises(zmq.ZMQError) as caught:
        send(b"unknown", 1, b"")
    sockets.close()
    assert caught.value.errno == zmq.EHOSTUNREACH


async def test_a_sink_that_is_not_open_publishes_nothing(tmp_path):
    sink = KvEventsSink(KvEventsSinkConfig(endpoint=f"ipc://{tmp_path}/p"), 4)
    with pytest.raises(SinkError, match="not open"):
        await sink.begin_epoch(1)
