"""ZMQ sockets of a publisher: where they listen, and what can be wrong with that, as one error."""

from __future__ import annotations

from typing import Any, Literal

from kvactors.errors import SinkError

try:
    import zmq
    import zmq.asyncio
except ImportError as error:
    raise SinkError("a kv_events sink needs ZMQ: pip install 'kvactors[kv-events]'") from error

__all__ = ["Sockets", "binds", "offset", "send", "zmq"]

LOCAL = ("*", "0.0.0.0", "::", "::1", "localhost")  # noqa: S104  (recognised, not chosen)


def offset(endpoint: str, dp_rank: int) -> str:
    """The endpoint of a data-parallel rank: a tcp port is raised by it, other names get a suffix."""
    if not endpoint or not dp_rank:
        return endpoint
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        if port.isdigit() and int(port):
            return f"{host}:{int(port) + dp_rank}"
        return endpoint
    return f"{endpoint}_dp{dp_rank}"


def binds(endpoint: str) -> bool:
    """Whether a publisher listens at this endpoint (any of this machine's addresses, ipc, inproc) rather than connecting to it."""
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint[len("tcp://") :].rpartition(":")[0].strip("[]")
    return host in LOCAL or host.startswith("127.")


class Sockets:
    """The sockets of one publisher, opened one after another; `close` closes what was opened."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.context: Any = zmq.Context.instance()  # the process's own, so that inproc readers find it
        self._opened: list[Any] = []

    def publisher(self, endpoint: str, high_water_mark: int, bind: Literal["auto", "bind", "connect"]) -> Any:
        """A PUB socket: sending never waits. A subscriber that is `high_water_mark` messages behind loses some."""
        socket = self.context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        return self._open(socket, endpoint, bind == "bind" or (bind == "auto" and binds(endpoint)))

    def router(self, endpoint: str, high_water_mark: int) -> Any:
        """A ROUTER socket of the running loop, that says so when a peer is gone or slow."""
        socket = zmq.asyncio.Socket(self.context, zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return self._open(socket, endpoint, listen=True)

    def _open(self, socket: Any, endpoint: str, listen: bool) -> Any:
        self._opened.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            (socket.bind if listen else socket.connect)(endpoint)
        except (zmq.ZMQError, ValueError, TypeError) as error:
            verb = "listen at" if listen else "connect to"
            raise SinkError(f"sink {self.name!r} cannot {verb} {endpoint}: {error}") from error
        return socket

    @staticmethod
    def address(socket: Any) -> str:
        """Where a socket listens (or connects to), a port of 0 replaced by the real one."""
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))

    def close(self, linger: float = 0.0) -> None:
        """Close everything. linger: seconds in which what was published may still leave; ZMQ's own thread sees to that."""
        for socket in self._opened:
            socket.close(linger=int(1000 * linger))
        self._opened.clear()


def send(socket: Any, topic: bytes, sequence: int, payload: bytes) -> None:
    """One message of three frames, frame by frame: a third of the price of `send_multipart`."""
    socket.send(topic, zmq.SNDMORE)
    socket.send(sequence.to_bytes(8, "big"), zmq.SNDMORE)
    socket.send(payload)
