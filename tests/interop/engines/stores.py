"""Settings of kvactors in an engine, and damage to its stores and its host memory."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CHUNK_BYTES = 64 << 10
"""Bytes of a chunk of the tiny model: 32 tokens, 4 layers, keys and values, 2 heads of 32 floats."""
SHARED_MEMORY = Path("/dev/shm")


def offloading(host_chunks: int, directory: Path | None = None, **storage: Any) -> dict[str, Any]:
    """`kv_connector_extra_config` with `KVActorsOffloadingSpec`."""
    extra: dict[str, Any] = {
        "spec_name": "KVActorsOffloadingSpec",
        "spec_module_path": "kvactors.integrations.vllm",
        "cpu_bytes_to_use": host_chunks * CHUNK_BYTES,
    }
    if directory is not None:
        file = {"backend": "file", "directory": str(directory), "capacity_blocks": 400}
        extra["storage"] = file | storage
    return extra


def tiering(host_chunks: int, below: dict[str, Any]) -> dict[str, Any]:
    """`kv_connector_extra_config` with vLLM's host tier and a secondary tier below it."""
    return {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_tiering",
        "cpu_bytes_to_use": host_chunks * CHUNK_BYTES,
        "secondary_tiers": [below],
    }


def tier(host_chunks: int, directory: Path, **settings: Any) -> dict[str, Any]:
    """`tiering` with `KVActorsTier`."""
    below = {
        "type": "KVActorsTier",
        "module_path": "kvactors.integrations.vllm",
        "directory": str(directory),
        "capacity_blocks": 400,
    }
    return tiering(host_chunks, below | settings)


class Adapter(NamedTuple):
    """One of the adapters of vLLM.

    Attributes:
        make: `kv_connector_extra_config`, of the host tier's chunks, the folder, and settings of
            the storage.
        small: chunks of a host tier from which prompts are evicted. vLLM's own host tier must hold
            the prompts that the engine has at once, twice.
        keeps_storage: whether vLLM's reset of the connector leaves storage as it is.
    """

    make: Callable[..., dict[str, Any]]
    small: int
    keeps_storage: bool


ADAPTERS = {"spec": Adapter(offloading, 32, False), "tier": Adapter(tier, 64, True)}
PROCESSES = [("spec", True), ("tier", True), ("spec", False)]
"""Adapters, and whether scheduler and worker are one process. `KVActorsTier` works in the process of
the scheduler only."""


def vllm_files(host_chunks: int, directory: Path) -> dict[str, Any]:
    """`tiering` with vLLM's own file tier."""
    return tiering(host_chunks, {"type": "fs", "root_dir": str(directory)})


def regions() -> list[Path]:
    """The files of host tiers in shared memory."""
    return sorted(SHARED_MEMORY.glob("vllm_offload_kvactors_*.mmap*"))


def zero_host_memory() -> int:
    """Overwrite the host tiers of all engines on this machine with zeros. Returns their number."""
    found = regions()
    for path in found:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[:] = bytes(len(memory))
    return len(found)


def slabs(directory: Path) -> list[Path]:
    """The files that hold the bytes of chunks, of kvactors' store or of vLLM's file tier."""
    found = [*sorted(directory.rglob("slab-*")), *sorted(directory.rglob("*.bin"))]
    assert found, f"no chunks in {sorted(directory.rglob('*'))}"
    return found


def flip(directory: Path) -> None:
    """Flip bits in every 16 KiB of a store's chunks."""
    for path in slabs(directory):
        with path.open("r+b") as file:
            size = path.stat().st_size
            for position in range(4099, size, 16 << 10):
                file.seek(position)
                (byte,) = file.read(1)
                file.seek(position)
                file.write(bytes([byte ^ 0x40]))


def cut(directory: Path) -> None:
    """Cut the files of a store inside their 21st chunk."""
    for path in slabs(directory):
        with path.open("r+b") as file:
            file.truncate(20 * CHUNK_BYTES + CHUNK_BYTES // 3)


def delete(directory: Path) -> None:
    """Delete the files of a store's chunks."""
    for path in slabs(directory):
        path.unlink()


def small_file_system(folder: Path, mebibytes: int) -> Path:
    """Mount an empty file system in memory. It goes with the test's namespace."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "kvactors-test", str(folder)]
    subprocess.run(command, check=True)
    return folder


def free_bytes(folder: Path) -> int:
    """Bytes that a file system has left."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
