"""Every back end of ours keeps the contract."""

from __future__ import annotations

import errno
import os

import pytest

from kvactors.settings import StorageConfig
from kvactors.storage.factory import make_backend
from kvactors.storage.file import store
from kvactors.storage.file.layout import SlabFiles
from kvactors.storage.file.store import FileBackend
from kvactors.storage.memory import MemoryBackend
from kvactors.testing.store_contract import StoreContract

PRINT = bytes(range(32))


class TestMemory(StoreContract):
    async def make(self, folder, capacity):
        return MemoryBackend(PRINT, self.block_bytes, capacity)


class TestFile(StoreContract):
    async def make(self, folder, capacity):
        return FileBackend(folder, PRINT, self.block_bytes, capacity)


class TestFileOfWholePages(StoreContract):
    block_bytes = 8192

    async def make(self, folder, capacity):
        return FileBackend(folder, PRINT, self.block_bytes, capacity, depth=8)


class TestFileSynced(StoreContract):
    async def make(self, folder, capacity):
        return FileBackend(folder, PRINT, self.block_bytes, capacity, durability="synced")


class TestFileWithoutDirectIO(StoreContract):
    async def make(self, folder, capacity):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "SlabFiles", RefusesDirect)
            return FileBackend(folder, PRINT, self.block_bytes, capacity)


class RefusesDirect(SlabFiles):
    def _open_slab(self, number, *, create=True):
        real = os.open

        def refusing(path, flags, mode=0o777, *, dir_fd=None):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return real(path, flags, mode, dir_fd=dir_fd)

        os.open = refusing
        try:
            return super()._open_slab(number, create=create)
        finally:
            os.open = real


class Strangers(MemoryBackend):
    """A back end of another package: chosen by its module path, called with the config."""

    def __init__(self, config, fingerprint, block_bytes):
        super().__init__(fingerprint, block_bytes, config.capacity_blocks or 0)


class TestAStrangers(StoreContract):
    async def make(self, folder, capacity):
        config = StorageConfig(backend=f"{__name__}:Strangers", capacity_blocks=capacity or None)
        return make_backend(config, "m", PRINT, self.block_bytes)
