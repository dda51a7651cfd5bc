"""The waiting tasks of a loop as text, with the reason of each wait, read from their frames.

Tasks of kvactors are named by kind (an actor, a job of one, a request), any other by its task's
name. Nothing is recorded while a loop runs. The text is read from the tasks themselves, so it
costs nothing until it is asked for.
"""

from __future__ import annotations

import asyncio
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio.to_thread

from kvactors.actor import ActorRef, Channel, InFlight
from kvactors.actor.jobs import JOB, is_job
from kvactors.actor.mailbox_loop import MailboxLoop

Label = Callable[["asyncio.Task[Any]"], str]

LIBRARY = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
)
"""Folders whose code is never shown as the place where a task waits. Installed packages of other
environments are not shown either."""

OURS = str(Path(__file__).parents[1])


def who_waits(tasks: Iterable[asyncio.Task[Any]], label: Label) -> list[str]:
    """A line for each unfinished task: its label, the reason of its wait, and the line of code.
    label: makes a task's label."""
    return [waiting_of(task, label) for task in tasks if not task.done()]


def waiting_of(task: asyncio.Task[Any], label: Label) -> str:
    """One task's line."""
    frames = list(frames_of(task))
    return f"{_who(task, frames, label)} waits for {_what(task, frames, label)} ({site(frames)})"


def frames_of(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames a suspended task stands in, outermost first."""
    inner: Any = task.get_coro()
    while inner is not None:
        frame = (
            getattr(inner, "cr_frame", None)
            or getattr(inner, "ag_frame", None)
            or getattr(inner, "gi_frame", None)
        )
        if frame is None:
            return
        yield frame
        following = next(
            (
                n
                for kind in ("cr_await", "ag_await", "gi_yieldfrom")
                if (n := getattr(inner, kind, None))
            ),
            None,
        )
        if (
            following is not None
            and not hasattr(following, "cr_frame")
            and not hasattr(following, "gi_frame")
        ):
            # an async generator's step hides its generator, but its context manager holds it
            following = getattr(frame.f_locals.get("self"), "gen", None)
        inner = following


def site(frames: list[FrameType]) -> str:
    """`file:line` of the innermost frame that is neither of the standard library, nor installed,
    nor kvactors' own. Without such a frame, of the innermost."""
    if not frames:
        return "not started"
    foreign = [
        frame
        for frame in frames
        if not (_path(frame).startswith((*LIBRARY, OURS)) or "site-packages" in _path(frame))
    ]
    frame = (foreign or frames)[-1]
    path = Path(_path(frame))
    short = (
        path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-2:])
    )
    return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}"


def _path(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _self_of(frames: list[FrameType], code: CodeType) -> Any:
    """`self` in the innermost frame of a method, None if the task is not in it."""
    return next(
        (frame.f_locals.get("self") for frame in reversed(frames) if frame.f_code is code), None
    )


def _who(task: asyncio.Task[Any], frames: list[FrameType], label: Label) -> str:
    mailbox = _self_of(frames, MailboxLoop.run.__code__)
    if mailbox is not None:
        return str(mailbox._ref.name)
    if is_job(task):
        return f"a job of {task.get_name().removesuffix(JOB)}"
    for frame in reversed(frames):
        of = frame.f_locals.get("message"), frame.f_locals.get("self")
        request = next(
            (found for one in of if (found := getattr(one, "request_id", None)) is not None), None
        )
        if request is not None:
            return f"request {request} ({label(task)})"
    return label(task)


def _what(task: asyncio.Task[Any], frames: list[FrameType], label: Label) -> str:
    for frame in reversed(frames):
        found = frame.f_locals.get("self")
        if frame.f_code is ActorRef._answer.__code__:
            message = frame.f_locals["envelope"].message
            return f"the answer to {type(message).__name__} by {frame.f_locals['self'].name}"
        if frame.f_code is Channel.wait_for_item.__code__:
            if _self_of(frames, MailboxLoop.run.__code__):
                return "a message"
            return f"a message in {found.name}'s channel"  # type: ignore[union-attr]
        if frame.f_code is Channel.put.__code__:
            return f"a place in {found.name}'s channel"  # type: ignore[union-attr]
        if frame.f_code is InFlight.wait_idle.__code__:
            return f"idle: {found.count} messages or jobs are in flight"  # type: ignore[union-attr]
        if frame.f_code is anyio.to_thread.run_sync.__code__:
            return "a thread, and a loop of virtual time has none"
    return _other_tasks(task, frames, label)


def _other_tasks(task: asyncio.Task[Any], frames: list[FrameType], label: Label) -> str:
    """The other tasks that a task waits for: in a group, in a gather, or one by name."""
    for frame in reversed(frames):
        if frame.f_code.co_name == "__aexit__":
            group = frame.f_locals.get("self")
            inner = [
                one
                for one in getattr(group, "_tasks", ())
                if isinstance(one, asyncio.Task) and not one.done()
            ]
            if inner:
                return "its tasks " + ", ".join(sorted(label(one) for one in inner))
    future: Any = getattr(task, "_fut_waiter", None)
    children = getattr(future, "_children", [future])
    names = sorted(
        label(one) for one in children if isinstance(one, asyncio.Task) and not one.done()
    )
    return "the end of " + ", ".join(names) if names else "a future that nobody completes"
