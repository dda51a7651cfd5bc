"""Errors of actors: their texts for logs, and the cause inside groups of them."""

from __future__ import annotations

import traceback

from kvactors.actor.jobs import JobsRunOn
from kvactors.actor.log import described


def brief(error: BaseException) -> str:
    """An error's type and message, truncated: it may quote a caller's argument."""
    try:
        text = repr(error)
    except BaseException:  # an error of foreign code that cannot be printed
        text = described(error)
    return text if len(text) <= 300 else text[:297] + "..."


def frames(error: BaseException) -> list[str]:
    """Where an error comes from, innermost last, without the values of local variables: they may
    hold prompts."""
    return [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]


def jobs_run_on(error: BaseException) -> JobsRunOn | None:
    """The reason why a group cannot restart, if that is among nested errors."""
    if isinstance(error, BaseExceptionGroup):
        return next(
            (found for one in error.exceptions if (found := jobs_run_on(one)) is not None), None
        )
    return error if isinstance(error, JobsRunOn) else None


def root_cause(error: BaseException) -> BaseException:
    """The first real exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
