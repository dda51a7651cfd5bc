"""Handlers of an actor: `@on` marks them, and checks that they take the message.

mypy checks a handler where it is marked. Class creation checks its annotation again.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, overload

from kvactors.actor.message import Ask, Envelope, Message
from kvactors.errors import WiringError

Handler = Callable[..., None]
Answerer = Callable[[Any], Any]

S = TypeVar("S")
M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Ask[Any])
X = TypeVar("X", bound=Message)
Y = TypeVar("Y", bound=Message)
M_co = TypeVar("M_co", bound=Message, covariant=True)


class Mark(Generic[M_co]):
    """Marks a method as the handler of one message type, `(self, message)`."""

    def __init__(self, message: type[Message]) -> None:
        self.message = message

    def __call__(self: Mark[X], method: Callable[[S, X | Y], None]) -> Callable[[S, X | Y], None]:
        """Mark a method. Its parameter may also be a union that contains the message."""
        method.__dict__.setdefault("handles", []).append(self.message)
        return method


class AskMark(Generic[M_co]):
    """Marks a method as the handler of one type of asks, `(self, message, envelope)`."""

    def __call__(
        self: AskMark[X], method: Callable[[S, X, Envelope[Any]], None]
    ) -> Callable[[S, X, Envelope[Any]], None]:
        """Mark a method."""
        raise NotImplementedError  # `on` returns a Mark: this class exists for the type checker


@overload
def on(message: type[A]) -> AskMark[A]: ...  # type: ignore[overload-overlap]
@overload
def on(message: type[M]) -> Mark[M]: ...
def on(message: type[Any]) -> Any:
    """Mark a method as the handler of one message type: `(self, message)`, for an ask `(self,
    message, envelope)`."""
    return Mark(message)


def table_of(kind: type) -> dict[type[Message], str]:
    """The handlers that a class marks: message type to method name.

    Raises:
        WiringError: the annotation of a handler does not include the message it is marked for.
    """
    table: dict[type[Message], str] = {}
    for name, member in vars(kind).items():
        for message in getattr(member, "handles", ()):
            check_annotation(f"{kind.__qualname__}.{name}", member, message)
            table[message] = name
    return table


def check_annotation(name: str, method: Any, message: type[Message]) -> None:
    """Raise WiringError unless the message parameter of a handler takes `message`. A handler
    without an annotation takes any."""
    parameter = method.__code__.co_varnames[1:2]
    annotation = method.__annotations__.get(*parameter, Any) if parameter else Any
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, method.__globals__)  # noqa: S307  (the class's own source)
        except NameError:  # a class of a function, or a name that only type checkers import
            if message.__name__ in annotation:
                return
            raise WiringError(_misfit(name, message, annotation)) from None
    if not any(_takes(one, message) for one in members_of(annotation)):
        raise WiringError(_misfit(name, message, annotation))


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _takes(annotation: Any, message: type[Message]) -> bool:
    kind = get_origin(annotation) or annotation
    return kind is Any or (isinstance(kind, type) and issubclass(message, kind))


def _misfit(name: str, message: type[Message], annotation: Any) -> str:
    shown = " | ".join(getattr(one, "__name__", str(one)) for one in members_of(annotation))
    return f"{name} is marked as the handler of {message.__name__} and takes {shown}"
