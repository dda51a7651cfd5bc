"""LMCache's server with kvactors as its L2 adapter, and a client of it: processes of a test."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.interop.engines.vllm_engine import MODULES
from tests.interop.environments import Environments, InteropError
from tests.interop.processes import Child

ENVIRONMENT = "lmcache"
VARIABLES = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "LMCACHE_DISABLE_BANNER": "1",
    "PYTHONPATH": str(MODULES),
}
RPC = "tcp://127.0.0.1:5555"
HTTP = "http://127.0.0.1:8080"
"""The addresses that `lmcache server` listens on by default."""
LIMIT = 600.0
"""Seconds of a call. Only a hang takes as long."""
PAUSE = 0.05
"""Seconds between two questions about the same state."""
CLIENT = Path(__file__).with_name("lmcache_client_child.py")

CHUNK = 128 << 10
"""Bytes of a chunk of the client."""
CHUNKS = 4
"""Chunks of one of its sequences."""


def adapter(directory: Path, **params: Any) -> dict[str, Any]:
    """The value of `--l2-adapter`, as docs/how-to/lmcache.md has it."""
    return {
        "type": "plugin",
        "module_path": "kvactors.integrations.lmcache",
        "class_name": "KVActorsL2",
        "adapter_params": {
            "directory": str(directory),
            "capacity_bytes": "64MB",
            "page_bytes": CHUNK,
            "staging_bytes": "2MB",
        }
        | params,
    }


class LmcacheServer:
    """`lmcache server`, started as docs/how-to/lmcache.md has it."""

    def __init__(
        self, environments: Environments, log: Path, l2: dict[str, Any], *, chunk: int = 32
    ) -> None:
        command = [environments.program(ENVIRONMENT, "lmcache"), "server"]
        command += ["--l1-size-gb", "0.0625", "--eviction-policy", "LRU"]
        command += ["--chunk-size", str(chunk), "--supported-transfer-mode", "engine_driven"]
        command += ["--l2-adapter", json.dumps(l2)]
        self._child = Child("lmcache server", command, log, env=VARIABLES)
        self.wait_until(self._is_up)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return when something holds.

        Raises:
            InteropError: the server has ended, or it never holds.
        """
        until = time.monotonic() + LIMIT
        while not holds():
            self._child.check()
            if time.monotonic() > until:
                raise InteropError(f"lmcache server: {self.status()}\n{self._child.end_of_log()}")
            time.sleep(PAUSE)

    def _is_up(self) -> bool:
        try:
            return bool(ask_http("/healthcheck")["status"] == "healthy")
        except OSError:
            return False

    def status(self) -> dict[str, Any]:
        """The status that the server has of the adapter."""
        (found,) = ask_http("/status")["storage_manager"]["l2_adapters"]
        return dict(found)

    def wait_stored(self, objects: int) -> None:
        """Wait until the adapter has so many objects, and none are in flight."""

        def stored() -> bool:
            found = self.status()
            return not found["tasks_in_flight"] and found["stored_object_count"] >= objects

        self.wait_until(stored)

    def wait_idle(self) -> None:
        """Wait until the server moves no object between its memory and the adapter."""

        def idle() -> bool:
            found = ask_http("/status")["storage_manager"]
            store, fetch = found["store_controller"], found["prefetch_controller"]
            (l2,) = found["l2_adapters"]
            waiting = store["pending_keys_count"] + store["in_flight_task_count"]
            waiting += fetch["in_flight_request_count"] + l2["tasks_in_flight"]
            return not waiting + l2["locked_key_count"]

        self.wait_until(idle)

    def clear(self) -> None:
        """Empty LMCache's own memory."""
        ask_http("/cache/clear", {"tier": "l1", "force": True})

    def kill(self) -> None:
        """kill -9."""
        self._child.kill()

    def stop(self) -> None:
        """End the server in order.

        Raises:
            InteropError: it does not end.
        """
        self._child.process.terminate()
        until = time.monotonic() + LIMIT
        while self._child.process.poll() is None:
            if time.monotonic() > until:
                raise InteropError(f"lmcache server does not end:\n{self._child.end_of_log()}")
            time.sleep(PAUSE)

    def discard(self) -> None:
        """End the process in any state."""
        self._child.close()


def ask_http(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """A call of the server's HTTP API.

    Raises:
        OSError: the server does not answer, or answers with an error.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        HTTP + path, data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        return dict(json.loads(answer.read()))


class LmcacheClient:
    """A process that stores and retrieves sequences through the server."""

    def __init__(self, environments: Environments, log: Path) -> None:
        command = [environments.program(ENVIRONMENT), "-P", str(CLIENT)]
        self._child = Child("LMCache's client", command, log, lines=True, env=VARIABLES)

    def open(self) -> None:
        """Connect to the server, also if it is another one than before."""
        answer = self._child.ask({"do": "open", "rpc": RPC, "http": HTTP}, LIMIT)
        assert answer["chunks"] == CHUNKS

    def store(self, sequences: Sequence[int]) -> tuple[int, int]:
        """Store what the server has not. Returns the chunks stored, and the sequences that failed.

        They are in the server's memory then, and go to the adapter in the background.
        """
        answer = self._child.ask({"do": "store", "sequences": list(sequences)}, LIMIT)
        return answer["stored"], answer["failed"]

    def fetch(self, sequences: Sequence[int]) -> tuple[int, int]:
        """Retrieve sequences. Returns the chunks that were hits, and those with the right bytes."""
        answer = self._child.ask({"do": "fetch", "sequences": list(sequences)}, LIMIT)
        return answer["hits"], answer["right"]

    def discard(self) -> None:
        """End the process in any state."""
        self._child.close()
