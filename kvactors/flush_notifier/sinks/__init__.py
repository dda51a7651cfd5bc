"""Where flush tasks go."""

from collections.abc import Sequence

from kvactors.config import Config
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.sinks.jsonl import JsonLinesSink
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.flush_notifier.view import SinkView
from kvactors.layout.base import Layout
from kvactors.sink_config import (
    AttentionStoreSinkConfig,
    JsonLinesSinkConfig,
    KvEventsSinkConfig,
    MemorySinkConfig,
    SinkConfig,
)

__all__ = ["JsonLinesSink", "MemorySink", "Sink", "make_sink", "make_sinks", "require_sinks"]


def make_sink(settings: SinkConfig, config: Config, layout: Layout) -> Sink:
    """The sink that settings describe. SinkError names what it lacks to work (an extra, an SDK, a folder)."""
    if isinstance(settings, MemorySinkConfig):
        return MemorySink(settings, layout.block_size)
    if isinstance(settings, JsonLinesSinkConfig):
        return JsonLinesSink(settings, layout.block_size)
    if isinstance(settings, AttentionStoreSinkConfig):
        from kvactors.attention_store import sdk_settings
        from kvactors.flush_notifier.sinks.attention_store import AttentionStoreSink

        return AttentionStoreSink(settings, sdk_settings(config), layout)
    assert isinstance(settings, KvEventsSinkConfig)
    from kvactors.flush_notifier.sinks.kv_events import KvEventsSink

    return KvEventsSink(settings, layout.block_size)


def require_sinks(sinks: Sequence[Sink]) -> None:
    """Raise TypeError for a given sink that is none."""
    for sink in sinks:
        kind = type(sink).__name__
        if not isinstance(sink, Sink):
            raise TypeError(f"a sink must be an instance of a subclass of kvactors.flush_notifier.sinks.Sink, not {kind}")
        name, view = getattr(sink, "name", None), getattr(sink, "view_of", None)
        if not isinstance(name, str) or not name or not isinstance(view, SinkView):
            raise TypeError(f"sink {kind} has no name or no view: its __init__ must call super().__init__(name)")


def make_sinks(config: Config, layout: Layout) -> list[Sink]:
    """A config's sinks that this rank reports to: AttentionStore hears from rank 0 alone."""
    reporting = [
        s for s in config.flush.sinks if not (isinstance(s, AttentionStoreSinkConfig) and config.attention_store.shard_id)
    ]
    return [make_sink(settings, config, layout) for settings in reporting]
