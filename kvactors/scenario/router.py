"""The router of a scenario: another process that mirrors this node from its KV events alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from kvactors.scenario.child import Child, child
from kvactors.scenario.spec import RouterSpec


@asynccontextmanager
async def routing(
    spec: RouterSpec, endpoint: str, replay: str, topic: str, seed: int
) -> AsyncIterator[Child]:
    """A router process, connected."""
    arguments = (
        "-m",
        "kvactors.testing.kv_mirror",
        endpoint,
        replay,
        "--topic",
        topic,
        "--lose",
        str(spec.lose),
    )
    async with child(*arguments, "--follow", spec.follow, "--seed", str(seed)) as router:
        await router.receive()
        yield router


async def compare(router: Child, sequence: int, truth: Mapping[str, set[int]]) -> dict[str, int]:
    """Compare the router's view with the tiers, once it has read every batch before `sequence`.

    Returns:
        The router's counts. divergence: number of blocks on which its view differs from the
        truth, by medium. ambiguous: blocks that it cannot tell apart by tokens, adapter, salt and
        media.
    """
    await router.send(f"report {sequence}")
    said = msgspec.json.decode(await router.receive())
    view = {medium: set(hashes) for medium, hashes in said["view"].items()}
    differing = sum(
        len(view.get(medium, set()) ^ truth.get(medium, set()))
        for medium in view.keys() | truth.keys()
    )
    behind = max(0, sequence - said["sequence"])
    return {
        "divergence": differing,
        "ambiguous": said["ambiguous"],
        "behind": behind,
        **said["statistics"],
    }
