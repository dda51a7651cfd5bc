"""Two vLLM servers with kvactors as their host tier, behind vLLM's router."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.interop.consumers.router import credited_tokens, router_command
from tests.interop.engines.stores import offloading
from tests.interop.engines.vllm_child import TINY
from tests.interop.engines.vllm_engine import VARIABLES
from tests.interop.environments import Environments
from tests.interop.processes import Child, call, wait_until

MODEL = "tiny"
START = 1200.0
"""Seconds within which a server must answer. Only a hang takes as long."""
ROUTER_PORT = 18200
ROUTER = f"http://127.0.0.1:{ROUTER_PORT}"


def complete(url: str, prompt: Sequence[int], **options: Any) -> Any:
    """Complete a prompt of token ids. Returns the answer."""
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 4, "temperature": 0}
    return json.loads(call(f"{url}/v1/completions", body | options, limit=START))


def sampled(url: str, prompt: Sequence[int]) -> list[int]:
    """The tokens that a server samples. vLLM's router ignores prefixes of such a request."""
    return list(complete(url, prompt, return_token_ids=True)["choices"][0]["token_ids"])


class Server:
    """An OpenAI-compatible server of vLLM that publishes KV events.

    Args:
        environments: that have vLLM's.
        model: folder of the model.
        folder: for its log and its store.
        port: of the server. The events have the two ports after it.
        storage: settings below the host tier.
    """

    def __init__(
        self,
        environments: Environments,
        model: Path,
        folder: Path,
        port: int,
        storage: dict[str, Any],
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.events, self.replay = (f"tcp://127.0.0.1:{port + i}" for i in (1, 2))
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
            "kv_connector_extra_config": offloading(256)
            | {"storage": storage, "self_describing_kv_events": True},
        }
        command = [
            environments.program("vllm_pool"),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(port)),
            "--enforce-eager",
            "--skip-tokenizer-init",
            *("--kv-events-config", json.dumps(events)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        names = ("dtype", "max_model_len", "block_size", "num_gpu_blocks_override", "seed")
        for name in (*names, "max_num_seqs"):
            command += [f"--{name.replace('_', '-')}", str(TINY[name])]
        log = folder / f"server-{port}.log"
        self.child = Child(f"server {self.url}", command, log, env=VARIABLES)

    def wait(self) -> None:
        """Return when it answers."""
        wait_until(f"{self.url} answers", lambda: self.child.answers(f"{self.url}/health"), START)

    def metric(self, name: str) -> float:
        """A counter, summed over its labels."""
        text = call(f"{self.url}/metrics", limit=START).decode()
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
        return sum(map(float, values))


class FleetRouter:
    """vLLM's router with the policy kv_aware, in front of servers."""

    def __init__(self, environments: Environments, folder: Path, servers: Sequence[Server]) -> None:
        options = ["--kv-event-block-size", str(TINY["block_size"]), "--kv-event-model", MODEL]
        options += ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "60"]
        options += ["--cb-timeout-duration-secs", "2"]
        workers = [(server.url, server.events, server.replay) for server in servers]
        command = router_command(environments, ROUTER_PORT, options, workers)
        log = folder / "fleet-router.log"
        self.child = Child("vLLM's router", command, log, env={"NO_COLOR": "1"})

    def wait(self) -> None:
        """Return when it answers."""
        wait_until("the router answers", lambda: self.child.answers(f"{ROUTER}/health"), START)

    def route(self, prompt: Sequence[int]) -> int:
        """Complete a prompt through the router. Returns the tokens that it takes for cached."""
        logged = self.child.log.stat().st_size
        complete(ROUTER, prompt)
        return credited_tokens(self.child, logged)
