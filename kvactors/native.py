"""The native core under one name. The error for a missing native module explains the build."""

from __future__ import annotations

try:
    from kvactors._native import (
        DEVICE,
        HASH_BYTES,
        HOST,
        LOADING,
        OFFLOADING,
        BlockTree,
        CopyQueue,
        EventEncoder,
        FrameSender,
        Path,
        TreeCheck,
        TreeWalk,
        chain_hashes,
        check_blocks,
        copy_bytes,
        fill_blocks,
        gather,
        scatter,
        sha256_accelerated,
        touch,
    )
except ImportError as error:
    raise ImportError(
        "kvactors' native module is missing or was built for another Python. In a clone run `pip "
        "install -e .` (needs a C++17 "
        f"compiler). The source tree alone does not contain it: {error}"
    ) from error

__all__ = [
    "DEVICE",
    "HASH_BYTES",
    "HOST",
    "LOADING",
    "OFFLOADING",
    "BlockTree",
    "CopyQueue",
    "EventEncoder",
    "FrameSender",
    "Path",
    "TreeCheck",
    "TreeWalk",
    "chain_hashes",
    "check_blocks",
    "copy_bytes",
    "fill_blocks",
    "gather",
    "scatter",
    "sha256_accelerated",
    "touch",
]
