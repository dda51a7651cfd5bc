"""Several publishers for one index: ranks of one worker, and several workers with the same
prompts."""

from __future__ import annotations

import pytest

from tests.interop.scene import Scene
from tests.interop.workload import Workload

pytestmark = [pytest.mark.interop, pytest.mark.timeout(250)]


def test_two_ranks_of_one_worker(scene: Scene) -> None:
    """Dynamo's indexes keep the ranks apart, also when one of them clears."""
    shared = Workload(11)
    nodes = [scene.node(shared, rank=rank) for rank in (0, 1)]
    indexes = scene.dynamo(*(node.source for node in nodes))
    for node in nodes:  # the service asks for no replay from several ranks
        scene.follow(node, indexes)
    for _ in range(2):
        for node in nodes:
            node.serve(60)
        for node in nodes:
            scene.compare(node, indexes, asked=150, requested=10)
    nodes[0].clear()
    for node in nodes:
        scene.compare(node, indexes, asked=150, requested=10)
    scene.judge()


def test_two_workers(scene: Scene) -> None:
    shared = Workload(12)
    nodes = [scene.node(shared, worker=worker) for worker in (7, 8)]
    indexes = scene.dynamo(*(node.source for node in nodes))
    for _ in range(2):
        for node in nodes:
            node.serve(60)
        for node in nodes:
            scene.compare(node, indexes, asked=150, requested=15)
    scene.judge()
