"""Settings that cannot be, one fault each: the error names the setting and what is allowed."""

from __future__ import annotations

import tomllib
from json import dumps

import pytest

from kvactors.errors import ConfigError
from kvactors.settings import Config

STORE = "cache.model = 'm'\nstorage = {backend = 'attention_store', write_policy = 'write_through'}"
RANKS = "ranks = {count = 2, endpoint = 'memory://environment'}"
TP2 = "layout = {num_kv_heads = 2, tensor_parallel = 2}"

VALUES = [
    ("device.kind = 'cdua'", r"unknown device\.kind 'cdua'\. Did you mean 'cuda'\? There are host"),
    ("device.kind = 'zzz'", r"unknown device\.kind 'zzz': there are host, paddle, cuda"),
    ("layout.kind = 'mqa'", r"unknown layout\.kind 'mqa'\. Did you mean '...'\?"),
    ("storage.backend = 'fiel'", r"storage\.backend 'fiel'\. Did you mean 'file'\?"),
    ("cache.block_size = 0", r"cache\.block_size must be at least 1.*1 to 16384"),
    ("cache.block_size = 'a'", r"block_size must be a whole number, 1 to 16384, not"),
    ("cache.model = true", r"cache\.model must be a text, not True"),
    ("cache = 5", "cache must be a table, not 5"),
    ("scenario = {}", r"unknown key 'scenario': there are cache, device"),
    ("device.num_blocks = '8 GiB'", r"device\.num_blocks must be a whole number"),
    ("device.capacity_bytes = 'eight'", r"device\.capacity_bytes must be a size"),
    ("storage.capacity_bytes = 'much'", "must be a size: bytes, or a text such as"),
    ("host.capacity_bytes = 0", r"host\.capacity_bytes must be at least 1"),
    ("host.transit_bytes = '0 MB'", r"host\.transit_bytes must be at least 1"),
    ("storage.path = 'x'", r"unknown key 'storage\.path': there are backend"),
    ("layout.num_kv_heads = [1, 0]", r"layout\.num_kv_heads\[1\] must be at least 1, not 0"),
    ("quota.salts.a.device = -1", r"quota\.salts\.a\.device must be at least"),
    ("quota.salts.a = 3", r"quota\.salts\.a must be a table, not 3"),
    ("host.capacity_bytes = -1", r"host\.capacity_bytes must be at least 0, not -1"),
    *(
        (f"storage = {{backend = 'memory', namespace = {dumps(name)}}}", r"storage\.namespace")
        for name in ("", ".", "..", "a/b", "a\nb", "x" * 201)
    ),
]
TWICE = [
    ("device = {num_blocks = 9, capacity_bytes = '1MB'}", r"num_blocks = 9 and .* = '1MB' are the"),
    ("device = {num_blocks = 1024, capacity_bytes = '1MB'}", r"device\.num_blocks = 1024 and"),
    ("host = {slots = 3, capacity_bytes = 9}", r"host\.slots = 3 and host\.capacity_bytes"),
    ("host = {transit_slots = 256, transit_bytes = 9}", r"host\.transit_slots = 256 and host\.tr"),
]
WITHOUT_USE = [
    ("layout.scale_dtype = 'float16'", r"scale_dtype has no use without layout\.quantization"),
    ("layout.extra_block_ratio = 2.0", r"extra_block_ratio has no use without layout\.extra_la"),
    ("device.place = 'gpu:0'", r"device\.place has no use with device\.kind 'host'"),
    ("device = {kind = 'cuda', place = 'gpu:0'}", r"place has no use with device\.kind 'cuda'"),
    ("device = {kind = 'paddle', ordinal = 1}", r"ordinal has no use with device\.kind 'paddle'"),
    ("host = {low_watermark = 0.1, high_watermark = 0.2}", "low_watermark has no use without a ho"),
    ("attention_store.pod_name = 'x'", r"attention_store\.pod_name has no use without a sink"),
    (
        "cache.model = 'm'\nattention_store.namespace = 'x'",
        r"attention_store\.namespace has no use",
    ),
    # written down, a setting counts also at its default
    ("layout = {kind = 'dsa', quantization = 'none'}", r"layout\.quantization has no use"),
]
SINKS = [
    ("flush.sinks = 5", r"flush\.sinks must be a list of tables"),
    ("flush.sinks = [5]", r"flush\.sinks\[0\] must be a table, not 5"),
    *(
        (f"flush.sinks = [{{{sink}}}]", complaint)
        for sink, complaint in (
            (
                "kind = 'kv_event'",
                r"kind 'kv_event'\. Did you mean 'kv_events'\? There are memory, j",
            ),
            ("name = 'x'", r"flush\.sinks\[0\]\.kind is missing"),
            ("kind = 'memory', path = 'x'", r"unknown key 'flush\.sinks\[0\]\.path'"),
            ("kind = 'jsonl'", "path is missing"),
            (
                "kind = 'jsonl', path = '/x', max_bytes = '0 MB'",
                "max_bytes must be at least 1 byte",
            ),
            ("kind = 'memory', tiers = []", "at least one tier"),
            ("kind = 'memory', tiers = ['gpu']", "gpu"),
            ("kind = 'attention_store', granularity = 'per_tier'", "must be 'node'"),
            ("kind = 'kv_events', granularity = 'node'", "must be 'per_tier'"),
            ("kind = 'kv_events', dialect = 'json'", "json"),
            ("kind = 'kv_events', endpoint = 'http://x'", "endpoint must begin with tcp://"),
            ("kind = 'kv_events', endpoint = ''", "endpoint must begin with"),
            ("kind = 'kv_events', dp_rank = -1", "dp_rank must be at least 0"),
            ("kind = 'kv_events', replay_window = 0", "replay_window must be at least 1"),
            ("kind = 'kv_events', high_water_mark = 2147483648", "must be at most 2147483647"),
            ("kind = 'kv_events', heartbeat_s = nan", "heartbeat_s"),
        )
    ),
]
SHARDS = [
    ("attention_store.ready_timeout_s = 0", "ready_timeout_s"),
    ("attention_store.platform = 'tpu'", "tpu"),
    ("attention_store.pod = 'x'", "Did you mean 'pod_name'"),
    ("attention_store.shard_id = 1", r"shard_id must be in 0\.\.0, not 1"),
    ("attention_store = {shard_id = 2, shard_num = 2}", r"shard_id must be in 0\.\.1"),
    (f"{TP2}\nattention_store.shard_id = 2", r"shard_id must be in 0\.\.1, not 2"),
    (f"{TP2}\nattention_store.shard_num = 4", "shard_num is 4, and there are 2 ranks"),
    (f"{TP2}\n{RANKS}\nattention_store.shard_num = 1", "shard_num is 1, and there are 2 ranks"),
    (f"{TP2}\n{RANKS}\nattention_store.shard_id = 0", "must be left out with ranks.count 2"),
]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [*VALUES, *TWICE, *WITHOUT_USE, *SINKS, *((f"{STORE}\n{text}", why) for text, why in SHARDS)],
)
def test_a_fault_is_named(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Config.from_mapping(tomllib.loads(text))
