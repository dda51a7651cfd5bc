"""Actor runtime: channels, mailboxes, supervision. Independent of the cache."""

from kvactors.actor.actor import Actor, ActorStatistics, Count, Seconds, counters_of, on
from kvactors.actor.channel import Channel, ChannelStatistics
from kvactors.actor.context import Context, State, Timer
from kvactors.actor.instrument import InjectedFailure, Instrument, Instruments, Turn
from kvactors.actor.message import Ask, Control, Envelope, Later, Message, PeerRestarted, Stop
from kvactors.actor.ref import ActorRef, InFlight
from kvactors.actor.supervisor import (
    ActorSpec,
    Edge,
    Group,
    RestartBudget,
    Supervisor,
    SupervisorStatistics,
    check_graph,
    edges,
)

__all__ = [
    "Actor",
    "ActorRef",
    "ActorSpec",
    "ActorStatistics",
    "Ask",
    "Channel",
    "ChannelStatistics",
    "Context",
    "Control",
    "Count",
    "Edge",
    "Envelope",
    "Group",
    "InFlight",
    "InjectedFailure",
    "Instrument",
    "Instruments",
    "Later",
    "Message",
    "PeerRestarted",
    "RestartBudget",
    "Seconds",
    "State",
    "Stop",
    "Supervisor",
    "SupervisorStatistics",
    "Timer",
    "Turn",
    "check_graph",
    "counters_of",
    "edges",
    "on",
]
