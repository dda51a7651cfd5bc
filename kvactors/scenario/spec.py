"""What a scenario file may say: a cache's config, a workload, and what must come out of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvactors.config import Config, convert, validate
from kvactors.errors import ConfigError
from kvactors.scenario.report import Report, lookup


class ScenarioInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """name, description: for people. seed: of everything random in the workload."""

    name: str
    description: str = ""
    seed: int = 0


ABOUT_A_REQUEST = ("acquire", "extend", "commit", "finish", "preempt")


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One move of a script.

    do: what. request: whose (a name). prompt: seed of the tokens of acquire and extend. tokens: how many, or for commit and preempt how many
    are computed (commit: 0 means all). expect: ok, or the refusal that must come. cached_tokens: what acquire must
    find, after its loads; -1: anything.
    """

    do: Literal["acquire", "extend", "commit", "finish", "preempt", "clear", "pause", "resume", "settle"]
    request: str = ""
    prompt: int = 0
    tokens: int = 0
    expect: Literal["ok", "no_room", "paused"] = "ok"
    cached_tokens: int = -1


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """kind: chat (conversations that grow by turns behind a shared system prompt) or script (the steps, in order).

    sessions, turns: how many conversations of how many turns. concurrency: sessions at once. system_tokens: shared beginning.
    user_tokens, output_tokens: mean lengths of a turn's question and answer.
    """

    kind: Literal["chat", "script"] = "chat"
    sessions: int = 8
    turns: int = 4
    concurrency: int = 4
    system_tokens: int = 256
    user_tokens: int = 128
    output_tokens: int = 64
    step: tuple[Step, ...] = ()


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An expectation: the value must lie within."""

    min: float | None = None
    max: float | None = None


class Scenario(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole scenario file. expect: by dotted name of a report's field, a value or bounds."""

    scenario: ScenarioInfo
    workload: Workload = Workload()
    expect: dict[str, float | Bound] = msgspec.field(default_factory=dict)

    @classmethod
    def from_mapping(cls, data: Any) -> Scenario:
        """Check a mapping. ConfigError names what is wrong in it."""
        data = {**data, "expect": flatten(data.get("expect", {}))}
        scenario = convert(data, cls)
        validate(scenario)
        validate_workload(scenario.workload)
        for name in scenario.expect:
            if name.partition(".")[0] not in Report.__struct_fields__:
                raise ConfigError(f"expect.{name}: reports have no such field")
        return scenario


def validate_workload(work: Workload) -> None:
    """Raise ConfigError for values that do not make sense, naming the key or the step."""
    if (work.kind == "script") != bool(work.step):
        raise ConfigError("workload.step belongs to kind = 'script', and it needs some")
    for name, low in (
        ("sessions", 1),
        ("turns", 1),
        ("concurrency", 1),
        ("system_tokens", 0),
        ("user_tokens", 1),
        ("output_tokens", 1),
    ):
        if getattr(work, name) < low:
            raise ConfigError(f"workload.{name} must be at least {low}, not {getattr(work, name)}")
    for number, step in enumerate(work.step, 1):
        if step.do in ABOUT_A_REQUEST and not step.request:
            raise ConfigError(f"workload.step, step {number} ({step.do}): request is missing")
        if step.tokens < (1 if step.do in ("acquire", "extend") else 0) or step.prompt < 0:
            raise ConfigError(f"workload.step, step {number} ({step.do}): too few tokens, or a negative prompt")
        if step.cached_tokens >= 0 and step.do != "acquire":
            raise ConfigError(f"workload.step, step {number} ({step.do}): cached_tokens belongs to acquire")


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested expectation tables by dotted name; a table of bounds stays one."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not set(value) & {"min", "max"}:
            flat |= flatten(value, name + ".")
        else:
            flat[name] = value
    return flat


def disappointments(expect: dict[str, float | Bound], report: Report) -> list[str]:
    """Which expectations do not hold, in words. ConfigError for one about a field that reports do not have."""
    failed = []
    for name, wanted in expect.items():
        try:
            value = lookup(report, name)
        except KeyError as error:
            raise ConfigError(f"expect.{name}: reports have no such field") from error
        bound = wanted if isinstance(wanted, Bound) else Bound(wanted, wanted)
        if isinstance(value, list):
            value = len(value)
        if not isinstance(value, int | float):
            raise ConfigError(f"expect.{name} is about no number")
        if (bound.min is not None and value < bound.min) or (bound.max is not None and value > bound.max):
            failed.append(f"{name} is {value}, expected {msgspec.to_builtins(wanted)}")
    return failed
