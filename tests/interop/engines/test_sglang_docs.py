"""The command lines of docs/how-to/sglang.md, pasted into a shell: SGLang's server with kvactors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import INSIDE_NETWORK, ROOT
from tests.interop.engines.fleet import answers
from tests.interop.engines.sglang_child import TINY
from tests.interop.engines.sglang_engine import ENVIRONMENT, VARIABLES
from tests.interop.engines.test_sglang import PROMPTS, WHOLE
from tests.interop.engines.tiny_llama import write_model
from tests.interop.environments import Environments
from tests.interop.network import raise_loopback
from tests.interop.processes import Child

pytestmark = pytest.mark.engines_full

PAGE = ROOT / "docs" / "how-to" / "sglang.md"
PORT = 30000
START = 900.0
"""Seconds within which a server must answer. Only a hang takes as long."""
KEY = "admin"
FLAGS = ("skip_tokenizer_init", "disable_cuda_graph", "disable_overlap_schedule")


class Terminal:
    """A shell of a user with SGLang's environment.

    Args:
        environments: that have SGLang's.
        folder: of the model, the store and the logs.
    """

    def __init__(self, environments: Environments, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model")
        self._path = Path(environments.program(ENVIRONMENT)).parent
        self._server: Child | None = None

    def blocks(self, begin: str) -> list[str]:
        """The shell commands of the page that begin so, with this shell's paths."""
        found = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
        chosen = [block for block in found if block.startswith(begin)]
        assert chosen, begin
        return [
            block.replace("MODEL", str(self.model), 1).replace(
                "/var/cache/kvactors", str(self.folder / "store")
            )
            for block in chosen
        ]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables."""
        path = f"{self._path}:{os.environ['PATH']}"
        return os.environ | VARIABLES | {"PATH": path, "ADMIN_API_KEY": KEY}

    def serve(self, command: str) -> None:
        """Start a server with a command of the page, and wait until it answers. The options added
        are for a tiny model on a CPU."""
        options = {name: value for name, value in TINY.items() if name not in FLAGS}
        added = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
        added += [f"--{name.replace('_', '-')}" for name in FLAGS]
        added += [f"--host 127.0.0.1 --port {PORT} --admin-api-key {KEY}", "--enable-cache-report"]
        line = f"exec {command.strip()} {' '.join(added)}"
        log = self.folder / "server.log"
        self._server = Child("SGLang", ["bash", "-c", line], log, env=self.variables)
        until = time.monotonic() + START
        while not answers(self._server, f"http://127.0.0.1:{PORT}"):
            assert time.monotonic() < until, self._server.end_of_log()
            time.sleep(0.2)

    def run(self, command: str) -> str:
        """The output of a command of the page. It must succeed."""
        done = subprocess.run(
            ["bash", "-c", command.replace("curl ", "curl -sS --fail-with-body ", 1)],
            capture_output=True,
            text=True,
            env=self.variables,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def generate(self) -> list[tuple[list[int], int]]:
        """Sample for the prompts. Returns the tokens, and the cached tokens of each prompt."""
        found = []
        for prompt in PROMPTS:
            sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            answer = self.post("generate", {"input_ids": prompt, "sampling_params": sampling})
            found.append((answer["output_ids"], answer["meta_info"]["cached_tokens"]))
        return found

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer of the server to a request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())

    def flush(self) -> None:
        """Drop what the server has in memory, once it has nothing to do."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/flush_cache?timeout=60",
            method="POST",
            headers={"authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert answer.status == 200

    def stop(self) -> None:
        """End the server."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            time.sleep(1)


@pytest.fixture
def terminal(environments: Environments, tmp_path: Path) -> Iterator[Terminal | None]:
    """A shell in SGLang's environment."""
    if not INSIDE_NETWORK:
        yield None
        return
    raise_loopback()
    made = Terminal(environments, tmp_path)
    try:
        yield made
    finally:
        made.stop()


def test_the_commands_for_hicache(terminal: Terminal) -> None:
    hicache, _ = terminal.blocks("python -m sglang.launch_server")
    attach, clear, detach, metrics = terminal.blocks("curl")
    terminal.serve(hicache)
    computed = [tokens for tokens, _ in terminal.generate()]

    def cached() -> list[int]:
        terminal.flush()
        found = terminal.generate()
        terminal.flush()  # when the server has nothing to do
        assert [tokens for tokens, _ in found] == computed
        return [count for _, count in found]

    assert max(cached()) == WHOLE
    shown = terminal.run(metrics)
    for name in ("backup_pgs_count", "prefetch_pgs_count", 'cache_source="storage"'):
        assert re.search(rf"sglang:.*{name}.* [1-9]", shown), shown
    terminal.run(detach)
    assert max(cached()) <= 64
    terminal.run(attach)
    assert max(cached()) == WHOLE
    terminal.run(clear)
    assert max(cached()) <= 64


def test_the_commands_for_the_linker(terminal: Terminal) -> None:
    _, linker = terminal.blocks("python -m sglang.launch_server")
    terminal.serve(linker.replace("64GB", "64MB"))
    first = terminal.generate()
    terminal.flush()
    again = terminal.generate()
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
    assert min(count for _, count in again) == WHOLE
