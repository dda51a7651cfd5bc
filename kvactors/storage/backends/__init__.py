"""Storage back ends behind one contract."""

from kvactors.config import StorageConfig
from kvactors.errors import ConfigError
from kvactors.storage.backends.base import Backend
from kvactors.storage.backends.file import FileBackend
from kvactors.storage.backends.memory import MemoryBackend

__all__ = ["Backend", "FileBackend", "MemoryBackend", "make_backend"]


def make_backend(config: StorageConfig, fingerprint: bytes, block_bytes: int) -> Backend | None:
    """The store a config describes, None for none. Raises ConfigError."""
    if config.backend == "none":
        return None
    if config.backend == "memory":
        return MemoryBackend(fingerprint, block_bytes, config.capacity_blocks)
    if not config.directory:
        raise ConfigError("storage.directory is needed with storage.backend = 'file'")
    return FileBackend(config.directory, fingerprint, block_bytes, config.capacity_blocks)
