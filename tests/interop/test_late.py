"""Indexes that join late, lose their connection, or ask all at once."""

from __future__ import annotations

import pytest

from tests.interop.scene import Scene
from tests.interop.workload import Workload

pytestmark = [pytest.mark.interop, pytest.mark.timeout(250)]

READERS = 24


def test_joined_late_while_the_worker_is_idle(scene: Scene) -> None:
    """The heartbeat shows a gap, and the answer to the replay request is everything, however little
    of it is kept."""
    node = scene.node(Workload(31), heartbeat_s=0.5, replay_window=8)
    node.serve(100)
    node.truth()
    indexes = scene.dynamo(node.source)
    scene.compare(node, indexes, asked=200, requested=10)
    node.serve(40)
    scene.compare(node, indexes, asked=200, requested=10)
    scene.judge()


def test_joined_late_under_load(scene: Scene) -> None:
    node = scene.node(Workload(32), replay_window=8)
    node.serve(100)
    node.begin(node.workload.prompts(150))
    indexes = scene.dynamo(node.source)
    node.done()
    node.serve(5)
    scene.compare(node, indexes, asked=200, requested=10)
    scene.judge()


@pytest.mark.parametrize("window", [10_000, 8])
def test_cut_off_for_a_time(scene: Scene, window: int) -> None:
    """Nothing published during the cut reaches the indexes. Within the window and beyond it,
    the next batch they get makes them right."""
    node = scene.node(Workload(33), heartbeat_s=0.5, replay_window=window)
    link, source = scene.link(node)
    indexes = scene.dynamo(source)
    node.serve(80)
    scene.compare(node, indexes, asked=100, requested=5)
    for _ in range(2):
        link.cut()
        node.serve(80)
        node.truth()
        link.mend()
        scene.compare(node, indexes, asked=200, requested=5)
    scene.judge()


def test_many_readers_at_once(scene: Scene) -> None:
    """24 readers of one publisher see the same gap in the same batch. All of them ask, and all are
    answered."""
    node = scene.node(Workload(34), heartbeat_s=0.5)
    node.serve(100)
    indexes = scene.dynamo()
    indexer = indexes[1]
    readers = [node.source._replace(worker=100 + i) for i in range(READERS)]
    for reader in readers:
        indexer.register(reader)
    truth = node.truth()
    for reader in readers:
        scene.catch_up(node, [indexer], truth, reader)
    node.serve(60)
    truth = node.truth()
    for reader in readers:
        scene.catch_up(node, [indexer], truth, reader)
    for index in indexes:
        index.register(node.source)
    scene.compare(node, indexes, asked=100, requested=10)
    scene.judge()


def test_cleared_under_load(scene: Scene) -> None:
    node = scene.node(Workload(35))
    indexes = scene.dynamo(node.source)
    for _ in range(2):
        node.serve(120, clears=6)
        scene.compare(node, indexes, asked=150, requested=10)
    node.clear()
    scene.compare(node, indexes, asked=100, requested=0)
    node.serve(40)
    scene.compare(node, indexes, asked=100, requested=10)
    scene.judge()
