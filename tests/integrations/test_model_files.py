"""Digests of models: the same for copies, another one for other weights or configurations."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvactors.integrations.engine import SAMPLE_BYTES, SAMPLES, model_digest

LARGE = 8 * SAMPLES * SAMPLE_BYTES


def write_model(folder: Path) -> Path:
    """A model of a small file of weights and a large one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"rope_theta": 1.0}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(bytes(1000))
    (folder / "model-2.safetensors").write_bytes(bytes(LARGE))
    return folder


def overwrite(file: Path, position: int, count: int = 1) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        opened.write(b"x" * count)


CHANGES: dict[str, Callable[[Path], object]] = {
    "configuration": lambda model: (model / "config.json").write_text('{"rope_theta": 2.0}'),
    "remote code": lambda model: (model / "modeling.py").write_text(""),
    "one byte of a small file": lambda model: overwrite(model / "model-1.safetensors", 500),
    "the first byte": lambda model: overwrite(model / "model-2.safetensors", 0),
    "the last byte": lambda model: overwrite(model / "model-2.safetensors", LARGE - 1),
    "a layer": lambda model: overwrite(model / "model-2.safetensors", LARGE // 3, LARGE // SAMPLES),
    "a name": lambda model: (model / "model-1.safetensors").rename(model / "model-3.safetensors"),
    "a size": lambda model: overwrite(model / "model-2.safetensors", LARGE),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_copy_has_the_digest_until_it_changes(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    model, copy = write_model(tmp_path / "model"), tmp_path / "another" / "place"
    shutil.copytree(model, copy)
    os.utime(copy / "model-1.safetensors", (0, 0))
    (copy / "tokenizer.json").unlink()
    assert model_digest(str(copy), {}) == model_digest(str(model), {})
    change(copy)
    assert model_digest(str(copy), {}) != model_digest(str(model), {})


def test_a_model_of_the_hub_has_the_digest_of_its_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--name"
    snapshot = write_model(folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    found = model_digest("owner/name", {}, cache=str(tmp_path))
    assert found == model_digest(str(snapshot), {})


def test_without_files_name_and_revision_alone_count_and_there_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert model_digest("owner/none", {}, revision="a") != model_digest("owner/none", {})
    assert "others under its name need another namespace" in caplog.text
