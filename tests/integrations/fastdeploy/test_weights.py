"""New weights: the file that names them is looked at whenever a request is matched."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvactors.errors import ConfigError, SinkError
from kvactors.integrations.fastdeploy import settings as fastdeploy_settings
from kvactors.integrations.fastdeploy.settings import WeightsVersion
from kvactors.tier_cache.sinks import SinkService
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request
from tests.integrations.fastdeploy.invariants import check

A = list(range(8))


class Model:
    """The folder of a model."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.file = folder / "version.yaml"
        self.load(1)

    def load(self, step: int) -> None:
        """New settings."""
        self.file.write_text(f"version: RL-STEP{step:02}-20260101-x\n", "utf-8")


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


@pytest.mark.parametrize("cpu", [0, 4])
def test_blocks_of_earlier_weights_are_not_found_in_fastdeploys_order(engine, model, cpu):
    """It pauses and resets, loads new settings, and serves. There is no second reset."""
    one = engine(gpu=4, cpu=cpu, file=True, model=str(model.file.parent))
    one.serve("a", A)
    for step, cached in ((2, 0), (1, 8)):
        one.manager.reset()
        model.load(step)
        one.memory.lose(0 if step == 1 else step)
        request = Request(f"r{step}", A)
        assert one.match(request)[1] == cached
        assert not one.wrong(request, cached)
        one.free(request)


def test_new_weights_without_a_reset_are_one(engine, model):
    """Requests that were matched before go on in their blocks, and no more of them is cached."""
    one = engine(gpu=8, cpu=2, file=True, model=str(model.file.parent))
    running, other = Request("a", A), Request("b", A)
    one.prefill(running)
    running.block_tables += one.manager.allocate_gpu_blocks(1, "a")
    model.load(2)
    one.memory.lose(1)
    assert one.prefill(other)["gpu_match_token_num"] == 0
    assert not {*running.block_tables} & {*other.block_tables}
    running.output_token_ids = [1, 2, 3, 4, 5]
    one.manager.cache_output_blocks(running, BLOCK_SIZE)
    assert running.num_cached_blocks == 2
    one.manager.write_cache_to_storage(running)
    assert one.manager.statistics().written_blocks == 0
    one.free(running)
    one.free(other)
    one.serve("c", A)
    assert one.available == 8
    check(one.manager)


def test_no_request_is_matched_under_weights_without_a_known_version(engine, model):
    """Under the earlier version it would be given stored blocks of other settings."""
    one = engine(gpu=4, file=True, model=str(model.file.parent))
    one.serve("a", A)
    model.file.write_text("unreadable", "utf-8")
    one.manager.reset()
    for _ in range(2):
        with pytest.raises(ConfigError, match="has no line 'version: NAME'"):
            one.match(Request("b", A))
    check(one.manager)
    model.load(2)
    assert one.match(Request("b", A))[1] == 0


def test_a_file_that_has_not_changed_is_read_once(model, monkeypatch):
    monkeypatch.setattr(fastdeploy_settings, "SETTLED_S", -1.0)
    reads = []
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda *args: reads.append(1) or read(*args))
    version = WeightsVersion(model.file.parent)
    assert [version.now() for _ in range(3)] == ["RL-STEP01"] * 3
    model.file.write_text("version: RL-STEP002-x\n", "utf-8")
    assert [version.now() for _ in range(3)] == ["RL-STEP002"] * 3
    assert len(reads) == 2
    model.file.unlink()
    assert version.now() == "default"


def test_a_file_that_is_written_twice_in_a_tick_of_its_clock_is_read_again(model, monkeypatch):
    monkeypatch.setattr(fastdeploy_settings, "SETTLED_S", 3600.0)
    version = WeightsVersion(model.file.parent)
    assert version.now() == "RL-STEP01"
    stat = model.file.stat()
    model.load(2)
    monkeypatch.setattr(Path, "stat", lambda *_: stat)
    assert version.now() == "RL-STEP02"


def test_an_index_that_does_not_open_for_new_weights_is_opened_by_the_next_reset(
    engine, model, tmp_path, monkeypatch
):
    path = tmp_path / "events.jsonl"
    sink = {"kind": "jsonl", "path": str(path), "name": "router"}
    one = engine(gpu=4, cpu=2, model=str(model.file.parent), options={"sinks": [sink]})
    model.load(2)

    async def fail(*_: object) -> None:
        raise SinkError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(SinkService, "open", fail)
        one.serve("a", A)
    assert one.serve("b", A)["gpu_match_token_num"] == 8, "the cache works without its index"
    assert one.manager.troubles == ("AttentionStore and indexes are closed: injected",)
    one.manager.reset()
    assert one.manager.troubles == ()
    one.serve("c", A)
    one.manager.close()
    assert '"resident"' in path.read_text("utf-8")
