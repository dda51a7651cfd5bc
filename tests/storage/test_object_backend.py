"""Object stores and shared folders: the contract, nodes that share one, and what can go wrong. The
S3 server is a real one, in its own process."""

from __future__ import annotations

import itertools

import pytest

from kvactors.identity import StoreIdentity
from kvactors.settings import StorageConfig
from kvactors.storage.object import ObjectBackend
from kvactors.testing.store_contract import StoreContract
from tests.support.s3 import CREDENTIALS, s3_server

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server():
    with s3_server() as one:
        yield one


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def in_folder(folder, **more):
    return {"backend": "object", "url": f"file://{folder}", **more}


class OfObjects(StoreContract):
    evicts = False

    async def make(self, folder, capacity):
        folder.mkdir(exist_ok=True)
        storage = StorageConfig(**self.storage(folder))
        return ObjectBackend(storage, StoreIdentity("m", "n", bytes(32)), self.block_bytes)


class TestInABucket(OfObjects):
    @pytest.fixture(autouse=True)
    def _at(self, server):
        self.server = server

    def storage(self, folder):
        return self.server.storage(str(folder).lstrip("/"), timeout_s=30.0)


class TestInAFolder(OfObjects):
    storage = staticmethod(in_folder)
