"""A vLLM engine as a test sees it: a process that serves prompts of token ids."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.interop.consumers.base import wait_until
from tests.interop.environments import Environments, InteropError
from tests.interop.processes import Child

CHILD = Path(__file__).with_name("vllm_child.py")
MODULES = Path(__file__).with_name("modules")
"""Python modules that an engine imports by name."""
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
        steps: steps of the engine.
    """

    tokens: Tokens
    cached: list[int]
    steps: int

    @property
    def digest(self) -> str:
        """Identifies the tokens."""
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:16]


def prompts(count: int, length: int = 320, shared: int = 64, seed: int = 1) -> list[Prompt]:
    """Random prompts of `length` tokens with `shared` tokens in common."""
    draw = random.Random(seed)
    start = [draw.randrange(3, 1000) for _ in range(shared)]
    return [start + [draw.randrange(3, 1000) for _ in range(length - shared)] for _ in range(count)]


def descendants(process: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    found = [process]
    for each in found:
        tasks = Path(f"/proc/{each}/task").glob("*/children")
        found += [int(child) for task in tasks for child in task.read_text().split()]
    return found[1:]


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
        self._name = f"vllm-{version}"  # names of sockets are those of the test's network
        command = [environments.program(ENVIRONMENT), "-P", str(CHILD), self._name]
        self._child = Child("vLLM", command, folder / f"{self._name}.log", env=variables)

    def fork(self, log: Path, variables: dict[str, str]) -> Fork:
        """A new process.

        Args:
            log: file for its output.
            variables: of its environment, beside those of the host.
        """
        connection = socket.socket(socket.AF_UNIX)
        try:
            wait_until("vLLM is imported", lambda: self._connects(connection), OPEN)
            return Fork(connection, log, variables)
        except BaseException:
            connection.close()
            raise

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


class Fork:
    """One process that a host has forked."""

    def __init__(self, connection: socket.socket, log: Path, variables: dict[str, str]) -> None:
        self.log = log
        self._connection = connection
        self._unread = b""
        self.pid = int(self.ask({"log": str(log), "variables": variables}, OPEN)["pid"])

    def ask(self, message: dict[str, Any], limit: float) -> dict[str, Any]:
        """Send a line and return its answer.

        Raises:
            InteropError: the process ends, does not answer within `limit` seconds, or answers with
                an error.
        """
        self._connection.settimeout(limit)
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
            while b"\n" not in self._unread:
                data = self._connection.recv(1 << 20)
                if not data:
                    raise InteropError(f"vLLM ended:\n{self.end_of_log()}")
                self._unread += data
        except OSError as error:
            raise InteropError(f"vLLM: {error}\n{self.end_of_log()}") from None
        line, _, self._unread = self._unread.partition(b"\n")
        answer = dict(json.loads(line))
        if "error" in answer:
            raise InteropError(f"vLLM: {answer['error']}\n{self.end_of_log()}")
        return answer

    def end_of_log(self) -> str:
        """The last lines of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def close(self) -> None:
        """Close the connection, which ends the process, and wait for its end."""
        self._connection.close()
        try:
            wait_until("the engine ends", lambda: not Path(f"/proc/{self.pid}").exists(), END)
        except InteropError:
            os.kill(self.pid, signal.SIGKILL)


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
        if extra is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "KVActorsConnector",
                "kv_connector_module_path": "kvactors.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        self.log = log
        self._fork = host.fork(log, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1"})
        try:
            self.opened = self._ask(OPEN, do="open", settings={"model": str(model)} | settings)
        except InteropError:
            self._fork.close()
            raise

    def _ask(self, limit: float, **message: Any) -> dict[str, Any]:
        return self._fork.ask(message, limit)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._fork.pid

    def serve(
        self,
        wanted: Sequence[Prompt],
        *,
        max_tokens: int = 8,
        cancel: dict[int, int] | None = None,
        at_once: int | None = None,
    ) -> Served:
        """Serve prompts greedily.

        Args:
            wanted: prompts.
            max_tokens: to sample for each.
            cancel: by index of a prompt, the engine steps after which its request is aborted.
            at_once: prompts that the engine has at once. None: all. A host tier that is smaller
                than the prompts that the engine has can fetch some of them only.
        """
        size = at_once or len(wanted)
        served = Served([], [], 0)
        for first in range(0, len(wanted), size):
            message = {"prompts": list(wanted[first : first + size]), "cancel": cancel}
            answer = self._ask(SERVE, do="generate", max_tokens=max_tokens, **message)
            served = Served(
                served.tokens + answer["tokens"],
                served.cached + answer["cached"],
                served.steps + answer["steps"],
            )
        return served

    def storm(
        self, wanted: Sequence[Prompt], *, seed: int, resets: bool, max_tokens: int = 8
    ) -> dict[str, Any]:
        """Serve prompts that come and are cancelled at random steps, with resets of the caches at
        random steps.

        Args:
            wanted: prompts.
            seed: of the random steps.
            resets: whether there are resets, half of them of the connector too.
            max_tokens: to sample for each.

        Returns:
            `tokens` of each prompt, None if it was cancelled, and how many `resets`, `cancelled`
            requests and `steps` there were.
        """
        message = {"prompts": list(wanted), "max_tokens": max_tokens, "seed": seed}
        return self._ask(SERVE, do="storm", resets=resets, **message)

    def reset(self, *, connector: bool = False) -> bool:
        """Drop the device's prefix cache (and the connector's). Returns whether vLLM did."""
        return bool(self._ask(SERVE, do="reset", connector=connector)["reset"])

    def zero_device(self) -> None:
        """Overwrite the device cache with zeros."""
        self._ask(SERVE, do="zero_device")

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges by name."""
        return {name: float(value) for name, value in self._ask(SERVE, do="metrics").items()}

    def close(self) -> None:
        """Shut the engine down in good order and end the process."""
        self._ask(SERVE, do="close")
        self._fork.close()

    def children(self) -> list[int]:
        """The processes that the engine has started, and those that they have started."""
        return descendants(self.pid)

    def kill(self) -> None:
        """kill -9, of the processes that it has started too."""
        for process in (self.pid, *self.children()):
            os.kill(process, signal.SIGKILL)
        self._fork.close()

    def discard(self) -> None:
        """End the process however it is."""
        self._fork.close()
