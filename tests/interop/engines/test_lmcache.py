"""kvactors as an L2 adapter under LMCache's storage manager: no byte is wrong."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import INSIDE_NETWORK
from tests.interop.engines import lmcache_server, stores
from tests.interop.engines.lmcache_server import VARIABLES
from tests.interop.environments import Environments, InteropError
from tests.interop.network import raise_loopback
from tests.interop.processes import Child

pytestmark = pytest.mark.engines

CHILD = Path(__file__).with_name("lmcache_child.py")
BOTH = pytest.mark.parametrize("python", ["lmcache", "lmcache_next"], indirect=True)
"""Under the release of LMCache, and the pre-release of the next one."""
LIMIT = 1200.0
"""Seconds of a call. Only a hang takes as long."""

OBJECT = 2 * 4 * 64 * 256 * 2
"""Bytes of an object: 256 KiB."""
ALL = list(range(32))


def adapter(directory: Path, **more: Any) -> dict[str, Any]:
    """The value of `--l2-adapter`."""
    extra = {name: more.pop(name) for name in ("eviction", "serde") if name in more}
    params = {"page_bytes": 96 << 10, "timeout_s": 60}
    return lmcache_server.adapter(directory, **params | more) | extra


class Manager:
    """A process with a storage manager."""

    def __init__(self, python: str, log: Path, l2: dict[str, Any]) -> None:
        self._child = Child("LMCache", [python, "-P", str(CHILD)], log, lines=True, env=VARIABLES)
        self.opened = self.ask("open", l2=l2)

    def reopen(self, directory: Path, **more: Any) -> None:
        """Close the manager and start another one in the same process. The arguments are those of
        `adapter`."""
        self.ask("close")
        self.opened = self.ask("open", l2=adapter(directory, **more))

    def ask(self, do: str, **message: Any) -> dict[str, Any]:
        """One call. See `lmcache_child.Server`."""
        return dict(self._child.ask({"do": do} | message, LIMIT))

    def found(self, numbers: list[int], **more: Any) -> tuple[int, int]:
        """Prefetch after L1 was cleared. Returns hits and those whose bytes are right."""
        self.ask("clear")
        answer = self.ask("prefetch", numbers=numbers, **more)
        assert answer["l2"] == answer["hits"]
        return answer["hits"], answer["right"]

    def close(self) -> None:
        """Close the manager, then end the process."""
        self.ask("close")
        self.discard()

    def kill(self) -> None:
        """kill -9."""
        self._child.kill()

    def discard(self) -> None:
        """End the process in any state."""
        self._child.close()


Start = Callable[..., Manager]


@pytest.fixture
def python(request: pytest.FixtureRequest, environments: Environments) -> str:
    """The Python of an environment, that of the release unless a test names one."""
    name = getattr(request, "param", "lmcache")
    return environments.program(name) if INSIDE_NETWORK else ""


@pytest.fixture
def start(python: str, tmp_path: Path) -> Iterator[Start | None]:
    """Starts storage managers over a store in `tmp_path`. The arguments are those of `adapter`."""
    if not INSIDE_NETWORK:
        yield None
        return
    raise_loopback()
    made: list[Manager] = []

    def start_one(directory: Path = tmp_path / "store", **more: Any) -> Manager:
        log = tmp_path / f"lmcache-{len(made)}.log"
        made.append(Manager(python, log, adapter(directory, **more)))
        return made[-1]

    try:
        yield start_one
    finally:
        for one in made:
            one.discard()


@BOTH
def test_every_chunk_comes_back_at_once_after_a_restart_and_after_kill_9(start: Start) -> None:
    manager = start()
    assert manager.opened["stored"] == 0
    status = manager.ask("store", numbers=ALL)["status"]
    assert (status["stored_object_count"], status["is_healthy"]) == (32, True)
    assert manager.found(ALL) == (32, 32)
    assert manager.ask("idle")["locked_key_count"] == 0
    manager.close()
    again = start()
    assert again.opened["stored"] == 32
    assert again.ask("usage")["bytes"] == 32 * OBJECT
    assert again.found(ALL) == (32, 32)
    assert again.ask("store", numbers=[100, 101], wanted=34)["written"] == 2
    again.kill()
    after_kill = start()
    assert after_kill.opened["stored"] == 34
    assert after_kill.found([100, 101]) == (2, 2)
    assert after_kill.found(ALL) == (32, 32)
    after_kill.close()


@BOTH
def test_damaged_stores_serve_no_wrong_byte(start: Start, tmp_path: Path) -> None:
    damages = ("flip", "cut", "delete", "keys")
    manager = start(tmp_path / damages[0])
    for damage in damages:
        store = tmp_path / damage
        if damage != damages[0]:
            manager.reopen(store)
        manager.ask("store", numbers=ALL)
        manager.reopen(tmp_path / "elsewhere")
        inflict(damage, store)
        manager.reopen(store)
        hits, right = manager.found(ALL)
        assert hits == right, damage
        assert hits < 32, damage
        if damage == "flip":
            assert hits == 0
            assert "corrupt object" in (tmp_path / "lmcache-0.log").read_text()
        # the store works: what was not served is stored again
        manager.ask("clear")
        manager.ask("store", numbers=ALL, wanted=32)
        assert manager.found(ALL) == (32, 32), damage
    manager.close()


def inflict(damage: str, store: Path) -> None:
    """Damage a closed store."""
    if damage == "flip":
        stores.flip(store)
    elif damage == "delete":
        stores.delete(store)
    elif damage == "cut":
        for slab in stores.slabs(store):
            os.truncate(slab, 1_000_000)
    if damage == "keys":
        (keys,) = store.rglob("keys-*.jsonl")
        lines = keys.read_bytes().splitlines()
        keys.write_bytes(b"\n".join(lines[16:]).replace(b"tiny", b"tinz", 3))


def test_a_store_that_is_too_small_alone_and_under_concurrent_requests(
    start: Start, tmp_path: Path
) -> None:
    manager = start(capacity_bytes=10 * 3 * (96 << 10))
    manager.ask("store", numbers=ALL[:8])
    assert manager.found(ALL[:8]) == (8, 8)
    status = manager.ask("store", numbers=list(range(100, 106)), wanted=10)["status"]
    assert status["stored_object_count"] == 10
    assert manager.found(list(range(100, 106))) == (6, 6)
    # a prefix keeps its beginning
    assert manager.found(ALL[:8]) == (4, 4)
    usage = manager.ask("usage")
    assert usage["bytes"] == 10 * OBJECT
    assert usage["bytes"] <= usage["capacity"]
    manager.reopen(tmp_path / "other", capacity_bytes=40 * 3 * (96 << 10))
    totals = manager.ask("mixed", threads=4, rounds=25, keys=20)
    assert totals["wrong"] == 0
    assert totals["hits"] > 0
    assert totals["l2"] > 0
    status = manager.ask("idle")
    assert (status["locked_key_count"], status["tasks_in_flight"]) == (0, 0)
    assert status["is_healthy"]
    manager.close()


@BOTH
def test_identity_listing_and_serializers(start: Start, tmp_path: Path) -> None:
    manager = start()
    manager.ask("store", numbers=ALL[:8], salt="one")
    assert manager.found(ALL[:8], salt="two") == (0, 0)
    assert manager.found(ALL[:8]) == (0, 0)
    assert manager.found(ALL[:8], salt="one", dtype="bfloat16") == (0, 0)
    assert manager.found(ALL[:8], salt="one") == (8, 8)
    listed = manager.ask("listed", page_size=3)
    assert (len(set(listed["keys"])), len(listed["keys"]), listed["pages"]) == (8, 8, 3)
    manager.reopen(tmp_path / "store", namespace="other")
    assert manager.found(ALL[:8], salt="one") == (0, 0)
    manager.reopen(tmp_path / "store")
    assert manager.found(ALL[:8], salt="one") == (8, 8)
    manager.reopen(tmp_path / "serialized", serde={"type": "fp8"})
    manager.ask("store", numbers=ALL[:4])
    manager.ask("clear")
    assert manager.ask("prefetch", numbers=ALL[:4])["hits"] == 4
    manager.close()


def test_the_eviction_of_lmcache_by_salt(start: Start, tmp_path: Path) -> None:
    eviction = {"eviction_policy": "IsolatedLRU", "trigger_watermark": 1.0, "eviction_ratio": 0.5}
    manager = start()
    manager.ask("store", numbers=ALL[:8], salt="one")
    manager.ask("store", numbers=ALL[:8], salt="two", wanted=16)
    assert manager.ask("usage")["by_salt"] == {"one": 8 * OBJECT, "two": 8 * OBJECT}
    # the objects from before are accounted, and evicted from the end of the prefix
    limits = {"one": 5 * OBJECT, "two": 100 * OBJECT}
    manager.ask("close")
    manager.ask("open", l2=adapter(tmp_path / "store", eviction=eviction), quotas=limits)
    usage = manager.ask("wait_usage", salt="one", most=4 * OBJECT)
    assert usage["by_salt"] == {"one": 4 * OBJECT, "two": 8 * OBJECT}
    assert manager.found(ALL[:8], salt="one") == (4, 4)
    manager.close()


BAD = [
    ({"path": "/x"}, "ConfigError: adapter_params: .*unknown key 'path'"),
    ({"directory": "/proc/none"}, "StoreError: .*/proc/none"),
]


def test_bad_settings_and_a_folder_in_use_are_named_at_the_start(
    start: Start, tmp_path: Path
) -> None:
    first = start()
    second = start(tmp_path / "second")
    for settings, error in BAD:
        l2 = adapter(tmp_path / "bad")
        l2["adapter_params"] |= settings
        second.ask("close")
        with pytest.raises(InteropError, match=error):
            second.ask("open", l2=l2)
        second.ask("open", l2=adapter(tmp_path / "second"))
    second.ask("close")
    with pytest.raises(InteropError, match=r"StoreError.*is in use by process"):
        second.ask("open", l2=adapter(tmp_path / "store"))
    first.ask("store", numbers=ALL[:2])
    assert first.found(ALL[:2]) == (2, 2)
    first.close()


def test_the_checks_of_lmcache(python: str, tmp_path: Path) -> None:
    raise_loopback()
    line = ["-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--num-keys", "50"]
    line += ["--l2-adapter", json.dumps(adapter(tmp_path / "store")), "--obj-size", "40000"]
    done = subprocess.run(
        [python, *line],
        env=os.environ | VARIABLES | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    assert "Validation: 50/50 correctly absent" in done.stdout
    assert "Batch store OK" in done.stdout
    assert "Validation: 50/50 found" in done.stdout
    assert "Validation (loaded): 50/50" in done.stdout
    assert "Validation (content): 50/50" in done.stdout
