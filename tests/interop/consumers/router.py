"""vLLM's router with the policy kv_aware, in front of stub workers that report which of them was
asked."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.interop.consumers.base import MODEL, Source
from tests.interop.environments import Environments
from tests.interop.processes import Child, call, wait_until
from tests.interop.workload import BLOCK, Prompt

PORT = 18100
ROUTER = f"http://127.0.0.1:{PORT}"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CREDITED = re.compile(r"KV prefix decision .*credited_prefix_tokens=(\d+)")


def router_command(
    environments: Environments,
    port: int,
    options: Sequence[str],
    workers: Sequence[tuple[str, str, str]],
) -> list[str]:
    """The command of vLLM's router, for which a block counts the same on every tier. `workers`:
    urls, and the endpoints of their events and of the replay."""
    program = environments.program("vllm_router", "vllm-router")
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--policy", "kv_aware"]
    command += ["--prometheus-port", str(port + 9), "--log-level", "debug", *options]
    for tier in ("host", "external", "disk"):
        command += [f"--kv-penalty-{tier}", "1"]
    command += ["--worker-urls", *(url for url, _, _ in workers)]
    for url, events, replay in workers:
        command += ["--kv-event-source", f"{url}={events}"]
        command += ["--kv-event-replay-source", f"{url}={replay}"]
    return command


def credited_tokens(router: Child, logged: int) -> int:
    """The tokens of a prompt that a router counts as cached, from its log after `logged` bytes."""
    credited: list[str] = []

    def decided() -> bool:
        with router.log.open("rb") as log:
            log.seek(logged)
            credited[:] = CREDITED.findall(COLOUR.sub("", log.read().decode()))
        return bool(credited)

    wait_until("the router logs its decision", decided)
    return int(credited[-1])


class StubWorker:
    """An OpenAI-compatible server that computes nothing: a completion's text is the worker's id."""

    def __init__(self, worker: int) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                models = {
                    "object": "list",
                    "data": [
                        {"id": MODEL, "object": "model", "root": MODEL, "max_model_len": 65536}
                    ],
                }
                self.reply(models if self.path.startswith("/v1/models") else {})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                choice = {"index": 0, "text": str(worker), "finish_reason": "length"}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                self.reply(
                    {
                        "id": "completion",
                        "object": "text_completion",
                        "model": MODEL,
                        "choices": [choice],
                        "usage": usage,
                    }
                )

            def reply(self, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()


class Routed(NamedTuple):
    """A worker behind the router."""

    source: Source
    stub: StubWorker


class Decision(NamedTuple):
    """worker: that got the prompt. credited: tokens of the prompt that the router counts as cached
    there."""

    worker: int
    credited: int


class Router:
    """The router in a child process, in front of one stub for each source."""

    name = "vLLM router"

    def __init__(self, environments: Environments, folder: Path, sources: Sequence[Source]) -> None:
        self.routed = [Routed(source, StubWorker(source.worker)) for source in sources]
        options = ["--kv-event-block-size", str(BLOCK), "--kv-event-model", MODEL]
        workers = [
            (one.stub.url, one.source.endpoint, one.source.replay_endpoint) for one in self.routed
        ]
        command = router_command(environments, PORT, options, workers)
        self.child = Child(self.name, command, folder / "router.log", env={"NO_COLOR": "1"})
        wait_until(f"{self.name} answers", lambda: self.child.answers(f"{ROUTER}/health"))

    def route(self, prompt: Prompt) -> Decision:
        """Send a prompt. Returns where it went, and why."""
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt.tokens, "max_tokens": 1}
        if prompt.salt is not None:
            body["cache_salt"] = prompt.salt
        logged = self.child.log.stat().st_size
        data = call(f"{ROUTER}/v1/completions", body)
        credited = credited_tokens(self.child, logged)
        return Decision(int(json.loads(data)["choices"][0]["text"]), credited)

    def close(self) -> None:
        """End the router and the stubs."""
        self.child.close()
        for one in self.routed:
            one.stub.close()
