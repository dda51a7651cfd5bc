"""The contents of a scenario file: a cache's config, a workload, and the expected results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Literal, TypeAlias

import msgspec

from kvactors.errors import ConfigError
from kvactors.scenario.report import Report, lookup
from kvactors.settings import Config
from kvactors.settings.sinks import AttentionStoreSinkConfig, KvEventsSinkConfig, MemorySinkConfig
from kvactors.testing.faults import Fault, Kind


class ScenarioInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """name, description: for people. seed: of everything random in the workload."""

    name: str
    description: str = ""
    seed: int = 0


ABOUT_A_REQUEST = ("acquire", "extend", "commit", "finish", "preempt")


class MediaSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A media item of a prompt: `length` tokens from `offset` on. hash: of its content."""

    offset: int
    length: int
    hash: str


class ScenarioStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One move of a script.

    do: the operation. request: name of the request. prompt: seed of the tokens of acquire and
    extend. tokens: how many, or for commit and preempt how many are computed (commit: 0 means all).
    salt, lora, media: of acquire. level: of sleep. expect: ok, or the refusal that must come.
    cached_tokens: tokens that must be cached after the loads of acquire. -1: any number.
    """

    do: Literal[
        "acquire",
        "extend",
        "commit",
        "finish",
        "preempt",
        "clear",
        "pause",
        "resume",
        "sleep",
        "wake",
        "settle",
    ]
    request: str = ""
    prompt: int = 0
    tokens: int = 0
    salt: str | None = None
    lora: str | None = None
    media: tuple[MediaSpec, ...] = ()
    level: int = 1
    expect: Literal["ok", "no_room", "paused", "asleep", "leases_open"] = "ok"
    cached_tokens: int = -1


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """kind: chat (conversations that grow by turns behind a shared system prompt), script (the
    steps, in order) or tenants (a quiet tenant and a noisy one, with both policies: `sessions`
    prompts of the quiet one, `turns` times each, and after each request `flood` unique prompts of
    the noisy one, each three times).

    sessions, turns: how many conversations of how many turns. concurrency: sessions at once.
    system_tokens: shared beginning. user_tokens, output_tokens: mean lengths of a turn's question
    and answer. think: seconds between question and answer, as a model would take.

    tenants, adapters, images: how many of the conversations have the same text each, and differ in
    the salt, in the LoRA adapter or in the images alone. The first tenant has no salt, the first
    adapter is none. image_tokens: placeholders of the image that each question begins with (0:
    none). settle: wait between turns until the cache is idle, so that what a turn hits does not
    depend on how fast the disk is.
    """

    kind: Literal["chat", "script", "tenants"] = "chat"
    sessions: int = 8
    turns: int = 4
    concurrency: int = 4
    system_tokens: int = 256
    user_tokens: int = 128
    output_tokens: int = 64
    think: float = 0.0
    tenants: int = 1
    adapters: int = 1
    images: int = 1
    image_tokens: int = 0
    settle: bool = False
    flood: int = 0
    step: tuple[ScenarioStep, ...] = ()


class FaultSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of a sink or of the store, and its time.

    Attributes:
        kind: of a sink: down (refuses every call), hang (never answers), fail_every (refuses every
            `every`-th call), lose_answers (carries out a call, then fails), loses_state (its index
            is empty at once. At the end the run waits for a resync at its `resync_interval_s`, or
            asks for one if that is 0). Of the store: down (refuses everything), full (refuses
            writes), slow (every call takes `delay` seconds more), bit_rot (a bit of every
            `every`-th slot of a file store is flipped, at once).
        seconds: duration. With 0 the fault lasts until the end, and the run does not wait for
            that sink.
        turn, turns: in place of at and seconds, the turn of a chat (from 1 on) before which the
            fault begins, and the number of turns it lasts (0: until the end).
    """

    kind: Literal[
        "down", "hang", "fail_every", "lose_answers", "loses_state", "full", "slow", "bit_rot"
    ]
    sink: str = ""
    storage: bool = False
    delay: float = 0.1
    at: float = 0.0
    seconds: float = 0.0
    turn: int = 0
    turns: int = 0
    every: int = 2

    @property
    def lasting(self) -> bool:
        """Whether it never ends."""
        return not self.seconds and not self.turns and self.kind != "loses_state"

    @property
    def fault(self) -> Fault:
        """As the injectors have it."""
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


class RouterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process that mirrors this node from its KV events alone.

    Attributes:
        lose: share of the messages that it drops. It asks for a replay after a loss.
        follow: snapshots (it takes one whenever it connects) or numbers (it uses the numbers of
            the batches alone, as Dynamo does: a batch up to the last one is passed over, a higher
            number than the next is a gap).
    """

    enabled: bool = False
    lose: float = 0.0
    follow: Literal["snapshots", "numbers"] = "snapshots"


class ProcessSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kills of the process that the cache runs in, and restarts of the cache.

    Attributes:
        kills: seconds after which each process but the last is killed (SIGKILL). With any the
            cache runs in a separate process.
        restarts: number of times that the workload is run, and the cache closed and opened again,
            before the run that counts.
    """

    kills: tuple[float, ...] = ()
    restarts: int = 0


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Mooncake pool of this machine. enabled: whether a master is started for the run.
    first_node: whether another cache of the pool runs the workload first and stays. down_at,
    down_for: seconds after which the master is killed, and until it is started again (0: never)."""

    enabled: bool = False
    first_node: bool = False
    down_at: float = 0.0
    down_for: float = 1.0


Placement = Literal["random", "kv_aware", "no_pool"]


class FleetFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of the fleet, in the run of every placement.

    Attributes:
        kind: kill (SIGKILL, started again at the end), pause (SIGSTOP), slow (the node's link has
            `mbit_per_s` only), cut (the link is down), full (the node fills the pool with pinned
            objects, and removes them at the end). slow and cut need network namespaces.
        after: requests that have ended when the fault begins. Further ones wait until it has.
        requests: how many requests end during it at least.
    """

    kind: Literal["kill", "pause", "slow", "cut", "full"]
    target: Literal["master", "node"] = "node"
    node: int = 0
    after: int = 0
    seconds: float = 1.0
    requests: int = 0
    mbit_per_s: float = 8.0


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet of nodes over one Mooncake pool, each in a process and a network namespace.

    Attributes:
        clients: how many of them, the last ones, give the pool no memory.
        placements: how requests choose their node. The workload runs once for each: random,
            kv_aware (the node with the fewest tokens to compute, by the nodes' KV events and the
            requests in flight) and no_pool (random, without a pool, for comparison).
        twins: every n-th request is served by two nodes at once (0: none).
    """

    nodes: int = 0
    clients: int = 0
    placements: tuple[Placement, ...] = ("random", "kv_aware")
    twins: int = 0
    fault: tuple[FleetFault, ...] = ()


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An expectation: the value must lie within."""

    min: float | None = None
    max: float | None = None


class Scenario(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole scenario file. expect: by dotted name of a report's field, a value or bounds."""

    scenario: ScenarioInfo
    workload: Workload = Workload()
    fault: tuple[FaultSpec, ...] = ()
    router: RouterSpec = RouterSpec()
    process: ProcessSpec = ProcessSpec()
    mooncake: Pool = Pool()
    fleet: FleetSpec = FleetSpec()
    expect: dict[str, float | Bound] = msgspec.field(default_factory=dict)

    @classmethod
    def from_mapping(cls, data: Any) -> Scenario:
        """Check a mapping. Raises ConfigError with the reason."""
        data = {**data, "expect": flatten(data.get("expect", {}))}
        scenario = super().from_mapping(data)
        checks = (checks_of_workload, checks_of_parts, checks_of_fleet)
        for is_wrong, complaint in chain.from_iterable(check(scenario) for check in checks):
            if is_wrong:
                raise ConfigError(complaint)
        for name in scenario.expect:
            if name.partition(".")[0] not in Report.__struct_fields__:
                raise ConfigError(f"expect.{name}: reports have no such field")
        return scenario


Checks: TypeAlias = Iterator[tuple[object, str]]
"""Whether a value is wrong, and the complaint, in the order in which they are made."""

AT_LEAST = {
    **dict.fromkeys(("sessions", "turns", "concurrency", "user_tokens", "output_tokens"), 1),
    **dict.fromkeys(("tenants", "adapters", "images"), 1),
    **dict.fromkeys(("system_tokens", "image_tokens", "flood"), 0),
}


def checks_of_workload(scenario: Scenario) -> Checks:
    """Values of a workload that do not make sense."""
    work = scenario.workload
    is_script = work.kind == "script"
    yield (
        is_script != bool(work.step),
        "workload.step belongs to kind = 'script', and it needs some",
    )
    for name, low in AT_LEAST.items():
        value = getattr(work, name)
        yield value < low, f"workload.{name} must be at least {low}, not {value}"
    yield work.flood and work.kind != "tenants", "workload.flood belongs to kind = 'tenants'"
    without = work.images > 1 and not work.image_tokens
    yield without, "workload.images needs image_tokens: without them no prompt has an image"
    think = work.think
    yield not 0 <= think < math.inf, f"workload.think must be finite and not negative: {think}"
    for number, step in enumerate(work.step, 1):
        where = f"workload.step, step {number} ({step.do})"
        yield step.do in ABOUT_A_REQUEST and not step.request, f"{where}: request is missing"
        few = step.tokens < (1 if step.do in ("acquire", "extend") else 0)
        yield few or step.prompt < 0, f"{where}: too few tokens, or a negative prompt"
        deep = step.level != 1 and (step.do != "sleep" or step.level != 2)
        yield deep, f"{where}: level is 1 or 2, of sleep"
        of_acquire = {
            "cached_tokens": step.cached_tokens >= 0,
            "salt": step.salt is not None,
            "lora": step.lora is not None,
            "media": step.media,
        }
        for name, given in of_acquire.items():
            yield given and step.do != "acquire", f"{where}: {name} belongs to acquire"


def checks_of_parts(scenario: Scenario) -> Checks:
    """Faults, and parts beside the cache, that cannot be in this scenario."""
    yield (
        not scenario.device.num_blocks,
        "device.num_blocks must be at least 1: a scenario sets it nowhere else",
    )
    for number, fault in enumerate(scenario.fault, 1):
        for is_wrong, complaint in checks_of_fault(fault, scenario):
            yield is_wrong, f"fault {number}: {complaint}"
    lose, restarts = scenario.router.lose, scenario.process.restarts
    kills, pool = scenario.process.kills, scenario.mooncake
    yield not 0 <= lose < 1, f"router.lose must be in 0..1, not {lose}"
    yield (
        scenario.router.enabled and events_of(scenario) is None,
        "router needs a sink of kind 'kv_events' with a replay_endpoint",
    )
    yield (
        any(not 0 < seconds < math.inf for seconds in kills),
        "process.kills must be positive numbers of seconds",
    )
    yield restarts < 0, f"process.restarts must be at least 0, not {restarts}"
    foreign = pool.enabled and scenario.storage.backend != "mooncake"
    yield foreign, "mooncake needs storage.backend = 'mooncake'"
    timed = pool.down_at >= 0 and pool.down_for >= 0
    yield not timed, "mooncake.down_at and down_for must not be negative"
    chats = scenario.workload.kind == "chat"
    yield kills and not chats, "process.kills belongs to workload.kind = 'chat'"


def checks_of_fault(fault: FaultSpec, scenario: Scenario) -> Checks:
    """Why a fault cannot be."""
    sinks = {sink.label: sink for sink in scenario.flush.sinks}
    backend, work = scenario.storage.backend, scenario.workload
    yield fault.storage == bool(fault.sink), "say either which sink, or storage = true"
    kinds, what = (STORAGE_FAULTS, "storage") if fault.storage else (SINK_FAULTS, "a sink")
    yield fault.kind not in kinds, f"{fault.kind} is no fault of {what}"
    yield fault.storage and backend == "none", "there is no storage"
    losing = isinstance(sinks.get(fault.sink), MemorySinkConfig | AttentionStoreSinkConfig)
    yield (
        fault.kind == "loses_state" and not losing,
        "loses_state needs a sink of kind memory or attention_store",
    )
    yield (
        fault.kind == "bit_rot" and backend != "file",
        "bit_rot needs storage.backend = 'file'",
    )
    yield (
        not fault.storage and fault.sink not in sinks,
        f"there is no sink {fault.sink!r} (sinks: {', '.join(sinks) or 'none'})",
    )
    yield (
        min(fault.turn, fault.turns) < 0
        or (fault.turns and not fault.turn)
        or (fault.turn and (fault.at or fault.seconds)),
        "turn counts from 1; give turn and turns, or at and seconds",
    )
    yield fault.turn > 0 and work.kind != "chat", "only a chat has turns"
    yield (
        fault.turn > 0 and fault.turn + fault.turns > work.turns,
        f"it must end before the last of {work.turns} turns of a chat begins",
    )
    times = (fault.at, fault.seconds, fault.delay)
    yield (
        not all(0 <= one < math.inf for one in times) or fault.every < 1,
        "at, seconds and delay must not be negative, every at least 1",
    )


def checks_of_fleet(scenario: Scenario) -> Checks:
    """A fleet that cannot be."""
    fleet = scenario.fleet
    if not fleet.nodes:
        others = fleet != FleetSpec()
        yield others, "fleet.nodes is missing: the other settings of [fleet] need it"
        return
    yield not 2 <= fleet.nodes <= 64, f"fleet.nodes must be in 2..64, not {fleet.nodes}"
    yield (
        scenario.storage.backend != "mooncake" or scenario.workload.kind != "chat",
        "fleet needs storage.backend = 'mooncake' and workload.kind = 'chat'",
    )
    yield (
        not 0 <= fleet.clients < fleet.nodes,
        "fleet.clients must be fewer than the nodes: the pool needs memory",
    )
    yield (
        not fleet.placements or len(set(fleet.placements)) < len(fleet.placements),
        "fleet.placements must name at least one placement, each once",
    )
    yield fleet.twins < 0, f"fleet.twins must not be negative: {fleet.twins}"
    for number, fault in enumerate(fleet.fault, 1):
        where = f"fleet.fault {number}"
        of_node = fault.target == "master" and fault.kind not in ("kill", "pause")
        yield of_node, f"{where}: a master has no fault {fault.kind!r}"
        yield not 0 <= fault.node < fleet.nodes, f"{where}: there is no node {fault.node}"
        is_positive = 0 < fault.seconds < math.inf and fault.mbit_per_s > 0
        yield (
            min(fault.after, fault.requests) < 0 or not is_positive,
            f"{where}: after and requests must not be negative, seconds and mbit_per_s above 0",
        )


def events_of(config: Config) -> KvEventsSinkConfig | None:
    """The first KV-events sink that can be asked for a replay."""
    found = [
        s for s in config.flush.sinks if isinstance(s, KvEventsSinkConfig) and s.replay_endpoint
    ]
    return found[0] if found else None


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
        if isinstance(value, dict) and not set(value) & {"min", "max"}:
            flat |= flatten(value, name + ".")
        else:
            flat[name] = value
    return flat


def disappointments(expect: dict[str, float | Bound], report: Report) -> list[str]:
    """Describe the expectations that do not hold."""
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
        if (bound.min is not None and value < bound.min) or (
            bound.max is not None and value > bound.max
        ):
            failed.append(f"{name} is {value}, expected {msgspec.to_builtins(wanted)}")
    return failed
