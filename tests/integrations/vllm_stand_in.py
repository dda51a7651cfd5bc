"""Stand-ins for the modules of vLLM that the adapter imports, so that it runs without vLLM. The
tests inside engines run it with vLLM itself."""

from __future__ import annotations

import importlib
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from tests.support.numa import bound_node

ADAPTER = "kvactors.integrations.vllm"
BASE = "vllm.v1.kv_offload.base"
REGION = "vllm.v1.kv_offload.cpu.shared_offload_region"
WORKER = "vllm.v1.kv_offload.cpu.gpu_worker"
PLATFORMS = "vllm.platforms"
CONFIG = "vllm.config"
MODULES = (
    BASE,
    REGION,
    WORKER,
    PLATFORMS,
    CONFIG,
    "vllm.v1.kv_offload.cpu.common",
    "vllm.v1.kv_offload.tiering.base",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics",
)


class Named(type):
    """A class whose attributes are their names, as those of an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_") or name != name.upper():
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class Value(metaclass=Named):
    """An object that keeps what it was made of."""

    def __init__(self, *values: Any, **named: Any) -> None:
        self.values, self.named = values, named


class Module(ModuleType):
    """A module that has every class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Named(name, (Value,), {})
        setattr(self, name, made)
        return made


class TransferResult(NamedTuple):
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class Spec:
    """vLLM's `OffloadingSpec`."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.blocks_per_chunk = config.cache.blocks_per_chunk
        self.kv_events_config = SimpleNamespace(enable_kv_cache_events=False)


class Region:
    """vLLM's `SharedOffloadRegion`, as far as it is used: a mapped file, whose pages it touches.

    Attributes:
        nodes: the NUMA node that the pages of each region came from.
    """

    folder: Path
    nodes: list[int | None]

    def __init__(
        self, engine_id: str, num_chunks: int, rank: int | None, row: int, worker: int
    ) -> None:
        path = self.folder / f"vllm_offload_{engine_id}.mmap"
        with path.open("a+b") as file:
            file.truncate(num_chunks * row)
            self.memory = mmap.mmap(file.fileno(), num_chunks * row)
        self.nodes.append(bound_node(None))

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.memory)

    def cleanup(self) -> None:
        with suppress(BufferError):  # the memory stays mapped while a view is left
            self.memory.close()


class Platform:
    """vLLM's `current_platform`."""

    def __init__(self, device_name: str, stream: int = 0) -> None:
        self.device_name = device_name
        self.stream = stream

    def is_cpu(self) -> bool:
        return self.device_name == "cpu"

    def is_cuda(self) -> bool:
        return self.device_name == "cuda"

    def current_stream(self) -> Any:
        return SimpleNamespace(cuda_stream=self.stream)


def engine_config(
    model: str = "tiny", *, use_mla: bool = False, caching: bool = True, **changes: Any
) -> Any:
    """vLLM's `VllmConfig`, as far as it is read.

    Args:
        model: name or folder.
        use_mla: whether the model has multi-head latent attention.
        caching: whether vLLM caches prefixes.
        changes: of the model's config, and `draft`, `extra` and `hashed_by`.
    """
    extra, hashed_by = changes.pop("extra", {}), changes.pop("hashed_by", "sha256")
    draft = changes.pop("draft", None)
    facts = {"quantization": None, "dtype": "float32", "hf_overrides": {}, "revision": None}
    return SimpleNamespace(
        model_config=SimpleNamespace(**facts | changes, model=model, use_mla=use_mla),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        cache_config=SimpleNamespace(
            enable_prefix_caching=caching, prefix_caching_hash_algo=hashed_by
        ),
        speculative_config=draft and SimpleNamespace(draft_model_config=draft.model_config),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
    )


@contextmanager
def stand_in(folder: Path, platform: Platform) -> Iterator[Any]:
    """The adapter's modules over stand-ins for vLLM's, with files of regions in a folder. Yields a
    call that imports a module of the adapter."""
    added: list[str] = []
    for full in MODULES:
        names = full.split(".")
        for count in range(1, len(names) + 1):
            name = ".".join(names[:count])
            if name not in sys.modules:
                sys.modules[name] = Module(name)
                added.append(name)
    base: Any = sys.modules[BASE]
    base.OffloadingSpec, base.TransferResult = Spec, TransferResult
    Region.folder, Region.nodes = folder, []
    sys.modules[CONFIG].get_current_vllm_config_or_none = engine_config  # type: ignore[attr-defined]
    sys.modules[REGION].SharedOffloadRegion = Region  # type: ignore[attr-defined]
    sys.modules[PLATFORMS].current_platform = platform  # type: ignore[attr-defined]

    def module(name: str) -> Any:
        found: Any = importlib.import_module(f"{ADAPTER}.{name}")
        return found

    module("region").FOLDER = folder
    try:
        yield module
    finally:
        needed = [f"{ADAPTER}.{name}" for name in ("region", "manager", "spec")]
        for name in [*added, *needed, f"{ADAPTER}.tier"]:
            sys.modules.pop(name, None)
