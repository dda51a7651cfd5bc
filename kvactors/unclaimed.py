"""Connections to a port that have not shown yet who they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Unclaimed(Generic[T]):
    """At most `most` connections, in the order of their arrival. The oldest is closed for a new
    one, so that clients that send nothing keep out no other client.

    Args:
        most: connections at a time.
        close: closes the oldest connection.
    """

    def __init__(self, most: int, close: Callable[[T], object]) -> None:
        self._most = most
        self._close = close
        self._connections: dict[T, None] = {}

    def __contains__(self, connection: T) -> bool:
        return connection in self._connections

    def __iter__(self) -> Iterator[T]:
        return iter(self._connections)

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: T) -> None:
        """Add a connection that has just arrived."""
        while len(self._connections) >= self._most:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            self._close(oldest)
        self._connections[connection] = None

    def discard(self, connection: T) -> None:
        """Forget a connection that is known now, or is lost."""
        self._connections.pop(connection, None)
