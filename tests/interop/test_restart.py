"""A worker's process is killed and another one begins at the same endpoints: nothing of the one
before may stay in an index."""

from __future__ import annotations

import pytest

from tests.interop.scene import Scene
from tests.interop.workload import Workload

pytestmark = [pytest.mark.interop, pytest.mark.timeout(250)]


def test_killed_and_started_again(scene: Scene) -> None:
    """numbers = "rising" (the default): the new process begins above the numbers of the one before
    it. The first one has a new store, the second one that of the process before."""
    node = scene.node(Workload(21))
    indexes = scene.dynamo(node.source)
    for same_store in (False, True):
        node.serve(80)
        scene.compare(node, indexes, asked=100, requested=5)
        node.begin(node.workload.prompts(300))
        seen = node.recorder.take()
        while node.recorder.take() < seen + 20:  # it is in the middle of its work
            node.child.check()
        node.kill()
        node.restart(store=same_store)
        node.serve(10 if same_store else 60)
        scene.compare(node, indexes, asked=200, requested=15)
    scene.judge()


def test_killed_and_idle_after_the_start(scene: Scene) -> None:
    """The first batch of the new process, which clears every block, is enough, or the next
    heartbeat."""
    node = scene.node(Workload(22), heartbeat_s=0.5)
    indexes = scene.dynamo(node.source)
    node.serve(80)
    scene.compare(node, indexes, asked=50, requested=5)
    node.kill()
    node.restart(store=False)
    scene.compare(node, indexes, asked=200, requested=0)
    scene.judge()
