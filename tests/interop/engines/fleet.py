"""Two vLLM servers with kvactors as their host tier, behind vLLM's router."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.interop.consumers.base import wait_until
from tests.interop.consumers.router import COLOUR, CREDITED
from tests.interop.engines.stores import offloading
from tests.interop.engines.vllm_child import TINY
from tests.interop.engines.vllm_engine import ENVIRONMENT, VARIABLES, descendants
from tests.interop.environments import Environments
from tests.interop.processes import Child

MODEL = "tiny"
START = 600.0
"""Seconds within which a server must answer. Only a hang takes as long."""
ROUTER_PORT = 18200
ROUTER = f"http://127.0.0.1:{ROUTER_PORT}"


def post(url: str, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> Any:
    """Complete a prompt of token ids. Returns the answer."""
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    body |= options
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START) as answer:
        return json.loads(answer.read())


def complete(url: str, prompt: Sequence[int]) -> list[int]:
    """The tokens that a server samples. vLLM's router ignores prefixes of such a request."""
    return list(post(url, prompt, return_token_ids=True)["choices"][0]["token_ids"])


def answers(child: Child, url: str) -> bool:
    """Whether a server is up."""
    child.check()
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Server:
    """An OpenAI-compatible server of vLLM that publishes KV events.

    Args:
        environments: that have vLLM's.
        model: folder of the model.
        folder: for its log and its store.
        port: of the server. The events have the two ports after it.
        storage: settings below the host tier in place of a file store.
        environment: that the server runs in.
        host: the address that it listens at.
        prefix: a command that runs it, for example `nsenter`.
    """

    def __init__(
        self,
        environments: Environments,
        model: Path,
        folder: Path,
        port: int,
        storage: dict[str, Any] | None = None,
        environment: str = ENVIRONMENT,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        self.url = f"http://{host}:{port}"
        self.events, self.replay = (f"tcp://{host}:{port + i}" for i in (1, 2))
        # vLLM's publisher binds to wildcards, and connects to other endpoints
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port + 1}",
            "replay_endpoint": f"tcp://*:{port + 2}",
            "topic": "",
        }
        transfer: dict[str, Any] = {
            "kv_connector": "KVActorsConnector",
            "kv_connector_module_path": "kvactors.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": offloading(256, folder / f"store-{port}")
            | {"self_describing_kv_events": True},
        }
        if storage is not None:
            transfer["kv_connector_extra_config"]["storage"] = storage
        self._command = [
            *prefix,
            environments.program(environment),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", MODEL),
            *("--host", host, "--port", str(port)),
            "--enforce-eager",
            "--skip-tokenizer-init",
            *("--kv-events-config", json.dumps(events)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        names = ("dtype", "max_model_len", "block_size", "num_gpu_blocks_override", "seed")
        for name in (*names, "max_num_seqs"):
            self._command += [f"--{name.replace('_', '-')}", str(TINY[name])]
        self._log = folder / f"server-{port}.log"
        self.start()

    def start(self) -> None:
        """Start it, also again."""
        self.child = Child(f"server {self.url}", self._command, self._log, env=VARIABLES)

    def wait(self) -> None:
        """Return when it answers."""
        wait_until(f"{self.url} answers", lambda: answers(self.child, self.url), START)

    def kill(self) -> None:
        """kill -9, of the processes that it has started too."""
        for process in descendants(self.child.process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.child.kill()

    def close(self) -> None:
        """End the process of the last start."""
        self.child.close()

    def metric(self, name: str) -> float:
        """A counter, summed over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=START) as answer:
            text = answer.read().decode()
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
        return sum(map(float, values))


class FleetRouter:
    """vLLM's router with the policy kv_aware, in front of servers."""

    def __init__(self, environments: Environments, folder: Path, servers: Sequence[Server]) -> None:
        command: list[Any] = [
            environments.program("vllm_router", "vllm-router"),
            *("--host", "127.0.0.1", "--port", str(ROUTER_PORT), "--policy", "kv_aware"),
            *("--kv-event-block-size", str(TINY["block_size"]), "--kv-event-model", MODEL),
            *("--prometheus-port", str(ROUTER_PORT + 9), "--log-level", "debug"),
            *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "60"),
            *("--cb-timeout-duration-secs", "2"),
            *("--worker-urls", *(server.url for server in servers)),
        ]
        for server in servers:
            command += ["--kv-event-source", f"{server.url}={server.events}"]
            command += ["--kv-event-replay-source", f"{server.url}={server.replay}"]
        log = folder / "fleet-router.log"
        self.child = Child("vLLM's router", command, log, env={"NO_COLOR": "1"})

    def wait(self) -> None:
        """Return when it answers."""
        wait_until("the router answers", lambda: answers(self.child, ROUTER), START)

    def route(self, prompt: Sequence[int]) -> int:
        """Complete a prompt through the router. Returns the tokens that it takes for cached."""
        logged = self.child.log.stat().st_size
        post(ROUTER, prompt)
        credited: list[str] = []

        def decided() -> bool:
            with self.child.log.open("rb") as log:
                log.seek(logged)
                credited[:] = CREDITED.findall(COLOUR.sub("", log.read().decode()))
            return bool(credited)

        wait_until("the router logs its decision", decided)
        return int(credited[-1])
