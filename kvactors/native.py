"""The native core under one name. The error for a missing native module explains the build."""

from __future__ import annotations

import kvactors.linux  # noqa: F401  (names the reason on another system)
from kvactors.unbuilt import native_missing

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
        LifeTables,
        Path,
        SlabQueue,
        StepTokens,
        TreeCheck,
        TreeWalk,
        addresses,
        chain_hashes,
        check_blocks,
        check_headers,
        copy_bytes,
        fill_blocks,
        gather,
        make_headers,
        object_names,
        scatter,
        sha256_accelerated,
        slot_pointers,
        touch,
        work_in_background,
        xxh3_64,
    )
except ImportError as error:
    raise ImportError(native_missing(str(error))) from error

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
    "LifeTables",
    "Path",
    "SlabQueue",
    "StepTokens",
    "TreeCheck",
    "TreeWalk",
    "addresses",
    "chain_hashes",
    "check_blocks",
    "check_headers",
    "copy_bytes",
    "fill_blocks",
    "gather",
    "make_headers",
    "object_names",
    "scatter",
    "sha256_accelerated",
    "slot_pointers",
    "touch",
    "work_in_background",
    "xxh3_64",
]
