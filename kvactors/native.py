"""The native core under a name that says what to do when it was not built. Import from here, never from `_native`."""

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
        scatter,
        sha256_accelerated,
        touch,
    )
except ImportError as error:
    raise ImportError(
        "kvactors' native module is missing or does not load here; build it with: pip install . "
        "(in the source tree; needs a C++17 compiler)"
    ) from error

__all__ = [
    "DEVICE",
    "HOST",
    "KEY_BYTES",
    "LOADING",
    "OFFLOADING",
    "BlockTree",
    "Path",
    "chain_keys",
    "check_blocks",
    "copy_bytes",
    "fill_blocks",
    "gather",
    "scatter",
    "sha256_accelerated",
    "touch",
]
