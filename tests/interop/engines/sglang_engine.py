"""An SGLang engine as a test sees it: a process that serves prompts of token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.interop.engines.vllm_engine import Prompt, Tokens
from tests.interop.environments import Environments, InteropError
from tests.interop.processes import MODULES, Child

CHILD = Path(__file__).with_name("sglang_child.py")
SITE = Path(__file__).with_name("sglang_site")
ENVIRONMENT = "sglang_cpu"
LIMIT = 900.0
"""Seconds within which an engine must start, or serve. Only a hang takes as long."""
PAGE_BYTES = 64 << 10
"""Bytes of a page of the tiny model: 32 tokens, 4 layers, keys and values, 2 heads of 32 floats."""

VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",  # threads that wait for each other are slow on a busy machine
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": f"{SITE}:{MODULES}",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tiny_models",
    "GLOO_SOCKET_IFNAME": "lo",
    "SGLANG_HOST_IP": "127.0.0.1",
}
HICACHE = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
}
"""Settings of SGLang's host pool."""


def file_store(directory: Path) -> dict[str, Any]:
    """Settings of a file store."""
    return {"backend": "file", "directory": str(directory), "capacity_blocks": 400}


def kvactors(directory: Path) -> dict[str, Any]:
    """`--hicache-storage-backend-extra-config` with `KVActorsHiCache`."""
    return {
        "backend_name": "kvactors",
        "module_path": "kvactors.integrations.sglang",
        "class_name": "KVActorsHiCache",
        "interface_v1": 1,
        "prefetch_threshold": 32,
        "storage": file_store(directory),
    }


def linker(host_pages: int, directory: Path) -> dict[str, Any]:
    """Settings of an engine with `KVActorsLinker`, so many pages of a host tier, and a store."""
    extra = {"host_bytes": host_pages * PAGE_BYTES, "storage": file_store(directory)}
    return {
        "hicache": False,
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "KVActorsLinker",
            "linker_module_path": "kvactors.integrations.sglang",
            "linker_extra_config": extra,
        },
    }


class Served(NamedTuple):
    """The answer of an engine.

    Attributes:
        tokens: see `Tokens`.
        cached: prompt tokens of each prompt that were not computed.
        sources: of those of each prompt, how many came from device, host and storage.
    """

    tokens: Tokens
    cached: list[int]
    sources: list[dict[str, int]]

    def total(self, source: str) -> int:
        """Prompt tokens that came from a source."""
        return sum(one[source] for one in self.sources)


class SglangEngine:
    """One engine process.

    Args:
        environments: that have SGLang's.
        model: folder of the model.
        log: file for SGLang's output.
        extra: `--hicache-storage-backend-extra-config`; None for an engine without storage.
        hicache: whether the engine has a host pool.
        variables: environment variables beside `VARIABLES`.
        settings: arguments of SGLang's `Engine`.
    """

    def __init__(
        self,
        environments: Environments,
        model: Path,
        log: Path,
        extra: dict[str, Any] | None = None,
        *,
        hicache: bool = True,
        variables: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        if hicache:
            settings = HICACHE | settings
        if extra is not None:
            settings["hicache_storage_backend"] = "dynamic"
            settings["hicache_storage_backend_extra_config"] = json.dumps(extra)
        self.log = log
        self._child = Child(
            "SGLang",
            [environments.program(ENVIRONMENT), "-P", str(CHILD)],
            log,
            lines=True,
            env=VARIABLES | (variables or {}),
        )
        try:
            self.opened = self._ask(do="open", settings={"model_path": str(model)} | settings)
        except BaseException:
            self.discard()  # the caller has no engine that it could discard
            raise

    def _ask(self, **message: Any) -> dict[str, Any]:
        return dict(self._child.ask(message, LIMIT))

    def serve(
        self,
        wanted: Sequence[Prompt],
        *,
        max_tokens: int = 8,
        cancel: dict[int, int] | None = None,
        at_once: int = 1,
    ) -> Served:
        """Serve prompts greedily.

        Args:
            wanted: prompts.
            max_tokens: to sample for each.
            cancel: by index of a prompt, the tokens after which its request is aborted.
            at_once: requests that the engine has at once.
        """
        answers = self._ask(
            do="generate",
            prompts=list(wanted),
            max_tokens=max_tokens,
            cancel=cancel,
            at_once=at_once,
        )["answers"]
        return Served(*([one[name] for one in answers] for name in Served._fields))

    def flush(self) -> bool:
        """Drop device and host pool. Returns whether SGLang did."""
        return bool(self._ask(do="flush")["flushed"])

    def clear_storage(self) -> bool:
        """Empty the storage. Returns whether SGLang did."""
        return bool(self._ask(do="clear_storage")["cleared"])

    def detach(self) -> None:
        """Close the storage."""
        self._control(do="detach")

    def attach(self, extra: dict[str, Any], backend: str = "dynamic") -> None:
        """Open a storage."""
        self._control(do="attach", backend=backend, extra=extra)

    def _control(self, **message: Any) -> None:
        found = self._ask(**message)
        if not found["success"]:
            raise InteropError(f"SGLang: {found['message']}\n{self._child.end_of_log()}")

    def logged(self, text: str) -> int:
        """How often a text is in SGLang's output."""
        return self.log.read_text(errors="replace").count(text)

    def close(self) -> None:
        """Shut the engine down in good order and end its processes."""
        self._ask(do="close")
        self.discard()

    def kill(self) -> None:
        """kill -9 of the engine's processes, all at once."""
        self._child.kill()
        self._child.close()

    discard = kill
