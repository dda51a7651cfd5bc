"""Effects of the turns of an actor: the one way by which its objects send, answer and set
timers."""

from __future__ import annotations

from kvactors.actor.context import Context


class Effects:
    """Collector of the effects of turns, handed to the objects that decide.

    Each effect takes place at once, in the order of the calls. A turn is synchronous, so no other
    turn runs between two of them. `reply` and `refuse` return whether the asker still waited. After
    them `Envelope.abandoned` is true.

    The attributes are the methods of a `Context`, bound here because most turns call several.
    """

    __slots__ = ("after", "refuse", "reply", "send", "to_self")

    def __init__(self, context: Context) -> None:
        self.send, self.to_self = context.tell, context.to_self
        self.reply, self.refuse = context.answer, context.refuse
        self.after = context.after
