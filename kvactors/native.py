"""The native core under one name. A missing native module is an error that says how to build it."""

from __future__ import annotations

try:
    from kvactors._native import (
        DEVICE,
        HOST,
        KEY_BYTES,
        LOADING,
        OFFLOADING,
        BlockTree,
        Path,
        chain_keys,
        check_blocks,
        copy_bytes,
        fill_blocks,
        gather,
        pack_tokens,
        scatter,
        sha256_accelerated,
        touch,
    )  # fmt: skip
except ImportError as error:
    raise ImportError(
        "kvactors' native module is missing or does not fit this Python; build it with `pip install .` in a clone of the "
        f"repository (needs a C++17 compiler): {error}"
    ) from error

__all__ = [
    "DEVICE", "HOST", "KEY_BYTES", "LOADING", "OFFLOADING", "BlockTree", "Path", "chain_keys", "check_blocks", "copy_bytes",
    "fill_blocks", "gather", "pack_tokens", "scatter", "sha256_accelerated", "touch",
]  # fmt: skip
