"""A vLLM engine as a test sees it: a process that serves prompts of token ids."""

from __future__ import annotations

import mmap
import os
import random
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from tests.interop.environments import Environments, InteropError
from tests.interop.processes import MODULES, Child, Lines, descendants, wait_until

CHILD = Path(__file__).with_name("vllm_child.py")
ENVIRONMENT = "vllm_cpu"
OPEN, SERVE, END = 600.0, 600.0, 60.0
"""Seconds within which an engine must start, serve, and end. Only a hang takes as long."""

VARIABLES = {
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # a tiny model computes no faster with more
    "KMP_BLOCKTIME": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `zero_device` sends a function to the workers
}

Prompt = list[int]
Tokens = list[list[int] | None]
"""The sampled tokens of each prompt; None for a cancelled request."""


class Served(NamedTuple):
    """The answer of an engine.

    Attributes:
        tokens: see `Tokens`.
        cached: prompt tokens of each prompt that were not computed.
    """

    tokens: Tokens
    cached: list[int]


def prompts(count: int, length: int = 320, shared: int = 64, seed: int = 1) -> list[Prompt]:
    """Random prompts of `length` tokens with `shared` tokens in common."""
    draw = random.Random(seed)
    start = [draw.randrange(3, 1000) for _ in range(shared)]
    return [start + [draw.randrange(3, 1000) for _ in range(length - shared)] for _ in range(count)]


class VllmHost:
    """A process that has imported vLLM, and forks engines.

    Args:
        environments: that have vLLM's.
        folder: for its log.
        version: of the Python of vLLM: None for that of the installed package.
    """

    def __init__(self, environments: Environments, folder: Path, version: str | None) -> None:
        variables = VARIABLES | {"PYTHONPATH": str(MODULES)}
        if version is not None:
            overlay = environments.source(ENVIRONMENT, f"vllm=={version}")
            variables |= {"PYTHONPATH": f"{MODULES}:{overlay}", "VLLM_TARGET_DEVICE": "cpu"}
        # the cache has facts of models, which each version of the Python overwrites
        cache = environments.directory / ENVIRONMENT / f"cache-{version}"
        variables |= {"VLLM_CACHE_ROOT": str(cache)}
        self._name = f"vllm-{version}"  # names of sockets are those of the test's network
        command = [environments.program(ENVIRONMENT), "-P", str(CHILD), self._name]
        self._child = Child("vLLM", command, folder / f"{self._name}.log", env=variables)

    def connect(self) -> socket.socket:
        """A connection to a new process that the host forks."""
        connection = socket.socket(socket.AF_UNIX)
        wait_until("vLLM is imported", lambda: self._connects(connection), OPEN)
        return connection

    def _connects(self, connection: socket.socket) -> bool:
        self._child.check()
        try:
            connection.connect(f"\0{self._name}")
        except ConnectionRefusedError:
            return False
        return True

    def close(self) -> None:
        """End it. Its engines go on."""
        self._child.close()


class VllmEngine:
    """One engine process.

    Args:
        host: forks the process.
        model: folder of the model.
        log: file for vLLM's output.
        extra: `kv_connector_extra_config`; None for an engine without a connector.
        one_process: scheduler and worker in the same process.
        settings: arguments of vLLM's `LLM`.
    """

    def __init__(
        self,
        host: VllmHost,
        model: Path,
        log: Path,
        extra: dict[str, Any] | None = None,
        *,
        one_process: bool = True,
        **settings: Any,
    ) -> None:
        self._id = uuid4().hex
        if extra is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "KVActorsConnector",
                "kv_connector_module_path": "kvactors.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
                "engine_id": self._id,
            }
        self.log = log
        self._connection = host.connect()
        number = self._connection.fileno()
        self._lines = Lines("vLLM", log, number, number)
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1"}
        first = self._lines.ask({"log": str(log), "variables": variables}, OPEN)
        self.pid = int(first["pid"])
        try:
            self.opened = self._ask(do="open", settings={"model": str(model)} | settings)
        except BaseException:
            self.discard()  # the caller has no engine that it could discard
            raise

    def _ask(self, **message: Any) -> dict[str, Any]:
        return dict(self._lines.ask(message, SERVE))

    def serve(
        self, wanted: Sequence[Prompt], *, max_tokens: int = 8, at_once: int | None = None
    ) -> Served:
        """Serve prompts greedily.

        Args:
            wanted: prompts.
            max_tokens: to sample for each.
            at_once: prompts that the engine has at once. None: all. A host tier that is smaller
                than the prompts that the engine has can fetch some of them only.
        """
        size = at_once or len(wanted)
        served = Served([], [])
        for first in range(0, len(wanted), size):
            some = list(wanted[first : first + size])
            answer = self._ask(do="generate", prompts=some, max_tokens=max_tokens)
            served = Served(served.tokens + answer["tokens"], served.cached + answer["cached"])
        return served

    def storm(
        self, wanted: Sequence[Prompt], *, seed: int, resets: bool, max_tokens: int
    ) -> dict[str, Any]:
        """Serve prompts that come and are cancelled at random steps.

        Args:
            wanted: prompts.
            seed: of the random steps.
            resets: whether the caches are reset at random steps, half of them of the connector too.
            max_tokens: to sample for each.

        Returns:
            `tokens` of each prompt, None if it was cancelled, and how many `resets`, `cancelled`
            requests and `steps` there were.
        """
        message = {"prompts": list(wanted), "max_tokens": max_tokens, "seed": seed}
        return self._ask(do="storm", resets=resets, **message)

    def reset(self, *, connector: bool = False) -> None:
        """Drop the device's prefix cache (and the connector's). vLLM refuses while a copy uses
        blocks: it takes steps until none does."""

        def reset() -> bool:
            done = bool(self._ask(do="reset", connector=connector)["reset"])
            if not done:
                self.serve([[5] * 8], max_tokens=1)  # less than a block
            return done

        wait_until("vLLM drops its caches", reset, SERVE)

    def zero_device(self) -> None:
        """Overwrite the device cache with zeros."""
        self._ask(do="zero_device")

    def regions(self) -> list[Path]:
        """The files of its host tier in shared memory."""
        return sorted(Path("/dev/shm").glob(f"vllm_offload_kvactors_{self._id}*.mmap*"))

    def zero_host(self) -> None:
        """Overwrite its host tier, which has one file, with zeros."""
        (path,) = self.regions()
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[:] = bytes(len(memory))

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges by name."""
        return {name: float(value) for name, value in self._ask(do="metrics").items()}

    def close(self) -> None:
        """Shut the engine down in good order and end the process."""
        self._ask(do="close")
        self.discard()

    def children(self) -> list[int]:
        """The processes that the engine has started, and those that they have started."""
        return descendants(self.pid)

    def kill(self) -> None:
        """kill -9, of the processes that it has started too."""
        for process in (self.pid, *self.children()):
            os.kill(process, signal.SIGKILL)
        self.discard()

    def discard(self) -> None:
        """Close the connection, which ends the process, and wait for its end."""
        self._connection.close()
        try:
            wait_until("the engine ends", lambda: not Path(f"/proc/{self.pid}").exists(), END)
        except InteropError:
            os.kill(self.pid, signal.SIGKILL)
