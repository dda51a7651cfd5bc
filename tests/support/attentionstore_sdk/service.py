"""Stand-in for AttentionStore's service: one index and one store of bytes for each shard, with
settings that make it misbehave."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from kvactors.testing.faults import Fault, Kind
from tests.support.attentionstore_sdk.utils.err import AttentionStoreSDKError

Path = tuple[int, ...]

CAPACITY = 1 << 16
"""Blocks that a shard stores at most, unless set."""

LONGEST_HOLD = 60.0
"""Seconds after which a call that is held raises `queue.Empty`: a failed test ends."""


class Call(NamedTuple):
    """One call of the SDK: its name and its arguments."""

    name: str
    arguments: tuple[Any, ...]


class Service:
    """resident: the paths (all tokens from the root on) of the blocks on this node. objects: bytes
    by path and layer.

    capacity: blocks that are stored at most. The least recently used ones are evicted. not_ready:
    look-ups to refuse with "cuda memory not ready". broken: message of the error that every call
    gives. slow: seconds every call takes. One with a time-out raises the SDK's error when that is
    over. stuck: seconds every call takes, regardless of its time-out. hold: every call takes one
    item from it before it continues, regardless of its time-out. fail_every: fail every n-th flush.
    fail_after: carry out the call and fail nevertheless. token_bytes: handed to the index. leaks:
    exception that every call raises in place of an answer. counts: result of calls in place of a
    count of blocks. from_root: `match` counts from the root, not from its start. refuse_block: a
    device block that the service has no memory for. evicted: blocks. connected: whether this
    process has an SDK object for the shard.
    """

    def __init__(self) -> None:
        self.resident: set[Path] = set()
        self.objects: dict[tuple[Path, int], bytes] = {}
        self.calls: deque[Call] = deque(maxlen=10_000)
        self.capacity = CAPACITY
        self.not_ready = 0
        self.broken = ""
        self.slow = self.stuck = 0.0
        self.hold: SimpleQueue[None] | None = None
        self.fail_every = 0
        self.fail_after = False
        self.leaks: type[BaseException] | None = None
        self.counts: Callable[[int], Any] | None = None
        self.from_root = False
        self.refuse_block = -1
        self.flushes = 0
        self.token_bytes = 0
        self.evicted = 0
        self.at_once = self.most_at_once = 0
        self.unnamed = False
        self.connected = False
        self._used: dict[Path, None] = {}  # paths with objects, the least recently used first

    def enter(self, name: str, *arguments: Any, timeout: float | None = None) -> None:
        """A call begins."""
        if self.leaks is not None:
            raise self.leaks("raised by the service")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.calls.append(Call(name, arguments))
        try:
            if self.hold is not None:
                self.hold.get(timeout=LONGEST_HOLD)
            if self.stuck:
                time.sleep(self.stuck)
            if self.slow:
                time.sleep(self.slow if timeout is None else min(self.slow, timeout))
                if timeout is not None and self.slow > timeout:
                    raise AttentionStoreSDKError(f"{name}: no answer in {timeout} s")
        except BaseException:
            self.leave()
            raise

    def counted(self, count: int) -> Any:
        """The value that a call returns for a count of blocks."""
        return count if self.counts is None else self.counts(count)

    def leave(self) -> None:
        """A call ends."""
        self.at_once -= 1

    def use(self, path: Path) -> None:
        """A block was read or written: it is the last one to be evicted now."""
        self._used.pop(path, None)
        self._used[path] = None

    def make_room(self, keep: Path) -> None:
        """Evict the blocks beyond the capacity, except `keep`."""
        if len(self.objects) <= self.capacity:
            return
        stored = dict.fromkeys(path for path, _ in self.objects)
        self._used = {
            path: None
            for path in (*(stored.keys() - self._used.keys()), *self._used)
            if path in stored
        }
        for path in list(self._used)[: max(0, len(self._used) - self.capacity)]:
            if path == keep:
                continue
            del self._used[path]
            for place in [place for place in self.objects if place[0] == path]:
                del self.objects[place]
            self.evicted += 1

    async def inject(self, fault: Fault) -> None:
        """See `Injectable`: the faults of a store that an SDK can show.

        Raises:
            ValueError: the service has no such fault.
        """
        delay = 0.0 if fault.delay is None else fault.delay
        if fault.kind == "object_lost":
            self.lose(fault.amount)
            return
        settings: dict[Kind, dict[str, Any]] = {
            "store_down": {"broken": "the service does not answer"},
            "store_slow": {"slow": delay},
            "store_hang": {"stuck": delay},
            "store_small": {"capacity": fault.amount},
            "store_refuse_block": {"refuse_block": fault.amount},
            "store_count_low": {"counts": lambda count: count // 2},
            "store_count_invalid": {"counts": lambda _: self._next_of(INVALID_COUNTS)},
            "store_leak": {"leaks": self._next_of(LEAKS)},
            "store_lose_answers": {"fail_after": True},
        }
        if fault.kind not in settings:
            raise ValueError(f"{fault.kind} is no fault of this store")
        vars(self).update(settings[fault.kind])

    async def recover(self, fault: Fault) -> None:
        """See `Injectable`. Every fault ends."""
        self.broken, self.slow, self.stuck, self.fail_after = "", 0.0, 0.0, False
        self.capacity, self.refuse_block = CAPACITY, -1
        self.leaks = self.counts = None

    def lose(self, count: int) -> int:
        """Remove the oldest paths behind the clients' back. The index keeps its entries. Returns
        their number."""
        chosen = set(list(dict.fromkeys(path for path, _ in self.objects))[:count])
        for place in [place for place in self.objects if place[0] in chosen]:
            del self.objects[place]
        return len(chosen)

    def _next_of(self, values: tuple[Any, ...]) -> Any:
        return values[len(self.calls) % len(values)]


INVALID_COUNTS = (-1, 10**6, 1 << 70, None, 2.5, "many", True, b"")
LEAKS: tuple[type[BaseException], ...] = (
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    BaseException,
)
"""Errors that are no Exception, which calls raise."""

Names = tuple[str, str, str, int]
"""Namespace, pod name, model version and shard."""

DEFAULT: Names = ("default_ns", "default_pod_mixed_0", "v0", 0)

services: dict[Names, Service] = {}


def service(
    namespace: str = "", pod: str = DEFAULT[1], version: str = DEFAULT[2], shard: int = DEFAULT[3]
) -> Service:
    """The service of a shard, made when first asked for. Without a namespace: the only one there
    is, or else that of the default names. Before the first connection, the one that this connection
    will get."""
    if not namespace and len(services) == 1:
        return next(iter(services.values()))
    made = services.setdefault((namespace or DEFAULT[0], pod, version, shard), Service())
    made.unnamed = not namespace and len(services) == 1
    return made


def connect(names: Names) -> Service:
    """The service that a connection of these names is to."""
    first = next((found for found in services.values() if found.unnamed), None)
    if first is not None:
        services.clear()
        services[names] = first
        first.unnamed = False
    return services.setdefault(names, Service())


def reset() -> None:
    """As in a new process at a new service: no index, no bytes, and no SDK object."""
    from kvactors.attention_sdk import SHARED

    services.clear()
    SHARED.clear()


def restart_process() -> None:
    """Act as a new process at the same services: no SDK object, with settings and stored blocks
    unchanged."""
    from kvactors.attention_sdk import SHARED

    SHARED.clear()
    for one in services.values():
        one.connected = False


def install() -> None:
    """Let `import attentionstore_sdk` find the stand-in."""
    from tests.support.attentionstore_sdk.api.common import common_pb2
    from tests.support.attentionstore_sdk.client import client
    from tests.support.attentionstore_sdk.utils import err

    package = "tests.support.attentionstore_sdk"
    from tests.support.attentionstore_sdk import sdk

    modules = (sdk, err, common_pb2, client)
    for name in [
        package,
        f"{package}.utils",
        f"{package}.api",
        f"{package}.api.common",
        f"{package}.client",
    ]:
        sys.modules[name.replace(package, "attentionstore_sdk")] = sys.modules[name]
    for module in modules:
        sys.modules[module.__name__.replace(package, "attentionstore_sdk")] = module
