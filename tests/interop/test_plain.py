"""Blocks of plain prompts, adapters, salts and media, on every tier: what Dynamo's indexes hold and
answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.interop.scene import Scene
from tests.interop.workload import Workload

pytestmark = [pytest.mark.interop, pytest.mark.timeout(250)]

SALTS = (None, "tenant-a", "tenant-b")
LORAS = (None, "adapter-a", "adapter-b")
TWO_TIERS: dict[str, Any] = {"storage": {"backend": "none"}}


def run(
    scene: Scene, workload: Workload, *, tables: dict[str, Any] | None = None, **sink: Any
) -> None:
    """Serve prompts in three parts, each followed by a comparison."""
    node = scene.node(workload, tables=tables, **sink)
    indexes = scene.dynamo(node.source)
    for part in range(3):
        node.serve(80)
        scene.compare(node, indexes, requested=10 if part else 30)
    scene.judge()


@pytest.mark.parametrize("dialect", ["map", "array"])
def test_plain_prompts(scene: Scene, dialect: str) -> None:
    run(scene, Workload(1), dialect=dialect)


def test_two_tiers_with_an_inclusive_host(scene: Scene) -> None:
    run(scene, Workload(3), tables=TWO_TIERS | {"host": {"slots": 80, "mode": "inclusive"}})


def test_batches_of_one_block_with_the_media_names_of_sglang(scene: Scene) -> None:
    run(scene, Workload(4, prefixes=12), max_blocks=1, media="sglang")


def test_adapters_salts_and_media_at_once(scene: Scene) -> None:
    run(scene, Workload(9, salts=SALTS, loras=LORAS[:2], images=2, prefixes=2))


@pytest.mark.parametrize("arrays_for", ["vllm", "dynamo"])
def test_media_in_arrays(scene: Scene, arrays_for: str) -> None:
    """Dynamo reads salts and media in arrays in its own form. In vLLM's form vLLM's types must take
    them."""
    workload = Workload(10, salts=SALTS, loras=LORAS[:2], images=2, prefixes=2)
    if arrays_for == "dynamo":
        run(scene, workload, dialect="array", arrays_for=arrays_for)
        return
    node = scene.node(workload, dialect="array", arrays_for=arrays_for)
    node.serve(80)
    node.truth()
    scene.judge()
