"""vLLM's router sends a prompt to the worker whose cache has most of it, on any tier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.interop.consumers.router import Router
from tests.interop.node import Node
from tests.interop.scene import CATCH_UP, Scene
from tests.interop.workload import BLOCK, Workload

pytestmark = [pytest.mark.interop, pytest.mark.timeout(250)]

ROUTED = 60
"""Prompts sent through the router in a comparison."""


def routed_right(scene: Scene, router: Router, nodes: Sequence[Node], count: int = ROUTED) -> None:
    """Every plain prompt goes to a worker with most of its blocks, and the router counts as many of
    them as this worker has."""
    truths = [node.truth() for node in nodes]
    each = count // len(nodes)
    prompts = [
        one
        for node in nodes
        for one in [prompt for prompt in node.workload.asked(20 * count) if prompt.plain][:each]
    ]
    for prompt, chain in zip(prompts, nodes[0].chains(prompts), strict=True):
        credited = [truth.credit(chain) for truth in truths]
        best = [
            node.source.worker
            for node, credit in zip(nodes, credited, strict=True)
            if credit == max(credited)
        ]
        until = time.monotonic() + (0 if scene.wrong else CATCH_UP)
        while (got := router.route(prompt)).credited != BLOCK * max(
            credited
        ) and time.monotonic() < until:
            time.sleep(0.1)
        scene.counts["prompts routed"] += 1
        scene.counts["prompts routed, present"] += max(credited) > 0
        scene.counts["prompts routed, on host or storage"] += (
            max(truth.credit(chain) - truth.answer(chain).device for truth in truths) > 0
        )
        if got.worker not in best or got.credited != BLOCK * max(credited):
            scene.wrong.append(
                f"{router.name}: {got} for a prompt of which the workers hold {credited} blocks"
            )


def two_nodes(scene: Scene, first: Workload, second: Workload, **sink: Any) -> list[Node]:
    """Two workers with their own prompts, with the settings that the router needs: it takes the
    answer to a replay request only if that begins with the number asked for, and drops a batch with
    an unknown field."""
    settings: dict[str, Any] = {
        "numbers": "from_zero",
        "maps_for": "vllm",
        "heartbeat_s": 0.5,
    } | sink
    return [scene.node(first, worker=7, **settings), scene.node(second, worker=8, **settings)]


def test_prompts_go_where_their_blocks_are(scene: Scene) -> None:
    nodes = two_nodes(scene, Workload(41), Workload(42))
    router = scene.router(nodes)
    for _ in range(2):
        for node in nodes:
            node.serve(60)
        routed_right(scene, router, nodes)
    scene.judge()


def test_blocks_of_adapters_are_not_counted_for_the_base_model(scene: Scene) -> None:
    """The same tokens are there with an adapter. Salts and media are not tried: this router does
    not tell their blocks from plain ones."""
    nodes = two_nodes(
        scene,
        Workload(43, loras=(None, "x"), prefixes=2),
        Workload(44, loras=(None, "x"), prefixes=2),
    )
    router = scene.router(nodes)
    for node in nodes:
        node.serve(80)
    routed_right(scene, router, nodes)
    scene.judge()


def test_joined_late_while_the_workers_are_idle(scene: Scene) -> None:
    nodes = two_nodes(scene, Workload(45), Workload(46), replay_window=8)
    for node in nodes:
        node.serve(80)
        node.truth()
    routed_right(scene, scene.router(nodes), nodes)
    scene.judge()


def test_killed_and_started_again(scene: Scene) -> None:
    nodes = two_nodes(scene, Workload(47), Workload(48))
    router = scene.router(nodes)
    for node in nodes:
        node.serve(60)
    routed_right(scene, router, nodes, 20)
    nodes[0].kill()
    nodes[0].restart(store=False)
    for node in nodes:
        node.serve(40)
    routed_right(scene, router, nodes)
    scene.judge()
