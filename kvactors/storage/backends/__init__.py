"""Storage back ends behind one contract."""

from importlib import import_module
from typing import Any

from kvactors.config import StorageConfig
from kvactors.errors import ConfigError
from kvactors.storage.backends.base import Backend
from kvactors.storage.backends.file import FileBackend
from kvactors.storage.backends.memory import MemoryBackend
from kvactors.storage.backends.owned import OwnedBackend

__all__ = ["Backend", "FileBackend", "MemoryBackend", "OwnedBackend", "make_backend"]

KINDS = ("none", "memory", "file", "mooncake")


def make_backend(config: StorageConfig, fingerprint: bytes, block_bytes: int) -> Backend | None:
    """The store a config describes, None for none. A class of another package (`package.module:Class`) is called with the config, the
    fingerprint and the bytes of a block. Raises ConfigError, StoreError."""
    kind = config.backend
    if kind == "none":
        return None
    if kind == "memory":
        return MemoryBackend(fingerprint, block_bytes, config.capacity_blocks)
    if kind == "file":
        if not config.directory:
            raise ConfigError("storage.directory is needed with storage.backend = 'file'")
        return FileBackend(config.directory, fingerprint, block_bytes, config.capacity_blocks)
    if kind == "mooncake":
        from kvactors.storage.backends.mooncake import MooncakeBackend

        if config.exclusive:
            raise ConfigError("storage.exclusive has no meaning for a pool that other nodes share")
        return MooncakeBackend(config.mooncake, fingerprint, block_bytes)
    made: Any = backend_class(kind)(config, fingerprint, block_bytes)
    if not isinstance(made, Backend):
        raise ConfigError(f"storage.backend {kind!r} is not a Backend")
    return made


def backend_class(kind: str) -> Any:
    """A class by its module path. ConfigError if there is none."""
    module, _, name = kind.partition(":")
    if not name:
        raise ConfigError(f"unknown storage.backend {kind!r}; there are {', '.join(KINDS)}, and package.module:Class")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"storage.backend {kind!r} cannot be imported: {error}") from error
