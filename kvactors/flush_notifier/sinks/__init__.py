"""Where flush tasks go."""

from collections.abc import Sequence

from kvactors.device.base import DeviceBlocks
from kvactors.errors import ConfigError
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.sinks.jsonl import JsonLinesSink
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.flush_notifier.view import SinkFilter
from kvactors.layout.base import Layout
from kvactors.settings import Config
from kvactors.settings.check import class_at
from kvactors.settings.sinks import (
    AttentionStoreSinkConfig,
    ClassSinkConfig,
    JsonLinesSinkConfig,
    KvEventsSinkConfig,
    MemorySinkConfig,
    SinkConfig,
)

__all__ = ["JsonLinesSink", "MemorySink", "Sink", "make_sink", "make_sinks", "require_sinks"]


def make_sink(
    settings: SinkConfig, config: Config, layout: Layout, device: DeviceBlocks | None = None
) -> Sink:
    """The sink that settings describe. SinkError names what it lacks to work (an extra, an SDK, a
    folder). device: the cache's, if it is there."""
    if isinstance(settings, AttentionStoreSinkConfig):
        from kvactors.attention_sdk import sdk_settings
        from kvactors.flush_notifier.sinks.attention_store import AttentionStoreSink

        return AttentionStoreSink(settings, sdk_settings(config, layout, device))
    return make_plain_sink(settings, config.cache.model, layout.block_size)


def make_plain_sink(settings: SinkConfig, model: str, block_size: int) -> Sink:
    """A sink of any kind but AttentionStore's, which alone needs more of a cache."""
    if isinstance(settings, MemorySinkConfig):
        return MemorySink(settings, block_size)
    if isinstance(settings, JsonLinesSinkConfig):
        return JsonLinesSink(settings, block_size)
    if isinstance(settings, KvEventsSinkConfig):
        from kvactors.flush_notifier.sinks.kv_events import KvEventsSink

        return KvEventsSink(settings.for_model(model), block_size)
    assert isinstance(settings, ClassSinkConfig)
    kind = class_of_sink(settings)
    try:
        made: Sink = kind(settings, block_size)
    except TypeError as error:
        where = f"flush.sinks {settings.label!r}: kind {settings.class_path!r}"
        raise ConfigError(f"{where} cannot be made: {error}") from error
    require_sink(made)
    return made


def class_of_sink(settings: ClassSinkConfig) -> type[Sink]:
    """The class of a sink of another package."""
    known = ("memory", "jsonl", "attention_store", "kv_events")
    where = f"flush.sinks {settings.label!r}: kind"
    found: type[Sink] = class_at(settings.class_path, Sink, where, known, ConfigError)
    return found


def require_sinks(config: Config, sinks: Sequence[Sink]) -> None:
    """Raise TypeError for a given sink that is none, and ConfigError for flush-only mode without
    any."""
    if config.flush.flush_only and not (config.flush.sinks or sinks):
        raise ConfigError(
            "flush.mode is flush_only (or FD_AS_ONLY_FLUSH=1), and there is no sink: name one "
            "in flush.sinks, or set storage.backend = "
            "'attention_store', whose index is the sink then"
        )
    for sink in sinks:
        require_sink(sink)


def require_sink(sink: Sink) -> None:
    """Raise TypeError for a given sink that is none, or has not called its base class."""
    kind = type(sink).__name__
    if not isinstance(sink, Sink):
        raise TypeError(
            "a sink must be an instance of a subclass of kvactors.flush_notifier.sinks.Sink, "
            f"not {kind}"
        )
    name, wanted = getattr(sink, "name", None), getattr(sink, "filter", None)
    if not isinstance(name, str) or not name or not isinstance(wanted, SinkFilter):
        raise TypeError(
            f"sink {kind} has no name or no filter: its __init__ must call super().__init__(name)"
        )


def make_sinks(config: Config, layout: Layout, device: DeviceBlocks | None = None) -> list[Sink]:
    """A config's sinks that this rank reports to: rank 0 alone, or the leader, reports to
    AttentionStore."""
    return [
        make_sink(settings, config, layout, device)
        for settings in config.flush.sinks
        if not (isinstance(settings, AttentionStoreSinkConfig) and config.attention_store.shard_id)
    ]
