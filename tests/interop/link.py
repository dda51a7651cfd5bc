"""A TCP link between a consumer and a publisher that can be cut without notice to either."""

from __future__ import annotations

import contextlib
import socket
import threading


class Link:
    """Forwards connections to a tcp endpoint. While it is cut, connections are closed as soon as
    they are made."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close every connection, and those to come."""
        self._is_cut = True
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Forward connections again."""
        self._is_cut = False

    def close(self) -> None:
        """Close everything."""
        self.cut()
        self._server.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # until it is closed
            while True:
                consumer, _ = self._server.accept()
                if self._is_cut:
                    consumer.close()
                    continue
                try:
                    publisher = socket.create_connection(self._target)
                except OSError:
                    consumer.close()
                    continue
                self._sockets += [consumer, publisher]
                for pair in ((consumer, publisher), (publisher, consumer)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
