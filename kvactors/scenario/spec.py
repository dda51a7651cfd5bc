"""The contents of a scenario file: a cache's config, a workload, and the expected results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias, get_origin

import msgspec

from kvactors.errors import ConfigError
from kvactors.scenario.report import Expectation, Report, count_text
from kvactors.scenario.steps import (
    AbandonStep,
    AcquireStep,
    AnyStep,
    EndStep,
    ForkManyStep,
    ForkStep,
)
from kvactors.settings import Config
from kvactors.settings.check import Count, Number, SecondsOrZero, Tokens, TokensOrZero, settings_of
from kvactors.settings.sinks import AttentionStoreSinkConfig, MemorySinkConfig
from kvactors.settings.tables import SHARED
from kvactors.testing.faults import Fault, Kind


class ScenarioInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the scenario is about.

    Attributes:
        name: title of reports.
        description: what the scenario proves.
        seed: of all random work.
    """

    name: str
    description: str = ""
    seed: Number = 0


Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The requests.

    Attributes:
        kind: chat (growing conversations behind a shared system prompt) or script (the steps in
            order).
        sessions: conversations.
        turns: turns of a conversation.
        concurrency: conversations at once.
        system_tokens: shared beginning of conversations.
        user_tokens: mean length of a question.
        output_tokens: mean length of an answer.
        think: seconds between question and answer.
        tenants: salts. Their conversations have the same text. The first has no salt.
        adapters: likewise LoRA adapters.
        images: likewise images.
        image_tokens: placeholders of the image at the head of each question (0: no image).
        settle: wait between turns until the cache is idle, so that hits do not depend on the speed
            of the disk.
        step: the steps of a script.
    """

    kind: Literal["chat", "script"] = "chat"
    sessions: Count = 8
    turns: Count = 4
    concurrency: Count = 4
    system_tokens: TokensOrZero = 256
    user_tokens: Tokens = 128
    output_tokens: Tokens = 64
    think: SecondsOrZero = 0.0
    tenants: Count = 1
    adapters: Count = 1
    images: Count = 1
    image_tokens: TokensOrZero = 0
    settle: bool = False
    step: tuple[AnyStep, ...] = ()


class FaultSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of a sink or of the store.

    Attributes:
        kind: of a sink: down (refuses calls), hang (never answers), fail_every (refuses every
            `every`-th call), lose_answers (carries out a call, then fails), loses_state (its index
            is emptied. At the end the run waits for a resync, or asks for one if
            `resync_interval_s` is 0). Of the store: down (refuses everything), full (refuses
            writes), slow (calls take `delay` seconds more), bit_rot (flips a bit of every
            `every`-th slot of a file store).
        sink: name of the sink.
        storage: a fault of the store.
        delay: additional seconds of a call.
        at: seconds after the beginning.
        seconds: duration. 0: until the end, where the run does not wait for that sink.
        turn: in place of at, the turn of a chat (from 1) before which the fault begins.
        turns: in place of seconds, its length in turns (0: until the end).
        every: calls, or slots, between failures.
    """

    kind: Literal[
        "down", "hang", "fail_every", "lose_answers", "loses_state", "full", "slow", "bit_rot"
    ]
    sink: str = ""
    storage: bool = False
    delay: SecondsOrZero = 0.1
    at: SecondsOrZero = 0.0
    seconds: SecondsOrZero = 0.0
    turn: Number = 0
    turns: Number = 0
    every: Count = 2

    @property
    def lasting(self) -> bool:
        return not self.seconds and not self.turns and self.kind != "loses_state"

    @property
    def fault(self) -> Fault:
        kinds = STORAGE_FAULTS if self.storage else SINK_FAULTS
        return Fault(
            kinds[self.kind], self.at, self.sink, self.seconds, every=self.every, delay=self.delay
        )


SINK_FAULTS: dict[str, Kind] = {
    "down": "sink_down",
    "hang": "sink_hang",
    "fail_every": "sink_fail_every",
    "lose_answers": "sink_lose_answers",
    "loses_state": "sink_lose_state",
}
STORAGE_FAULTS: dict[str, Kind] = {
    "down": "store_down",
    "full": "disk_full",
    "slow": "store_slow",
    "bit_rot": "bit_flip",
}


class ProcessSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Restarts, and further caches.

    Attributes:
        restarts: runs of the workload, each followed by a restart of the cache, before the run that
            counts.
        engines: caches over one shared store. Each opens when the one before has run the workload.
            The run of the last, beside another of the others, counts.
    """

    restarts: Number = 0
    engines: Count = 1


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An expectation: the value must lie within.

    Attributes:
        min: the least value.
        max: the largest value.
    """

    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")

    def holds(self, value: float) -> bool:
        """Whether a value lies within."""
        low, high = self.min, self.max
        return (low is None or value >= low) and (high is None or value <= high)

    def __str__(self) -> str:
        if self.min is not None and self.min == self.max:
            return count_text(self.min)
        parts = {"at least": self.min, "at most": self.max}
        return ", ".join(f"{w} {count_text(one)}" for w, one in parts.items() if one is not None)


class Scenario(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole scenario file.

    Attributes:
        expect: by dotted name of a report's field, a value or bounds. Of a list, its length.
    """

    scenario: ScenarioInfo
    workload: Workload = Workload()
    fault: tuple[FaultSpec, ...] = ()
    process: ProcessSpec = ProcessSpec()
    expect: dict[str, float | Bound] = msgspec.field(default_factory=dict)

    @classmethod
    def check_mapping(cls, data: Any) -> tuple[Self, list[str]]:
        expect = data.get("expect", {})
        if isinstance(expect, dict):
            expect = flatten(expect)
        scenario, faults = super().check_mapping({**data, "expect": expect})
        if not faults:
            complaints = about_workload(scenario) | about_parts(scenario)
            faults = [complaint for complaint, applies in complaints.items() if applies]
        hints = {name: field.hint for name, field in settings_of(cls.report_type()).items()}
        for name in expect if isinstance(expect, dict) else ():
            field, dot, _ = name.partition(".")
            hint = hints.get(field, str)
            if hint is str or bool(dot) != (get_origin(hint) is dict):
                faults.append(f"expect.{name}: reports have no such number")
        return scenario, faults

    @classmethod
    def report_type(cls) -> type[Report]:
        """Whose fields `expect` may name."""
        return Report


Complaints: TypeAlias = dict[str, object]
"""Whether each complaint applies, in the order in which they are made."""


def about_workload(scenario: Scenario) -> Complaints:
    """Values of a workload that do not make sense together."""
    work = scenario.workload
    found: Complaints = {
        "workload.step belongs to kind = 'script', and it needs some": (
            (work.kind == "script") != bool(work.step)
        ),
        "workload.images needs image_tokens: without them no prompt has an image": (
            work.images > 1 and not work.image_tokens
        ),
    }
    return found | about_script(work.step, {sink.label for sink in scenario.flush.sinks})


def about_script(steps: tuple[AnyStep, ...], sinks: set[str]) -> Complaints:
    """Steps about requests and sinks that are not there."""
    found: Complaints = {}
    known, in_use = set[str](), set[str]()
    for number, step in enumerate(steps):
        where, begun = f"workload.step[{number}]", set[str]()
        if isinstance(step, AcquireStep):
            begun = {step.request}
        elif (name := getattr(step, "request", None)) is not None:
            found[f"{where}.request: no step before it acquires {name!r}"] = name not in known
            if isinstance(step, ForkStep | ForkManyStep):
                names = step.children if isinstance(step, ForkManyStep) else (step.child,)
                begun = set(names)
                for name in sorted(begun):
                    found[f"{where}.children: {name!r} is there twice"] = names.count(name) > 1
        for name in sorted(begun & in_use):
            found[f"{where}: {name!r} has a lease: take another name, or end it before"] = True
        named = {getattr(step, "sink", None), *(getattr(step, "sinks", None) or ())} - {None}
        for name in sorted(named - sinks):
            among = ", ".join(sorted(sinks)) or "none"
            found[f"{where}: there is no sink {name!r} (sinks: {among})"] = True
        if step.expect == "ok":
            known |= begun
            in_use |= begun
            if isinstance(step, EndStep | AbandonStep):
                in_use.discard(step.request)
    return found


def about_parts(scenario: Scenario) -> Complaints:
    """Faults, and parts beside the cache, that cannot be in this scenario."""
    found: Complaints = {
        "device.num_blocks must be at least 1: a scenario sets it nowhere else": (
            not scenario.device.num_blocks
        ),
        "process.engines above 1 needs a store that several nodes share": (
            scenario.process.engines > 1 and scenario.storage.backend not in SHARED
        ),
    }
    for number, fault in enumerate(scenario.fault):
        for complaint, applies in about_fault(fault, scenario).items():
            found[f"fault[{number}]: {complaint}"] = applies
    return found


def about_fault(fault: FaultSpec, scenario: Scenario) -> Complaints:
    """Why a fault cannot be."""
    sinks = {sink.label: sink for sink in scenario.flush.sinks}
    backend, work = scenario.storage.backend, scenario.workload
    kinds, what = (STORAGE_FAULTS, "storage") if fault.storage else (SINK_FAULTS, "a sink")
    losing = isinstance(sinks.get(fault.sink), MemorySinkConfig | AttentionStoreSinkConfig)
    return {
        "say either which sink, or storage = true": fault.storage == bool(fault.sink),
        f"{fault.kind} is no fault of {what}": fault.kind not in kinds,
        "there is no storage": fault.storage and backend == "none",
        "loses_state needs a sink of kind memory or attention_store": (
            fault.kind == "loses_state" and not losing
        ),
        "bit_rot needs storage.backend = 'file'": fault.kind == "bit_rot" and backend != "file",
        f"there is no sink {fault.sink!r} (sinks: {', '.join(sinks) or 'none'})": (
            not fault.storage and fault.sink and fault.sink not in sinks
        ),
        "turn counts from 1; give turn and turns, or at and seconds": (
            (fault.at or fault.seconds) if fault.turn else fault.turns
        ),
        "only a chat has turns": fault.turn and work.kind != "chat",
        f"it must end before the last of {work.turns} turns of a chat begins": (
            fault.turn and fault.turn + fault.turns > work.turns
        ),
    }


def requests_of(data: Mapping[str, Any]) -> int | None:
    """The requests that the workload of a scenario's file has, None if that is not known before its
    check or its run."""
    work = data.get("workload", {})
    if not isinstance(work, dict) or work.get("kind", "chat") != "chat":
        return None
    default = Workload()
    sessions = work.get("sessions", default.sessions)
    turns = work.get("turns", default.turns)
    return sessions * turns if isinstance(sessions, int) and isinstance(turns, int) else None


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested expectation tables by dotted name. A table of bounds is not flattened."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and not set(value) & {"min", "max"}:
            flat |= flatten(value, name + ".")
        else:
            flat[name] = value
    return flat


def outcomes(expect: dict[str, float | Bound], report: Report) -> list[Expectation]:
    """Each expectation with the value of the report. ConfigError: it is about no number."""
    found, fields = [], msgspec.to_builtins(report)
    for name, wanted in expect.items():
        value = fields
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise ConfigError(f"expect.{name}: reports have no such field")
            value = value[part]
        if isinstance(value, list):
            value = len(value)
        if not isinstance(value, int | float):
            raise ConfigError(f"expect.{name} is about no number")
        bound = wanted if isinstance(wanted, Bound) else Bound(wanted, wanted)
        found.append(Expectation(name, value, str(bound), bound.holds(value)))
    return found
