"""The command lines of docs/how-to/sglang.md, pasted into a shell: SGLang's server with kvactors."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import ROOT
from tests.interop.engines.sglang_child import TINY
from tests.interop.engines.sglang_engine import ENVIRONMENT, LIMIT, VARIABLES
from tests.interop.engines.test_sglang import PROMPTS, WHOLE
from tests.interop.engines.tiny_llama import write_model
from tests.interop.environments import Environments
from tests.interop.processes import Child, call, wait_until

pytestmark = pytest.mark.engines_full

PAGE = ROOT / "docs" / "how-to" / "sglang.md"
SERVER = "http://127.0.0.1:30000"
KEY = "admin"
FLAGS = ("skip_tokenizer_init", "disable_cuda_graph", "disable_overlap_schedule")


class Terminal:
    """A shell of a user with SGLang's environment.

    Args:
        environments: that have SGLang's.
        folder: of the model, the store and the logs.
    """

    server: Child | None = None

    def __init__(self, environments: Environments, folder: Path) -> None:
        path = f"{Path(environments.program(ENVIRONMENT)).parent}:{os.environ['PATH']}"
        self._variables = os.environ | VARIABLES | {"PATH": path, "ADMIN_API_KEY": KEY}
        self._folder = folder
        self._model = write_model(folder / "model")

    def blocks(self, begin: str) -> list[str]:
        """The shell commands of the page that begin so, with this shell's paths."""
        found = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
        chosen = [block for block in found if block.startswith(begin)]
        store = str(self._folder / "store")
        return [
            block.replace("MODEL", str(self._model), 1).replace("/var/cache/kvactors", store)
            for block in chosen
        ]

    def serve(self, command: str) -> None:
        """Start a server with a command of the page, and wait until it answers. The options added
        are for a tiny model on a CPU."""
        added = [
            f"--{name.replace('_', '-')}" + ("" if name in FLAGS else f" {value}")
            for name, value in TINY.items()
        ]
        added += [f"--host 127.0.0.1 --port 30000 --admin-api-key {KEY} --enable-cache-report"]
        line = f"exec {command.strip()} {' '.join(added)}"
        log = self._folder / "server.log"
        server = self.server = Child("SGLang", ["bash", "-c", line], log, env=self._variables)
        wait_until("the server answers", lambda: server.answers(f"{SERVER}/health"), LIMIT)

    def run(self, command: str) -> str:
        """The output of a command of the page. It must succeed."""
        line = command.replace("curl ", "curl -sS --fail-with-body ", 1)
        done = subprocess.run(
            ["bash", "-c", line],
            capture_output=True,
            text=True,
            env=self._variables,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The answer of the server to a request."""
        return call(f"{SERVER}/{path}", body, limit=300.0, authorization=f"Bearer {KEY}")

    def generate(self) -> tuple[list[list[int]], list[int]]:
        """Sample for the prompts, and drop what the server has in memory. Returns the tokens, and
        the cached tokens of each prompt."""
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        found = [
            json.loads(self.post("generate", {"input_ids": prompt, "sampling_params": sampling}))
            for prompt in PROMPTS
        ]
        self.post("flush_cache?timeout=60", {})
        cached = [one["meta_info"]["cached_tokens"] for one in found]
        return [one["output_ids"] for one in found], cached


@pytest.fixture
def terminal(environments: Environments, tmp_path: Path) -> Iterator[Terminal]:
    """A shell in SGLang's environment."""
    made = Terminal(environments, tmp_path)
    yield made
    if made.server is not None:
        made.server.close()


def test_the_commands_for_hicache(terminal: Terminal) -> None:
    hicache, _ = terminal.blocks("python -m sglang.launch_server")
    attach, clear, detach, metrics = terminal.blocks("curl")
    terminal.serve(hicache)
    computed, _ = terminal.generate()

    def cached() -> int:
        tokens, found = terminal.generate()
        assert tokens == computed
        return max(found)

    assert cached() == WHOLE
    shown = terminal.run(metrics)
    for name in ("backup_pgs_count", "prefetch_pgs_count", 'cache_source="storage"'):
        assert re.search(rf"sglang:.*{name}.* [1-9]", shown), shown
    terminal.run(detach)
    assert cached() <= 64
    terminal.run(attach)
    assert cached() == WHOLE
    terminal.run(clear)
    assert cached() <= 64


def test_the_commands_for_the_linker(terminal: Terminal) -> None:
    _, linker = terminal.blocks("python -m sglang.launch_server")
    terminal.serve(linker.replace("64GB", "64MB"))
    first, _ = terminal.generate()
    again, cached = terminal.generate()
    assert again == first
    assert min(cached) == WHOLE
