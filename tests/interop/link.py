"""A TCP link between a consumer and a publisher that can be cut without notice to either."""

from __future__ import annotations

import contextlib
import selectors
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
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._is_cut = self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Close every connection, and those to come."""
        self._is_cut = True
        self._wake.send(b".")

    def mend(self) -> None:
        """Forward connections again."""
        self._is_cut = False

    def close(self) -> None:
        """Close everything."""
        self._closing = True
        self._wake.send(b".")
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(64)
                    if self._is_cut:
                        for one in list(self._peers):
                            self._end(one)
                elif key.fileobj in self._peers:
                    self._forward(key.fileobj)
        for one in (*self._peers, self._server, self._wake, self._woken):
            one.close()
        self._selector.close()

    def _accept(self) -> None:
        consumer, _ = self._server.accept()
        if self._is_cut:
            consumer.close()
            return
        try:
            publisher = socket.create_connection(self._target)
        except OSError:
            consumer.close()
            return
        self._peers |= {consumer: publisher, publisher: consumer}
        for one in (consumer, publisher):
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, one: socket.socket) -> None:
        try:
            data = one.recv(1 << 16)
            if data:
                self._peers[one].sendall(data)
                return
        except OSError:
            pass
        self._end(one)

    def _end(self, one: socket.socket) -> None:
        other = self._peers.pop(one, None)
        if other is None:
            return
        self._peers.pop(other, None)
        for each in (one, other):
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
            each.close()
