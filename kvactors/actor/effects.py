"""What the turns of an actor do to others: the one way by which its objects send, answer and set
timers."""

from __future__ import annotations

from kvactors.actor.context import Context


class Effects:
    """Collector of the effects of turns, handed to the objects that decide.

    Each effect takes place at once, in the order of the calls. A turn is synchronous: nothing
    else runs between two of them. `Envelope.abandoned` is true of an ask that was answered: ask
    whether its caller still waits before the answer.

    The attributes are the methods of a `Context`, bound here because most turns call several.
    """

    __slots__ = ("after", "refuse", "reply", "send", "to_self")

    def __init__(self, context: Context) -> None:
        self.send, self.to_self = context.tell, context.to_self
        self.reply, self.refuse = context.answer, context.refuse
        self.after = context.after
