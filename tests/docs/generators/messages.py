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
        "Generated from the classes by `python -m tests.docs.generators`. *data* messages are bounded",
        "and flow forward, *control* overtakes them and is bounded by the work in flight, an *ask* is",
        "a data message that is answered. Fields and replies are in `messages.py` of each package.",
    ]
    for actor in ACTORS:
        lines += ["", f"## {actor.__name__} (`{actor.ROLE}`)", "", first_line(actor)]
        groups: dict[str, list[str]] = {}
        for message in actor.HANDLERS:
            if not (text := first_line(message)).startswith(ITSELF):
                title = f"{lane(message)} from {', '.join(senders(actor, message))}:"
                groups.setdefault(title, []).append(f"* `{message.__name__}`: {text}")
        for title, messages in groups.items():
            lines += ["", title, "", *messages]
    return "\n".join(lines) + "\n"


def lane(message: type[Message]) -> str:
    """The lane of a message."""
    if issubclass(message, Control):
        return "Control"
    return "Asks" if issubclass(message, Ask) else "Data"


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
