"""Records every message that a worker publishes, as it is on the wire."""

from __future__ import annotations

from typing import NamedTuple

import zmq


class Message(NamedTuple):
    """A live message."""

    topic: bytes
    number: int
    payload: bytes


class Recorder:
    """A subscriber that loses nothing that is published after it has connected."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RECONNECT_IVL, 5)
        self._socket.connect(endpoint)
        self.messages: list[Message] = []

    def take(self) -> int:
        """Take the messages that have arrived. Returns how many there are in all."""
        while self._socket.poll(0):
            topic, number, payload = self._socket.recv_multipart()
            self.messages.append(Message(topic, int.from_bytes(number, "big"), payload))
        return len(self.messages)

    def close(self) -> None:
        """Disconnect."""
        self._context.destroy(linger=0)
