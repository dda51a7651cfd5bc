"""Settings of the manager, from FastDeploy's config and variables, and from `FastDeployOptions`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from kvactors.errors import ConfigError
from kvactors.settings import Config
from kvactors.settings.check import (
    CopyThreads,
    Count,
    DeviceNumber,
    Number,
    Seconds,
    changed_in,
    checked_value,
    convert,
)
from kvactors.settings.load import unused
from kvactors.tier_cache import TierStorage

S = TypeVar("S", bound=msgspec.Struct)

# -- The version of the model's weights, as FastDeploy reads it for the names of stored blocks.

FILE = "version.yaml"
FIELD = re.compile(r"^version\s*:\s*(?P<quote>['\"]?)(?P<value>[^'\"#\s]+)(?P=quote)\s*(?:#.*)?$")
NO_VERSION = "default"  # the namespace of weights without a version

SETTLED_S = 2.0  # age at which a change of the file has another time than the next one


class WeightsVersion:
    """Watches `version.yaml`."""

    def __init__(self, model_path: str | Path) -> None:
        self._path = Path(model_path) / FILE
        self._seen: tuple[int, ...] | None = None  # the file whose version is known
        self._version = NO_VERSION

    def now(self) -> str:
        """The namespace of blocks that the present weights compute, for instance "RL-STEP03".

        The field `version` has the form RL-STEPxx-time-uuid. The first two parts name the weights.
        The file is read again when it has changed.
        """
        try:
            found = self._path.stat()
            seen = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            if seen == self._seen:
                return self._version
            self._version = self._read()
        except FileNotFoundError:
            return NO_VERSION
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{self._path}: {error}") from error
        self._seen = seen if time.time() - found.st_ctime > SETTLED_S else None
        return self._version

    def _read(self) -> str:
        for line in self._path.read_text("utf-8").splitlines():
            if found := FIELD.match(line):
                return "-".join(found["value"].split("-")[:2])
        raise ConfigError(f"{self._path} has no line 'version: NAME', which names the weights")


MUST_BE = {
    "ENABLE_V1_KVCACHE_SCHEDULER": ("1", "only the V1 scheduler's calls are answered"),
    "FD_ENABLE_SWAP_SPACE_CLEARING": ("0", "host memory stays allocated until the engine ends"),
    "USE_KVCACHE_LOCK": ("0", "copies run in this process, and take no lock of others"),
    "FD_USE_KVCACHE_LOCK": ("0", "copies run in this process, and take no lock of others"),
}
"""Variables that may have one value only, and why."""

OWN_STORAGE = ("backend", "write_policy", "rank", "ranks")  # are FastDeploy's


class FastDeployOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings that FastDeploy has no flag or variable for.

    Attributes:
        model: name of the model in the identity of blocks. None: the name of the model's folder.
        storage: sizes and limits of the store. Its back end, write policy and ranks are
            FastDeploy's.
        attention_store: the table `[attention_store]`, for values that no variable sets.
        sinks: indexes to inform, as tables of `flush.sinks`.
        layout: of the cache tensors, as the table `[layout]`, for storage and indexes of v1: the
            scheduler's process has no tensors.
        numa_node: the NUMA node that the host memory comes from, None for the system's choice.
        staging_slots: host slots that blocks of finished requests pass on their way to storage.
        fetch_wait_s: seconds that a match waits for storage. Blocks that arrive later are misses.
        launch_timeout_s: seconds that `launch_cache_manager` waits for the workers' tensors.
        copy_threads: copying threads for each rank, for tensors in host memory.
    """

    model: str | None = None
    storage: TierStorage = TierStorage()
    attention_store: Mapping[str, Any] = {}
    sinks: tuple[Mapping[str, Any], ...] = ()
    layout: Mapping[str, Any] = {}
    numa_node: DeviceNumber | None = None
    staging_slots: Count = 32
    fetch_wait_s: Seconds = 30.0
    launch_timeout_s: Seconds = 600.0
    copy_threads: CopyThreads = 2


# -- the fields of FastDeploy's config that the manager reads


class CacheFields(msgspec.Struct, frozen=True, kw_only=True):
    """Of `cache_config`. `swap_space`: GiB of the host tier of one rank, where no number of blocks
    is configured. `total_block_num`: 0 before FastDeploy has counted its device blocks."""

    block_size: Count
    enable_prefix_caching: bool
    num_cpu_blocks: Number = 0
    total_block_num: Number = 0
    swap_space: Annotated[float, msgspec.Meta(ge=0, le=1 << 20)] = 0.0
    kvcache_storage_backend: Literal["none", "file", "mooncake", "attention_store"] = "none"
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = (
        "write_through"
    )
    write_through_threshold: Count = 1


class ModelFields(msgspec.Struct, frozen=True, kw_only=True):
    """Of `model_config`."""

    model: Any
    max_model_len: Count | None = None


class DraftFields(msgspec.Struct, frozen=True, kw_only=True):
    """Of `speculative_config`, with a `method` if a draft model proposes tokens."""

    method: Any = None
    num_gpu_block_expand_ratio: Any = 1
    num_extra_cache_layer: Number = 0


class ReplicaFields(msgspec.Struct, frozen=True, kw_only=True):
    """Of `parallel_config`. v1 has the ranks and the replica there too."""

    data_parallel_size: Count = 1
    tensor_parallel_size: Count = 1
    local_data_parallel_id: Number = 0


PARTS = ("cache_config", "model_config", "speculative_config", "parallel_config")


def fields_of(part: Any, kind: type[S], where: str) -> S:
    """The fields of a part of FastDeploy's config that are set: neither None nor an empty text."""
    found = {name: plain(getattr(part, name, None)) for name in kind.__struct_fields__}
    given = {name: value for name, value in found.items() if value is not None and str(value)}
    return convert(given, kind, where)


def plain(value: Any) -> Any:
    """A number of numpy as one of Python: FastDeploy reads some from arrays in shared memory."""
    return value.item() if isinstance(value, np.generic) else value


class ManagerSettings(NamedTuple):
    """Checked values.

    Attributes:
        storage: of the tier below the host, without a back end for AttentionStore.
        draft_layers: layers of drafts (MTP) after the main layers.
        most_blocks: blocks of the longest request, None if no length is configured.
        config: the same as a kvactors config, for sinks and for AttentionStore.
    """

    cache: CacheFields
    storage: TierStorage
    ranks: int
    draft_layers: int
    most_blocks: int | None
    model_path: Path
    config: Config
    options: FastDeployOptions

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @property
    def backend(self) -> str:
        return self.cache.kvcache_storage_backend

    @property
    def index_only(self) -> bool:
        return self.config.flush.flush_only

    @property
    def direct(self) -> bool:
        return self.backend == "attention_store" and not self.index_only

    @property
    def hosted(self) -> bool:
        return bool(self.cache.num_cpu_blocks or self.cache.swap_space)

    @property
    def needs_tensors(self) -> bool:
        """Whether a tier or an index below the device is configured."""
        stored = self.backend != "none" and not self.index_only
        return self.hosted or stored or bool(self.config.flush.sinks)

    def of_version(self, version: str) -> ManagerSettings:
        cache = replace(self.config.cache, namespace=version)
        return self._replace(config=replace(self.config, cache=cache))


def check_variables(environ: Mapping[str, str], *, v1: bool) -> None:
    """Refuse variables that cannot be honoured."""
    manager = ("1", "CacheManager is v1's") if v1 else ("0", "use CacheManager in its place for v1")
    for name, (value, why) in (MUST_BE | {"ENABLE_V1_KVCACHE_MANAGER": manager}).items():
        found = environ.get(name, "").strip()
        if found not in ("", value):
            raise ConfigError(f"{name} must be {value}, not {found!r}: {why}")


def read_settings(
    config: Any,
    tensor_parallel_size: int | None,
    splitwise_role: str | None,
    local_data_parallel_id: int | None,
    given: FastDeployOptions | Mapping[str, Any] | None,
    variables: Mapping[str, str] | None,
    *,
    v1: bool = False,
) -> ManagerSettings:
    """Read FastDeploy's config and variables. `v1`: for `CacheManager`, which is given no ranks, no
    role and no replica: they are in the config."""
    environ = os.environ if variables is None else variables
    options = convert(given or {}, FastDeployOptions)
    changed = changed_in(options.storage)
    for name in OWN_STORAGE:
        if name in changed:
            raise ConfigError(f"options: storage.{name} is FastDeploy's: leave it unset")
    scheduler = getattr(config, "scheduler_config", None)
    role = splitwise_role or getattr(scheduler, "splitwise_role", "mixed")
    if role != "mixed":
        raise ConfigError(
            f"splitwise_role {role!r}: prefill and decode on different nodes are not "
            "supported, only 'mixed'"
        )
    check_variables(environ, v1=v1)
    parts = {name: getattr(config, name, None) for name in PARTS}
    for name in ("cache_config", "model_config"):
        if parts[name] is None:
            raise ConfigError(f"the config has no {name}: it must be FastDeploy's FDConfig")
    cache = fields_of(parts["cache_config"], CacheFields, "cache_config")
    model = fields_of(parts["model_config"], ModelFields, "model_config")
    drafts = fields_of(parts["speculative_config"], DraftFields, "speculative_config")
    engine = fields_of(parts["parallel_config"], ReplicaFields, "parallel_config")
    replicas = engine.data_parallel_size
    replica, ranks = engine.local_data_parallel_id, engine.tensor_parallel_size
    if not v1:
        replica = checked_value("local_data_parallel_id", plain(local_data_parallel_id), Number)
        ranks = checked_value("tensor_parallel_size", plain(tensor_parallel_size), Count)
    backend = cache.kvcache_storage_backend
    if backend != "none" and not cache.enable_prefix_caching:
        raise ConfigError(f"kvcache_storage_backend {backend!r} needs enable_prefix_caching")
    if drafts.method is not None and drafts.num_gpu_block_expand_ratio != 1:
        raise ConfigError(
            f"num_gpu_block_expand_ratio is {drafts.num_gpu_block_expand_ratio}: tensors of drafts "
            "must have as many blocks as the others"
        )
    for name in ("shard_id", "shard_num", "device_id"):
        if backend == "attention_store" and ranks > 1 and name in options.attention_store:
            raise ConfigError(f"options: attention_store.{name} follows from the ranks: remove it")
    model_path = Path(str(model.model))
    resolved = _resolved(backend, model_path, role, replica, options, environ, v1=v1)
    resolved = replace(resolved, layout=replace(resolved.layout, tensor_parallel=ranks))
    longest = model.max_model_len
    settings = ManagerSettings(
        cache=cache,
        storage=_storage(resolved, options, (replica, max(replicas, replica + 1))),
        ranks=ranks,
        draft_layers=0 if drafts.method is None else drafts.num_extra_cache_layer,
        most_blocks=None if longest is None else -(-longest // cache.block_size),
        model_path=model_path,
        config=resolved,
        options=options,
    )
    check_uses(settings, v1=v1)
    return settings.of_version(WeightsVersion(model_path).now())


def check_uses(settings: ManagerSettings, *, v1: bool) -> None:
    """Refuse options that differ from their default and have no use with the configured tiers."""
    cache = settings.cache
    if v1 and settings.direct:
        raise ConfigError(
            "kvcache_storage_backend 'attention_store' with ENABLE_V1_KVCACHE_MANAGER=1: v1 has it "
            "as an index only (FD_AS_ONLY_FLUSH=1)"
        )
    if v1 and cache.swap_space and not cache.num_cpu_blocks:
        raise ConfigError("swap_space without num_cpu_blocks: v1 needs the number of host blocks")
    if v1 and settings.storage.backend != "none" and not cache.num_cpu_blocks:
        raise ConfigError("v1 reads storage into host blocks: num_cpu_blocks is needed")
    if not v1 and cache.write_policy != "write_through":
        raise ConfigError(f"write_policy {cache.write_policy!r} needs ENABLE_V1_KVCACHE_MANAGER=1")
    config, options, storage = settings.config, settings.options, settings.options.storage
    stored = settings.storage.backend != "none"
    useless = {"launch_timeout_s"} if v1 else {"layout"}
    if v1 and (stored or bool(config.flush.sinks)) != bool(options.layout):
        raise ConfigError("options: v1 needs layout for storage and indexes, and for nothing else")
    useless |= set() if stored and not v1 else {"staging_slots", "fetch_wait_s"}
    if v1 or not (stored or settings.hosted):
        useless |= {"numa_node", "copy_threads"}
    used = {"open_timeout_s", "close_timeout_s"}
    if stored:
        of_others = {name.removeprefix("storage.") for name in unused(config)} | {"min_hits"}
        of_host = {"on_full", "on_full_wait_s", "slot_timeout_s"}
        used |= set(config.storage.__struct_fields__) - of_others | of_host
        used -= of_host | {"url"} if v1 else set()
        used |= {"directory"} if settings.backend == "file" else set()
    elif settings.direct:
        used |= {"timeout_s"}
    elif not config.flush.sinks:
        used.clear()
    names = sorted(useless & changed_in(options))
    names += [f"storage.{name}" for name in sorted(changed_in(storage) - used)]
    for name in names:
        backend = settings.backend + (" as an index only" if settings.index_only else "")
        raise ConfigError(
            f"options: {name} has no use with storage {backend} and "
            f"{'a' if settings.hosted else 'no'} host tier: remove it"
        )


def check_blocks(settings: ManagerSettings, num_blocks: int) -> None:
    """Check the number of device blocks. 0: they are not counted yet."""
    if 0 < num_blocks < (settings.most_blocks or 0):
        raise ConfigError(
            f"total_block_num is {num_blocks}, and a request of max_model_len needs "
            f"{settings.most_blocks} blocks"
        )


def _resolved(
    backend: str,
    model_path: Path,
    role: str,
    replica: int,
    options: FastDeployOptions,
    environ: Mapping[str, str],
    *,
    v1: bool,
) -> Config:
    """The settings that kvactors has too, with the variables that it honours."""
    storage = options.storage
    table: dict[str, Any] = {"flush": {"sinks": [dict(sink) for sink in options.sinks]}}
    table["layout"] = dict(options.layout)
    if backend != "none":
        table["storage"] = {"backend": backend, "write_policy": "write_through"}
    if backend == "file" and storage.directory:
        table["storage"]["directory"] = storage.directory
    if backend == "mooncake":
        table["storage"]["mooncake"] = dict(storage.mooncake)
    indexes = any(sink.get("kind") == "attention_store" for sink in options.sinks)
    if backend == "attention_store" or indexes:
        own = {"splitwise_role": role, "dp_id": replica}
        table["attention_store"] = own | dict(options.attention_store)
    elif options.attention_store:
        raise ConfigError("options: attention_store has no use without AttentionStore")
    if options.model is not None:
        table["cache"] = {"model": options.model}
    else:
        named = any(environ.get(name) for name in ("KVACTORS_MODEL", "AS_NAMESPACE"))
        table["cache"] = {"model": "" if named else model_path.name}
    index_only = environ.get("FD_AS_ONLY_FLUSH", "0").strip() == "1"
    if index_only and backend != "attention_store" and not options.sinks:
        raise ConfigError(
            "FD_AS_ONLY_FLUSH=1 needs kvcache_storage_backend 'attention_store', or a sink in the "
            "options"
        )
    found = Config.from_env(environ, Config.from_mapping(table))
    if backend == "file" and not found.storage.directory:
        raise ConfigError(
            "kvcache_storage_backend 'file' needs FILE_BACKEND_STORAGE_DIR, or storage.directory "
            "in the options: there is no default folder"
        )
    if backend == "file" and v1:  # several processes write there
        url = Path(found.storage.directory).absolute().as_uri()
        stored = replace(found.storage, backend="object", url=url, directory="")
        found = replace(found, storage=stored)
    return found


def _storage(config: Config, options: FastDeployOptions, replica: tuple[int, int]) -> TierStorage:
    """The store below host memory. Finished requests are written in their own way."""
    storage, backend = config.storage, config.storage.backend
    if backend in ("none", "attention_store") or config.flush.flush_only:
        return replace(options.storage, backend="none", directory="", write_policy="none")
    rank, ranks = replica if backend == "file" else (0, 1)  # one process's
    return replace(
        options.storage,
        backend=backend,
        directory=storage.directory,
        url=storage.url,
        mooncake=msgspec.to_builtins(storage.mooncake) if backend == "mooncake" else {},
        write_policy="none",
        rank=rank,
        ranks=ranks,
    )
