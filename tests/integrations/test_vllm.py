"""The parts of the vLLM adapter that need no vLLM: settings, identity, and the files of the host
tier."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvactors import ConfigError
from kvactors.integrations.vllm.settings import (
    check_cache,
    check_engine,
    chosen_worker,
    identity,
    read_settings,
    read_tier_settings,
    storage_of_replica,
    stored_model,
)
from kvactors.tier_cache import TierStorage
from tests.integrations.vllm_stand_in import Platform, Region, engine_config, stand_in
from tests.support.numa import bound_node

ROW = mmap.PAGESIZE


# -- settings


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({}, "cpu_bytes_to_use is missing"),
        ({"cpu_bytes_to_use": "8 pages"}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use must be at least 1, not 0"),
        ({"cpu_bytes_to_use": 1, "cpu_bytes": 1}, "unknown key 'cpu_bytes'"),
        (
            {"cpu_bytes_to_use": 1, "eviction_policy": "retain"},
            "eviction_policy 'retain': there are lru$",
        ),
        ({"cpu_bytes_to_use": 1, "storage": {"dir": "/x"}}, "unknown key 'storage.dir'"),
        ({"cpu_bytes_to_use": 1, "storage": {"ranks": 2}}, "vLLM's data parallel replicas"),
        ({"cpu_bytes_to_use": 1, "copy_worker": "ours"}, "copy_worker"),
        ({"cpu_bytes_to_use": 1, "numa_node": -1}, "numa_node"),
    ],
)
def test_a_bad_setting_is_named(extra: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error) as found:
        read_settings(extra)
    assert isinstance(found.value, ValueError)
    assert "kv_connector_extra_config" in str(found.value)


@pytest.mark.parametrize(
    ("platform", "found"),
    [
        ("cpu", {"auto": "kvactors", "kvactors": "kvactors", "vllm": "no worker for a CPU"}),
        ("cuda", {"auto": "vllm", "kvactors": "kvactors", "vllm": "vllm"}),
        ("rocm", {"auto": "vllm", "kvactors": "this platform is rocm", "vllm": "vllm"}),
    ],
)
def test_the_worker_that_copies(platform: str, found: dict[str, str]) -> None:
    for wanted, worker in found.items():
        settings = read_settings({"cpu_bytes_to_use": "8GB", "copy_worker": wanted})
        assert settings.cpu_bytes_to_use == 8 << 30
        if worker in ("kvactors", "vllm"):
            assert chosen_worker(settings, Platform(platform)) == worker
        else:
            with pytest.raises(ConfigError, match=f"copy_worker = '{wanted}' .*{worker}"):
                chosen_worker(settings, Platform(platform))


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({}, "directory is missing"),
        ({"directory": ""}, "directory is empty"),
        ({"directory": "x", "root_dir": "y"}, "unknown key 'root_dir'"),
        ({"directory": "x", "locality": "NEAR"}, "Locality 'NEAR': there are LOCAL, REMOTE"),
        ({"directory": "x", "io_depth": 0}, "io_depth"),
        ({"directory": "x", "capacity_blocks": -1}, "capacity_blocks"),
    ],
)
def test_a_bad_setting_of_the_tier_is_named(entry: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error) as found:
        read_tier_settings(entry)
    assert "KVActorsTier" in str(found.value)


def test_settings_of_the_tier_are_those_of_its_store() -> None:
    entry = {"directory": "x", "io_depth": 8, "namespace": "n", "capacity_blocks": 5}
    found, storage = read_tier_settings(entry | {"enable_kv_events": True})
    assert found.enable_kv_events
    assert storage == TierStorage(backend="file", **entry)


class Config(SimpleNamespace):
    """vLLM's `OffloadingConfig`, as far as it is read."""

    def __init__(self, **changes: Any) -> None:
        parallel = {
            "world_size": 1,
            "tp_size": 1,
            "pp_size": 1,
            "pcp_size": 1,
            "dcp_size": 1,
            "data_parallel_index": 0,
            "data_parallel_size": 1,
            "rank": 0,
        }
        facts: dict[str, Any] = {
            "groups": [self.group("layer.0", "layer.1")],
            "dtype": "float32",
            "worker_kv_bytes_per_block": ROW,
            "canonical_layout": False,
            "replicated_layout": False,
            "kv_cache_layout": "NHD",
            "blocks_per_chunk": 1,
        }
        for name, value in changes.items():
            (parallel if name in parallel else facts)[name] = value
        super().__init__(
            **facts,
            parallel=SimpleNamespace(**parallel),
            model=SimpleNamespace(name="tiny", dtype=facts["dtype"]),
            cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=facts["blocks_per_chunk"]),
        )

    @staticmethod
    def group(*layers: str, number: int = 0, tokens: int = 32) -> SimpleNamespace:
        return SimpleNamespace(group_id=number, layer_names=layers, tokens_per_block=tokens)


def test_caches_that_cannot_be_held_are_refused() -> None:
    check_cache(Config(groups=[Config.group("full.0"), Config.group("window.0", number=1)]))
    with pytest.raises(ConfigError, match="canonical_layout"):
        check_cache(Config(canonical_layout=True))
    with pytest.raises(ConfigError, match="no size for a block"):
        check_cache(Config(worker_kv_bytes_per_block=0))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_layout": "HND"},
        {"blocks_per_chunk": 2},
        {"worker_kv_bytes_per_block": 2 * ROW},
        {"groups": [Config.group("layer.0")]},
        {"groups": [Config.group("layer.0", "layer.1", tokens=16)]},
        {"world_size": 2},
        {"tp_size": 2},
        {"pp_size": 2},
        {"pcp_size": 2},
        {"dcp_size": 2},
        {"replicated_layout": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_blocks_of_engines_that_differ_are_apart(change: dict[str, Any]) -> None:
    plain = identity(Config(), copied_by="vllm")
    assert identity(Config(), copied_by="vllm") == plain
    assert identity(Config(**change), copied_by="vllm") != plain
    assert identity(Config(), copied_by="kvactors") != plain


def test_each_replica_has_its_part_of_the_folder() -> None:
    storage = TierStorage(backend="file", directory="x")
    found = storage_of_replica(storage, Config(data_parallel_index=1, data_parallel_size=3))
    assert (found.rank, found.ranks, found.directory) == (1, 3, "x")


# -- the engine


def test_an_engine_that_cannot_compute_behind_cached_blocks_is_refused() -> None:
    """Without AMX, vLLM switches prefix caching off for latent attention on a CPU."""
    latent = engine_config(use_mla=True, caching=False)
    with pytest.raises(ConfigError, match=r"tiny has multi-head latent .* without AMX"):
        check_engine(latent, Platform("cpu"))
    check_engine(latent, Platform("cuda"))
    check_engine(engine_config(use_mla=True), Platform("cpu"))
    check_engine(engine_config(caching=False), Platform("cpu"))


def test_a_store_under_hashes_of_a_drawn_seed_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    stored = engine_config(extra={"storage": {}}, hashed_by="xxhash_cbor")
    check_engine(stored, Platform("cpu"))
    assert "nothing that is stored will be found after a restart" in caplog.text
    caplog.clear()
    check_engine(engine_config(hashed_by="xxhash_cbor"), Platform("cpu"))
    check_engine(engine_config(extra={"storage": {}}), Platform("cpu"))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_engine(stored, Platform("cpu"))
    assert not caplog.text


def test_models_that_compute_other_blocks_have_other_names_in_a_store() -> None:
    draft = engine_config("draft")
    others = [
        engine_config(hf_overrides={"rope_theta": 5.0}),
        engine_config(hf_overrides=engine_config),
        engine_config(quantization="fp8"),
        engine_config(dtype="bfloat16"),
        engine_config(revision="other"),
        engine_config(draft=draft),
        engine_config(draft=engine_config("draft", revision="other")),
    ]
    names = [stored_model("tiny", "m", one) for one in [engine_config(), *others]]
    assert len(set(names)) == len(names)
    assert stored_model("tiny", "m", engine_config(draft=engine_config())) == names[0]


def test_vllms_own_connector_is_refused() -> None:
    with pytest.raises(ConfigError, match="set kv_connector to KVActorsConnector"):
        stored_model("tiny", "m", None)


# -- the files of the host tier


Open = Callable[..., Any]


@pytest.fixture
def region_module(tmp_path: Path) -> Iterator[Any]:
    """The module of the regions, with files in a folder of the test."""
    with stand_in(tmp_path, Platform("cpu")) as module:
        yield module("region")


@pytest.fixture
def open_region(region_module: Any) -> Iterator[Open]:
    made = []

    def open_one(engine_id: str = "one", rank: int | None = None, **more: Any) -> Any:
        made.append(region_module.TierRegion(engine_id, 4, ROW, ROW, rank, **more))
        return made[-1]

    yield open_one
    for region in made:
        region.close()


def test_a_region_goes_with_its_last_process(
    region_module: Any, open_region: Open, tmp_path: Path
) -> None:
    scheduler, worker = open_region(), open_region(rank=0)
    scheduler.view()[5] = 7
    assert worker.view()[5] == 7
    assert region_module.remove_stale_regions() == 0
    scheduler.close()
    assert (tmp_path / "vllm_offload_kvactors_one.mmap").exists()
    worker.close()
    worker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_engine_with_the_same_id_is_refused(open_region: Open, tmp_path: Path) -> None:
    """It would map the rows of the first and overwrite its chunks."""
    first = open_region()
    first.view()[0] = 7
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"engine_id 'one' .* running engine"):
            open_region()
    assert first.view()[0] == 7
    open_region("other").close()
    first.close()
    open_region().close()
    assert list(tmp_path.iterdir()) == []


def test_regions_without_a_process_are_removed_and_no_others(
    region_module: Any, open_region: Open, tmp_path: Path
) -> None:
    for name in ("gone", "*"):  # a name with a wildcard is that of one region
        (tmp_path / f"kvactors_{name}.lock").touch()
    (tmp_path / "vllm_offload_kvactors_gone.mmap").write_bytes(bytes(ROW))
    (tmp_path / "vllm_offload_other.mmap").write_bytes(bytes(ROW))
    held = open_region()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kvactors_one.engine",
        "kvactors_one.lock",
        "vllm_offload_kvactors_one.mmap",
        "vllm_offload_other.mmap",
    ]
    assert region_module.remove_stale_regions() == 0
    held.close()
    assert [path.name for path in tmp_path.iterdir()] == ["vllm_offload_other.mmap"]


@pytest.mark.parametrize("rank", [None, 0])
def test_the_pages_of_a_region_come_from_the_node_of_the_settings(
    open_region: Open, rank: int | None
) -> None:
    """vLLM's region touches its pages when it is made: they cannot be bound afterwards."""
    open_region(rank=rank, numa_node=0)
    open_region("other", rank=rank)
    assert Region.nodes == [0, None]
    assert bound_node(None) is None, "later pages of the engine are bound"


def test_a_node_that_does_not_exist_takes_no_memory(open_region: Open, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config: numa_node is 1022"):
        open_region(numa_node=1022)
    assert list(tmp_path.iterdir()) == []
    assert bound_node(None) is None
