"""Settings of the flush sinks, one struct for each value of `kind` in TOML, and of AttentionStore's
SDK. The ZMQ endpoints of KV events."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from string import Formatter
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvactors.errors import ConfigError
from kvactors.settings.check import (
    CLASS_KIND,
    ByteCount,
    ByteSize,
    Count,
    DeviceNumber,
    Number,
    Port,
    Seconds,
    SecondsOrZero,
    SmallCount,
    SmallNumber,
    UsedIf,
    Variable,
    host_and_port,
    in_bytes,
)

TOPIC_FIELDS = ("model", "host", "dp_rank")  # names that a topic may contain in braces
LEAST_RESYNC_S = 0.1  # seconds between two resyncs at least
MAX_HIGH_WATER_MARK = (1 << 31) - 1  # ZMQ's socket option is a C int

TierName = Literal["device", "host", "storage"]


class SinkConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"
):
    """Settings of every sink.

    Attributes:
        name: unique. Empty: the kind.
        tiers: whose blocks are reported.
        granularity: "per_tier": a report for each tier. "node": one report, resident while any of
            the tiers holds the block.
        report_gains_at: when new resident blocks are reported.
        resync_interval_s: seconds between repetitions of the complete state (`KVCache.resync`), for
            an index that may lose it unnoticed (0: never).
    """

    name: str = ""
    tiers: tuple[TierName, ...] = ("device", "host")
    granularity: Literal["per_tier", "node"] = "per_tier"
    report_gains_at: Literal["commit", "request_finish"] = "commit"
    resync_interval_s: SecondsOrZero = 0.0

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def label(self) -> str:
        return self.name or self.kind

    def check(self) -> None:
        """Raise ConfigError for values that do not go together."""
        for fault in self.faults():
            raise ConfigError(fault)

    def faults(self) -> Iterator[str]:
        for fault in self._faults():
            yield f"flush.sinks {self.label!r}: {fault}"

    def _faults(self) -> Iterator[str]:
        if not self.tiers:
            yield "tiers must name at least one tier"
        if self.resync_interval_s and self.resync_interval_s < LEAST_RESYNC_S:
            yield (
                f"resync_interval_s must be 0 (never) or at least {LEAST_RESYNC_S} seconds, not "
                f"{self.resync_interval_s}"
            )


class MemorySinkConfig(SinkConfig, frozen=True, tag="memory"):
    """A mirror in this process: for tests and reports."""


class JsonLinesSinkConfig(SinkConfig, frozen=True, tag="jsonl"):
    """JSON lines appended to a file.

    Attributes:
        path: the file, in an existing folder.
        max_bytes: size from which a file is renamed to `path.1` (and `path.1` to `path.2`) and a
            new one begins. None: it grows.
        backup_count: renamed files that stay. 0: a full file is removed.
    """

    path: str = ""
    max_bytes: ByteSize | None = None
    backup_count: SmallNumber = 3

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if not self.path:
            yield "path is missing"
        if self.max_bytes is not None and not in_bytes(self.max_bytes, "max_bytes"):
            yield "max_bytes must be at least 1 byte"


class ClassSinkConfig(SinkConfig, frozen=True, tag=CLASS_KIND):
    """A sink of another package: `kind = "package.module:Class"` in TOML.

    Attributes:
        class_path: of the `Sink`, called with this and the tokens of a block.
        options: settings of the sink itself.
    """

    class_path: str = ""
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def label(self) -> str:
        """The sink's name."""
        return self.name or self.class_path.rpartition(":")[2]

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        module, _, name = self.class_path.partition(":")
        if not (module and name):
            yield f"class_path {self.class_path!r} must be package.module:Class"


class AttentionStoreSinkConfig(SinkConfig, frozen=True, tag="attention_store"):
    """AttentionStore's token index, through its SDK (see `[attention_store]`). A block is resident
    while device or host holds it, from the finish of a request on.

    Attributes:
        announce: "difference": a finish sends blocks not sent yet. "full": it sends its path from
            block 0, as FastDeploy does, which repairs an index that lost it.
        journal: file of the sent blocks, with which the next process retracts blocks that this one
            leaves in the index. Empty: none.
    """

    granularity: Literal["per_tier", "node"] = "node"
    report_gains_at: Literal["commit", "request_finish"] = "request_finish"
    announce: Literal["difference", "full"] = "difference"
    journal: str = ""

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if self.granularity != "node":
            yield "AttentionStore's index has no tiers: granularity must be 'node'"


class KvEventsSinkConfig(SinkConfig, frozen=True, tag="kv_events"):
    """KV events over ZMQ as vLLM and SGLang publish them (format: docs/kv_events.md).

    Events hold the token ids of all prompts. tcp://*, tcp://0.0.0.0 and tcp://[::] publish them on
    every interface (logged as a warning).

    Attributes:
        endpoint: of the PUB socket. dp_rank is added to a tcp port.
        replay_endpoint: likewise of the ROUTER socket. Empty: none.
        bind: listen or connect. "auto" listens at ipc, inproc and addresses of this machine (*, ::,
            localhost, 127.*).
        numbers: of a process's first batch. "rising": microseconds since 1970, for Dynamo and newer
            llm-d routers, which skip lower numbers and request a replay after a jump. "from_zero":
            0, for vLLM's router and llm-d routers that refuse a replay which begins at another
            number than requested. They take a lower number for a restart.
        heartbeat_s: seconds without a batch after which an empty one is published, so that a reader
            that missed batches or has just joined sees a gap (0: never).
        topic: of the events. {model} is cache.model, {host} this machine's name (the pod's, in
            Kubernetes), {dp_rank} dp_rank. llm-d expects "kv@{host}@{model}".
        dialect: "map" (vLLM after 0.23, SGLang) or "array" (older readers).
        maps_for: readers of salts and media in maps (docs/kv_events.md). "all": every reader.
            vLLM's router refuses fields that vLLM does not send.
        arrays_for: readers of salts and media in arrays.
        media: names of tiers: "vllm" (GPU, CPU, STORAGE) or "sglang" (GPU, CPU_PINNED, DISK).
        hashes: "int" (last 8 bytes of a block hash, unsigned) or "bytes" (all 32).
        dp_rank: data-parallel rank of this engine.
        replay: "five_frames" (with the topic) or "four_frames" (older readers).
        replay_window: batches kept for replay.
        replay_bytes: their bytes at most.
        high_water_mark: messages queued for a subscriber before some are lost.
        max_blocks: blocks in one event batch.
    """

    tiers: tuple[TierName, ...] = ("device", "host", "storage")
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str = ""
    bind: Literal["auto", "bind", "connect"] = "auto"
    numbers: Literal["rising", "from_zero"] = "rising"
    heartbeat_s: SecondsOrZero = 5.0
    topic: str = ""
    dialect: Literal["map", "array"] = "map"
    maps_for: Literal["all", "vllm"] = "all"
    arrays_for: Literal["vllm", "dynamo"] = "vllm"
    media: Literal["vllm", "sglang"] = "vllm"
    hashes: Literal["int", "bytes"] = "int"
    dp_rank: Port = 0
    replay: Literal["five_frames", "four_frames"] = "five_frames"
    replay_window: Count = 10_000
    replay_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] = 256 << 20
    high_water_mark: Annotated[int, Meta(ge=1, le=MAX_HIGH_WATER_MARK)] = 100_000
    max_blocks: SmallCount = 256

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if self.granularity != "per_tier":
            yield "KV events are sent for each tier: granularity must be 'per_tier'"
        try:
            self.endpoints()
        except ValueError as error:
            yield str(error)
        yield from self._topic_faults()
        if self.arrays_for != "vllm" and self.dialect != "array":
            yield (
                "arrays_for is for dialect 'array' only: maps carry salts and media for every "
                "reader"
            )
        if self.maps_for != "all" and self.dialect != "map":
            yield "maps_for is for dialect 'map' only: see arrays_for"

    def _topic_faults(self) -> Iterator[str]:
        try:
            parts = list(Formatter().parse(self.topic))
        except ValueError as error:
            yield f"topic {self.topic!r}: {error} (a brace itself is written twice)"
            return
        for _, field, form, conversion in parts:
            if field is not None and (field not in TOPIC_FIELDS or form or conversion):
                known = ", ".join(f"{{{known}}}" for known in TOPIC_FIELDS)
                yield f"topic {self.topic!r}: there are {known}, and no other field"

    def for_model(self, model: str) -> KvEventsSinkConfig:
        """The same with a topic that names model, machine and rank."""
        topic = self.topic.format(model=model, host=socket.gethostname(), dp_rank=self.dp_rank)
        return msgspec.structs.replace(self, topic=topic)

    def endpoints(self) -> dict[str, Endpoint]:
        """The endpoints of this rank, by setting.

        Raises:
            ValueError: one cannot be, or both are the same.
        """
        found: dict[str, Endpoint] = {}
        for name in ("endpoint", "replay_endpoint"):
            text = getattr(self, name)
            if not text and name != "endpoint":
                continue
            try:
                one = Endpoint.of(of_rank(text, self.dp_rank))
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
            for other, taken in found.items():
                if one.clashes(taken):
                    raise ValueError(f"{name} {text!r} is taken by {other}")
            found[name] = one
        return found


def sink_faults(sinks: Sequence[SinkConfig]) -> Iterator[str]:
    """What is wrong with sinks, alone or in combination."""
    if len({sink.label for sink in sinks}) < len(sinks):
        yield "flush.sinks need different names"
    taken: dict[Endpoint, str] = {}
    for sink in sinks:
        yield from sink.faults()
        ours: dict[str, Endpoint] = {}
        if isinstance(sink, KvEventsSinkConfig):
            with suppress(ValueError):  # among the faults of the sink
                ours = sink.endpoints()
        for one in ours.values():
            for other, owner in taken.items():
                if owner != sink.label and one.own and one.clashes(other):
                    yield f"flush.sinks {sink.label!r} and {owner!r} have the same endpoint"
        taken |= dict.fromkeys(ours.values(), sink.label)


AnySinkConfig = (
    MemorySinkConfig
    | JsonLinesSinkConfig
    | AttentionStoreSinkConfig
    | KvEventsSinkConfig
    | ClassSinkConfig
)


def _uses_sdk(config: Any) -> bool:
    sinks = any(sink.kind == "attention_store" for sink in config.flush.sinks)
    return sinks or config.storage.backend == "attention_store"


SDK_USED = UsedIf(_uses_sdk, "without a sink or a storage back end of that kind")
NAME_USED = UsedIf(lambda config: _uses_sdk(config) or not config.cache.model, SDK_USED.why)
"""Without `cache.model`, the namespace and the version of AttentionStore name the model."""

NAMESPACE, POD_NAME, MODEL_VERSION = "default_ns", "default_pod", "v0"
"""Names that AttentionStore's SDK is given where none is set, as FastDeploy passes them."""


class AttentionStoreConfig(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """AttentionStore's SDK, one object for sink and storage back end. Unset values come from a
    variable, or are derived (docs/attention_store.md).

    Attributes:
        sdk: package to import.
        namespace, pod_name, model_version: as FastDeploy passes them.
        shard_id: tensor-parallel rank, from `[ranks]` or the layout. Rank 0 alone reports.
        shard_num: number of ranks, likewise.
        layer_num: 0: the layout's.
        bytes_per_shard_layer_per_block: 0: the layout's.
        device_id: the GPU's number.
        dp_id: data-parallel rank.
        splitwise_role: of the role's suffix.
        role_suffix: append `_{splitwise_role}_{dp_id}` to the pod's name. None: yes.
        platform: "cuda" passes the constructor's longer argument list. None: as the device.
        ready_timeout_s: seconds to wait while it reports "cuda memory not ready".
        ready_interval_s: seconds between attempts.
        write_slice_blocks: blocks of one write of the back end (100).
        write_slice_timeout_s: seconds of one write of the back end (10).
        write_total_timeout_s: seconds of a request's writes (0: the rest of `storage.timeout_s`).
    """

    sdk: str = "attentionstore_sdk"
    namespace: Annotated[str, Variable("AS_NAMESPACE"), NAME_USED] = ""
    pod_name: Annotated[str, Variable("AS_POD_NAME")] = ""
    model_version: Annotated[str, Variable("AS_MODEL_VERSION"), NAME_USED] = ""
    shard_id: Number | None = None
    shard_num: Count | None = None
    layer_num: Number = 0
    bytes_per_shard_layer_per_block: ByteCount = 0
    device_id: DeviceNumber | None = None
    dp_id: Number = 0
    splitwise_role: str = "mixed"
    role_suffix: Annotated[bool | None, Variable("ENABLE_EP_DP_IN_FD", (False, True))] = None
    platform: Literal["cuda", "other"] | None = None
    ready_timeout_s: Seconds = 300.0
    ready_interval_s: Seconds = 5.0
    write_slice_blocks: Annotated[Count | None, Variable("AS_WRITE_SLICE_BLOCK_NUM")] = None
    write_slice_timeout_s: Annotated[Seconds | None, Variable("AS_WRITE_SLICE_TIMEOUT")] = None
    write_total_timeout_s: Annotated[SecondsOrZero | None, Variable("AS_WRITE_TOTAL_TIMEOUT")] = (
        None
    )

    def faults(self, tensor_parallel: int, ranks: int) -> Iterator[str]:
        """Numbers of shards that contradict the ranks.

        Args:
            tensor_parallel: of the layout.
            ranks: `ranks.count`.
        """
        if ranks > 1 and self.shard_id is not None:
            yield (
                f"attention_store.shard_id must be left out with ranks.count {ranks}: the leader "
                "and each rank have one shard each"
            )
        shards = max(ranks, tensor_parallel)
        if shards > 1 and self.shard_num not in (None, shards):
            yield (
                f"attention_store.shard_num is {self.shard_num}, and there are {shards} ranks "
                "(ranks.count, layout.tensor_parallel): leave it out, or make them agree"
            )
        shard_num = self.shard_num or shards
        if (self.shard_id or 0) >= shard_num:
            yield f"attention_store.shard_id must be in 0..{shard_num - 1}, not {self.shard_id}"


# -- ZMQ endpoints: validity, reachability from other machines, and equality

TRANSPORTS = ("tcp", "ipc", "inproc")


class Endpoint(NamedTuple):
    """host: without brackets, or a path or name. port: 0 lets the system choose, -1 without tcp."""

    transport: str
    host: str
    port: int = -1

    @classmethod
    def of(cls, text: str) -> Endpoint:
        """Parse an endpoint. Raises ValueError with the reason."""
        transport, mark, rest = text.partition("://")
        if not mark or transport not in TRANSPORTS:
            raise ValueError(f"must begin with tcp://, ipc:// or inproc://, not {text!r}")
        if transport != "tcp":
            if not rest or "\0" in rest:
                raise ValueError(
                    f"must have a {'path' if transport == 'ipc' else 'name'} after {transport}://, "
                    f"not {text!r}"
                )
            return cls(transport, rest)
        return cls(transport, *host_and_port(text))

    @property
    def any_host(self) -> bool:
        return self.transport == "tcp" and (self.host == "*" or self._is("is_unspecified"))

    def _is(self, trait: str) -> bool:
        """Whether the host is an address (IPv4 in IPv6 notation as IPv4) with this property."""
        try:
            address = ip_address(self.host)
        except ValueError:  # a name
            return False
        return bool(getattr(getattr(address, "ipv4_mapped", None) or address, trait))

    @property
    def ipv6(self) -> bool:
        return self.transport == "tcp" and ":" in self.host

    @property
    def own(self) -> bool:
        """Whether a publisher listens there, at this machine, rather than connecting to it."""
        if self.transport != "tcp":
            return True
        named = self.host == "localhost" or self.host.startswith("127.")  # 127.1 is a short form
        return named or self.any_host or self._is("is_loopback")

    def clashes(self, other: Endpoint) -> bool:
        """Whether two sockets cannot both listen there."""
        if self.transport != "tcp" or other.transport != "tcp":
            return self[:2] == other[:2]
        same_host = self.host == other.host or self.any_host or other.any_host
        return self.port == other.port != 0 and same_host


def of_rank(text: str, dp_rank: int) -> str:
    """The endpoint of a data-parallel rank: a tcp port is raised by it, other names get a suffix.
    ValueError for a port that is too high."""
    if not text or not dp_rank:
        return text
    endpoint = Endpoint.of(text)
    if endpoint.transport != "tcp":
        return f"{text}_dp{dp_rank}"
    if not endpoint.port:
        return text
    raised = f"{text.rpartition(':')[0]}:{endpoint.port + dp_rank}"
    Endpoint.of(raised)
    return raised
