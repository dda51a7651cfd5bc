"""Generator of docs/messages.md from the message classes."""

from __future__ import annotations

from collections.abc import Iterator

from kvactors.actor import Actor, Ask, Control, Message, PeerRestarted
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.messages import SetIdleLimit
from kvactors.gpu_swapper.actor import GpuSwapper
from kvactors.gpu_swapper.messages import CopyProgress, DataPlaneStatus
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import Abandon, SetNumBlocks, Withdrawn
from kvactors.storage.actors import StorageReader, StorageWriter
from kvactors.storage.device_store import DeviceStoreActor

ACTORS: tuple[type[Actor], ...] = (
    PrefixIndex,
    CpuEvictor,
    GpuSwapper,
    StorageReader,
    StorageWriter,
    DeviceStoreActor,
    FlushNotifier,
)

OUTSIDE: dict[type[Message], str] = {
    Abandon: "the public API",
    Withdrawn: "the public API",
    SetNumBlocks: "the wiring",
    SetIdleLimit: "the wiring",
    DataPlaneStatus: "the data plane",
    CopyProgress: "the data plane",
}
"""Senders of messages that no actor sends."""


ITSELF = "To itself:"
"""Begins the docstrings of messages that stay inside of an actor. They are not on the page."""


def render() -> str:
    """The page."""
    lines = [
        "# Messages",
        "",
        "Generated from the classes by `python -m tests.docs.generators`. Lanes: *data* is bounded",
        "and flows forward, *control* overtakes it and is bounded by the work in flight, an *ask* is",
        "a data message that is answered. Fields and replies are in `messages.py` of each package.",
    ]
    for actor in ACTORS:
        lines += ["", f"## {actor.__name__} (`{actor.ROLE}`)", "", first_line(actor), ""]
        lines += ["| message | lane | from | meaning |", "|---|---|---|---|"]
        lines += [
            row(actor, message)
            for message in actor.HANDLERS
            if not first_line(message).startswith(ITSELF)
        ]
    return "\n".join(lines) + "\n"


def row(actor: type[Actor], message: type[Message]) -> str:
    """One message's line."""
    lane = (
        "control" if issubclass(message, Control) else "ask" if issubclass(message, Ask) else "data"
    )
    cells = (f"`{message.__name__}`", lane, ", ".join(senders(actor, message)), first_line(message))
    return "| " + " | ".join(cell.replace("|", "or") for cell in cells) + " |"


def senders(actor: type[Actor], message: type[Message]) -> Iterator[str]:
    """Who sends a message."""
    found = [other.ROLE for other in ACTORS if message in other.SENDS.get(actor.ROLE, ())]
    if found:
        yield from found
    elif message is PeerRestarted:
        yield "supervisor"
    elif issubclass(message, Ask):
        yield "the public API"
    else:
        yield OUTSIDE[message]


def first_line(kind: type) -> str:
    """The first sentence of a docstring."""
    text = " ".join((kind.__doc__ or "").split())
    return text.split(". ")[0].rstrip(".") + "."
