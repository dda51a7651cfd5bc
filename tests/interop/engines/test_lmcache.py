"""kvactors as an L2 adapter under LMCache's storage manager: no byte is wrong."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.engines import stores
from tests.interop.environments import Environments
from tests.interop.processes import MODULES, Child

pytestmark = pytest.mark.engines

CHILD = Path(__file__).with_name("lmcache_child.py")
ENVIRONMENT = "lmcache"
VARIABLES = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "LMCACHE_DISABLE_BANNER": "1",
    "PYTHONPATH": str(MODULES),
}
LIMIT = 600.0
"""Seconds of a call. Only a hang takes as long."""
BOTH = pytest.mark.parametrize("version", ["lmcache", "lmcache_next"])
"""The release of LMCache, and the pre-release of the next one."""
OBJECT = 2 * 4 * 64 * 256 * 2
"""Bytes of an object of the storage manager: 256 KiB."""
STATE = 3 * 500 * 2
"""Bytes of an object of a second group."""
ALL = list(range(32))


def adapter(directory: Path, **more: Any) -> dict[str, Any]:
    """The value of `--l2-adapter`, as docs/how-to/lmcache.md has it."""
    extra = {name: more.pop(name) for name in ("eviction", "serde") if name in more}
    params: dict[str, Any] = {"directory": str(directory), "capacity_bytes": "64MB"}
    params |= {"staging_bytes": "2MB", "page_bytes": 96 << 10, "timeout_s": 60}
    return {
        "type": "plugin",
        "module_path": "kvactors.integrations.lmcache",
        "class_name": "KVActorsL2",
        "adapter_params": params | more,
    } | extra


class Manager:
    """A process with a storage manager, over a store in a folder."""

    def __init__(self, process: Child, folder: Path) -> None:
        self._child, self._folder = process, folder

    def open(self, name: str = "store", *, quotas: Any = None, **more: Any) -> int:
        """Close the manager, if there is one, and start another one in the same process. Returns
        the objects that it has. `more`: of `adapter`."""
        self.ask("close")
        l2 = adapter(self._folder / name, **more)
        return int(self.ask("open", l2=l2, quotas=quotas)["stored"])

    def ask(self, do: str, **message: Any) -> dict[str, Any]:
        """One call. See `lmcache_child.Server`."""
        return dict(self._child.ask({"do": do} | message, LIMIT))

    def found(self, numbers: list[int], **more: Any) -> tuple[int, int]:
        """Prefetch after L1 was cleared. Returns hits and those whose bytes are right."""
        self.ask("clear")
        answer = self.ask("prefetch", numbers=numbers, **more)
        assert answer["l2"] == answer["hits"]
        return answer["hits"], answer["right"]


Start = Callable[..., Child]


@pytest.fixture(scope="module")
def start(
    environments: Environments, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Child]]:
    """Processes that have imported a version of LMCache. A killed one is started again."""
    made: dict[str, Child] = {}

    def process(version: str) -> Child:
        if version not in made or made[version].process.poll() is not None:
            log = tmp_path_factory.mktemp("lmcache") / "log"
            command = [environments.program(version), "-P", str(CHILD)]
            made[version] = Child("LMCache", command, log, lines=True, env=VARIABLES)
        return made[version]

    yield process
    for one in made.values():
        one.close()


@pytest.fixture
def manager(request: pytest.FixtureRequest, start: Start, tmp_path: Path) -> Iterator[Manager]:
    """A manager that is not open yet, of the release unless a test names a `version`."""
    named = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    made = Manager(start(named.get("version", ENVIRONMENT)), tmp_path)
    yield made
    made.ask("close")


@BOTH
def test_every_chunk_comes_back_after_a_restart_and_after_kill_9_and_none_after_damage(
    start: Start, tmp_path: Path, version: str
) -> None:
    process = start(version)
    manager = Manager(process, tmp_path)
    assert manager.open() == 0
    status = manager.ask("store", numbers=ALL)
    assert (status["stored_object_count"], status["is_healthy"]) == (32, True)
    assert manager.found(ALL) == (32, 32)
    assert manager.open() == 32
    assert manager.ask("usage")["bytes"] == 32 * OBJECT
    assert manager.found(ALL) == (32, 32)
    process.kill()
    process.close()
    process = start(version)
    manager = Manager(process, tmp_path)
    assert manager.open() == 32
    assert manager.found(ALL) == (32, 32)
    manager.ask("close")
    stores.flip(tmp_path / "store")
    manager.open()
    assert manager.found(ALL) == (0, 0)
    assert "corrupt object" in process.log.read_text()
    # the store works: what was not served is stored again
    manager.ask("clear")
    manager.ask("store", numbers=ALL)
    assert manager.found(ALL) == (32, 32)
    manager.ask("close")


@BOTH
def test_chunks_and_states_of_several_object_groups(manager: Manager, version: str) -> None:
    assert manager.open() == 0
    found = manager.ask("groups", numbers=ALL[:8])
    assert (found["hits"][0], found["hits"][1] >= 1, found["right"]) == (8, True, 9)
    assert found["bytes_used"] == 8 * (OBJECT + STATE)
    assert manager.open() == 16  # a restart
    found = manager.ask("groups", numbers=ALL[:8])
    assert (found["hits"][0], found["right"]) == (8, 9)


def test_a_store_that_is_too_small_alone_and_under_concurrent_requests(manager: Manager) -> None:
    manager.open(capacity_bytes=10 * 3 * (96 << 10))
    manager.ask("store", numbers=ALL[:8])
    assert manager.found(ALL[:8]) == (8, 8)
    status = manager.ask("store", numbers=list(range(100, 106)), wanted=10)
    assert status["stored_object_count"] == 10
    assert manager.found(list(range(100, 106))) == (6, 6)
    # a prefix keeps its beginning
    assert manager.found(ALL[:8]) == (4, 4)
    usage = manager.ask("usage")
    assert usage["bytes"] == 10 * OBJECT
    assert usage["bytes"] <= usage["capacity"]
    manager.open("other", capacity_bytes=40 * 3 * (96 << 10))
    found = manager.ask("mixed", threads=4, rounds=25, keys=20)
    assert (found["wrong"], found["locked_key_count"], found["tasks_in_flight"]) == (0, 0, 0)
    assert found["hits"] > 0
    assert found["l2"] > 0
    assert found["is_healthy"]


@BOTH
def test_identity_listing_and_serializers(manager: Manager, version: str) -> None:
    manager.open()
    manager.ask("store", numbers=ALL[:8], salt="one")
    assert manager.found(ALL[:8], salt="two") == (0, 0)
    assert manager.found(ALL[:8]) == (0, 0)
    assert manager.found(ALL[:8], salt="one", dtype="bfloat16") == (0, 0)
    assert manager.found(ALL[:8], salt="one") == (8, 8)
    listed = manager.ask("listed", page_size=3)
    assert (len(set(listed["keys"])), len(listed["keys"]), listed["pages"]) == (8, 8, 3)
    manager.open(namespace="other")
    assert manager.found(ALL[:8], salt="one") == (0, 0)
    manager.open()
    assert manager.found(ALL[:8], salt="one") == (8, 8)
    manager.open("serialized", serde={"type": "fp8"})
    manager.ask("store", numbers=ALL[:4])
    manager.ask("clear")
    assert manager.ask("prefetch", numbers=ALL[:4])["hits"] == 4


def test_the_eviction_of_lmcache_by_salt(manager: Manager) -> None:
    eviction = {"eviction_policy": "IsolatedLRU", "trigger_watermark": 1.0, "eviction_ratio": 0.5}
    manager.open()
    manager.ask("store", numbers=ALL[:8], salt="one")
    manager.ask("store", numbers=ALL[:8], salt="two", wanted=16)
    assert manager.ask("usage")["by_salt"] == {"one": 8 * OBJECT, "two": 8 * OBJECT}
    # the objects from before are accounted, and evicted from the end of the prefix
    manager.open(eviction=eviction, quotas={"one": 5 * OBJECT, "two": 100 * OBJECT})
    usage = manager.ask("wait_usage", salt="one", most=4 * OBJECT)
    assert usage["by_salt"] == {"one": 4 * OBJECT, "two": 8 * OBJECT}
    assert manager.found(ALL[:8], salt="one") == (4, 4)


def test_the_checks_of_lmcache(environments: Environments, tmp_path: Path) -> None:
    line = ["-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--num-keys", "50"]
    line += ["--l2-adapter", json.dumps(adapter(tmp_path / "store")), "--obj-size", "40000"]
    done = subprocess.run(
        [environments.program(ENVIRONMENT), *line],
        env=os.environ | VARIABLES | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    for shown in (": 50/50 correctly absent", ": 50/50 found", " (content): 50/50"):
        assert f"Validation{shown}" in done.stdout
    assert "Batch store OK" in done.stdout
