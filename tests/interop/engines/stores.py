"""Settings of kvactors in vLLM, and damage to its stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHUNK_BYTES = 64 << 10
"""Bytes of a chunk of the tiny model: 32 tokens, 4 layers, keys and values, 2 heads of 32 floats."""


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


def tier(host_chunks: int, directory: Path) -> dict[str, Any]:
    """`kv_connector_extra_config` with vLLM's host tier, and `KVActorsTier` below it. vLLM's host
    tier must hold the prompts that the engine has at once, twice."""
    below = {
        "type": "KVActorsTier",
        "module_path": "kvactors.integrations.vllm",
        "directory": str(directory),
        "capacity_blocks": 400,
    }
    return {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_tiering",
        "cpu_bytes_to_use": host_chunks * CHUNK_BYTES,
        "secondary_tiers": [below],
    }


def flip(directory: Path, pattern: str = "slab-*") -> None:
    """Flip bits of a float's exponent in every 16 KiB of a store's objects."""
    found = sorted(directory.rglob(pattern))
    assert found, f"no objects in {sorted(directory.rglob('*'))}"
    for path in found:
        data = bytearray(path.read_bytes())
        data[4099 :: 16 << 10] = bytes(byte ^ 0x40 for byte in data[4099 :: 16 << 10])
        path.write_bytes(data)
