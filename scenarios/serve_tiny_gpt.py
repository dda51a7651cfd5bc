"""A tiny GPT served twice, without a cache and with kvactors, and compared bit by bit: `python
scenarios/serve_tiny_gpt.py --help`.

Conversations of several turns with shared system prompts are served concurrently from a device pool
that is too small for them. First every request is computed from nothing. Then kvactors keeps the
computed blocks on the device, in host memory and in files. The logits of every sampled position and
the blocks of every request at its end, of every kind of layers, must be the same to the last bit,
there must have been hits from every tier, and preemptions. Exit 1 lists the violations.

With --http the model answers OpenAI's completions and chat completions instead, until SIGTERM or
Ctrl-C: docs/how-to/serve_over_http.md.
"""  # noqa: INP001  (a script, not a package)

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import numpy as np

import kvactors

try:
    from rich.console import Console
    from rich.table import Table
    from tiny_gpt.model import BLOCK, KINDS, SIZES, WINDOW, Here, Trunk, layer_kinds, layout_config
    from tiny_gpt.rank import quiet, worker_processes
    from tiny_gpt.server import CacheLike, PlainCache, Server, Totals
except (ModuleNotFoundError, kvactors.DeviceError) as error:
    missing = error.__cause__  # a DeviceError names only the extra `paddle`
    reason = missing if isinstance(missing, ModuleNotFoundError) else error
    sys.exit(f"serve_tiny_gpt.py needs the extra `example` of kvactors: {reason}")

SYSTEM, USER, NEW = 96, 56, 16
"""Tokens of a system prompt, of a user's message (about), and of an answer."""
SYSTEMS = 3
RUNNING = 8
DRAFTS = 6
"""Tokens of a speculation."""
SNAPSHOT_BLOCKS = 2
"""Blocks between two snapshots of a state."""
DRAIN = 30
"""Seconds in which requests end after SIGTERM."""
TIERS = ("device", "host", "storage")


class Options(NamedTuple):
    """Of the command line."""

    layout: str
    layers: tuple[str, ...]
    samples: int
    ranks: int
    conversations: int
    turns: int
    seed: int
    restart: bool
    speculate: bool
    chunk_tokens: int
    json: str
    breaking: str
    http: int | None

    @property
    def longest(self) -> int:
        """Blocks of a whole conversation."""
        if self.http is not None:
            return SIZES.positions // BLOCK
        return -(-(SYSTEM + self.turns * (USER + BLOCK // 2 + NEW)) // BLOCK)

    @property
    def blocks(self) -> dict[str, int]:
        """Of the device, by kind of layers: too few for everybody. A request that computes a whole
        conversation has a block of each number in a window, and a snapshot every few."""
        few = self.longest // SNAPSHOT_BLOCKS + 4
        return {"full": self.longest * 3 // 2, "window": self.longest + 1, "state": few}


class Workload:
    """The messages of the conversations, drawn from a seed."""

    def __init__(self, options: Options) -> None:
        self.rng = np.random.default_rng(options.seed)
        self.seed, self.greedy, self.samples = options.seed, options.speculate, options.samples
        systems = [self._tokens(SYSTEM) for _ in range(SYSTEMS)]
        self.histories = [list(systems[i % SYSTEMS]) for i in range(options.conversations)]
        self.says = [
            [
                self._tokens(USER + int(self.rng.integers(-BLOCK // 2, BLOCK // 2)))
                for _ in range(options.turns)
            ]
            for _ in range(options.conversations)
        ]

    def _tokens(self, number: int) -> list[int]:
        return [int(one) for one in self.rng.integers(0, SIZES.vocabulary, number)]

    def sample(self, name: str, position: int, logits: np.ndarray) -> int:
        """Random by the logits, but the same for the same logits. The most likely token where
        drafts shall often be right."""
        if self.greedy:
            return int(np.argmax(logits))
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode()), position])
        return int(np.argmax(logits + rng.gumbel(size=logits.shape)))

    async def converse(self, server: Server, turns: range) -> None:
        """Everybody takes their turns at once."""
        async with anyio.create_task_group() as group:
            for number in range(len(self.histories)):
                group.start_soon(self._conversation, server, number, turns)

    async def _conversation(self, server: Server, number: int, turns: range) -> None:
        history = self.histories[number]
        for turn in turns:
            history += self.says[number][turn]
            history += await server.generate(f"{number}.{turn}", history, NEW, self.samples)
            await anyio.sleep(0.002 * (number % 3))


class Result(NamedTuple):
    """A run's. The last four are the cache's own counts. groups: hits of each group of layers."""

    totals: Totals
    seconds: float
    iterations: int
    widest: int
    device_evictions: int = 0
    host_evictions: int = 0
    written: int = 0
    groups: dict[str, dict[str, int]] = {}  # noqa: RUF012


def cache_config(options: Options, directory: Path) -> kvactors.Config:
    """Small tiers, so that blocks have to move."""
    kinds = layer_kinds(options.layers)

    def layout(kind: str) -> Any:
        name = "state" if kind == "state" else options.layout
        return msgspec.to_builtins(layout_config(name, kinds.count(kind), options.ranks))

    blocks = options.blocks
    extra = {"window": {"window": WINDOW}, "state": {"every": SNAPSHOT_BLOCKS}}
    groups = [
        {
            "name": kind,
            "kind": kind,
            "layout": layout(kind),
            "num_blocks": blocks[kind],
            "slots": blocks[kind] // 3,
            **more,
        }
        for kind, more in extra.items()
        if kind in kinds
    ]
    settings: dict[str, Any] = {
        "cache": {
            "model": "tiny-gpt",
            "block_size": BLOCK,
            "default_deadline_s": 30.0,
            "groups": groups,
        },
        "device": {"kind": "paddle", "num_blocks": blocks["full"]},
        "layout": layout("full"),
        "host": {"slots": blocks["full"] // 2, "transit_slots": 64},
        "storage": {
            "backend": "file",
            "directory": str(directory / "store"),
            "write_policy": "write_through" if options.restart else "write_back",
        },
    }
    if options.ranks > 1:
        settings["ranks"] = {"count": options.ranks, "endpoint": f"unix://{directory / 'ranks'}"}
    return kvactors.Config.from_mapping(settings)


async def plain_run(options: Options, trunk: Trunk) -> Result:
    """Every request computed from nothing."""
    trunk.attention.tamper("poison", 0, ())
    workload, totals, began = Workload(options), Totals(), time.monotonic()
    cache = PlainCache(options.blocks["full"], len(trunk.groups))
    server = Server(cache, trunk, workload.sample, totals, running=RUNNING)
    async with server.serving():
        await workload.converse(server, range(options.turns))
    return Result(totals, time.monotonic() - began, server.steps.iterations, server.steps.widest)


async def cached_run(
    options: Options, trunk: Trunk, config: kvactors.Config, devices: dict[str, Any]
) -> Result:
    """Serve the same workload with kvactors, optionally with a restart in the middle, which loses
    device and host memory."""
    workload, totals = Workload(options), Totals()
    middle = options.turns // 2 if options.restart else options.turns
    result = Result(totals, 0.0, 0, 0)
    others = {name: device for name, device in devices.items() if name != "full"}
    for turns in filter(None, (range(middle), range(middle, options.turns))):
        trunk.attention.tamper("poison", 0, ())
        opened = kvactors.open(config, devices.get("full"), group_devices=others)
        async with opened as cache:
            began = time.monotonic()
            server = Server(
                _as_cache(cache),
                trunk,
                workload.sample,
                totals,
                drafts=DRAFTS if options.speculate else 0,
                chunk=options.chunk_tokens,
                running=RUNNING,
                after_load=breaker(options, trunk),
            )
            async with server.serving():
                await workload.converse(server, turns)
            seconds = time.monotonic() - began
            await cache.wait_idle()
            violated = cache.check()
            if violated:
                raise SystemExit(f"invariants of the cache do not hold: {violated}")
            counts, before = cache.statistics(), result.groups
        result = Result(
            totals,
            result.seconds + seconds,
            result.iterations + server.steps.iterations,
            max(result.widest, server.steps.widest),
            result.device_evictions + counts.prefix.evicted,
            result.host_evictions + counts.host.evicted,
            result.written + counts.host.written,
            {
                name: {
                    tier: before.get(name, {}).get(tier, 0) + getattr(group, f"{tier}_hits")
                    for tier in TIERS
                }
                for name, group in counts.groups.items()
            },
        )
    return result


def _as_cache(cache: Any) -> CacheLike:
    found: CacheLike = cache
    return found


def breaker(
    options: Options, trunk: Trunk
) -> Callable[[Sequence[Sequence[int]], range], None] | None:
    """A callback that damages the first load in the layers that come first in `--layers`, None
    without the option."""
    done: list[str] = []
    group = trunk.groups.index(options.layers[0])

    def spoil(tables: Sequence[Sequence[int]], loaded: range) -> None:
        if not done:
            done.append(options.breaking)
            ahead = trunk.live_blocks(tables, loaded.start * BLOCK)[group]
            blocks = trunk.live_blocks(tables, loaded.stop * BLOCK)[group]
            blocks = [block for block in blocks if block not in ahead]
            trunk.attention.tamper(options.breaking, group, blocks)
            print(f"--break: {options.breaking} on blocks {blocks[:2]}", file=sys.stderr)

    return spoil if options.breaking else None


@asynccontextmanager
async def model(
    options: Options, config: kvactors.Config, directory: Path
) -> AsyncIterator[tuple[Trunk, dict[str, Any]]]:
    """The model, and the devices for the cache by the kind of their layers (none: the ranks have
    them)."""
    if options.ranks == 1:
        yield local_model(options, options.blocks)
        return
    settings = (
        options.layout,
        options.seed,
        options.blocks["full"],
        options.ranks,
        directory,
        config,
        f"unix://{directory / 'ranks'}",
    )
    async with worker_processes(*settings) as ranks:
        yield Trunk(options.seed, ranks, layer_kinds(options.layers)), {}


def local_model(options: Options, blocks: Mapping[str, int]) -> tuple[Trunk, dict[str, Any]]:
    """As `model`, with so many device blocks of each kind in this process."""
    kinds = layer_kinds(options.layers)
    here = Here(options.layout, kinds, options.seed, blocks)
    devices = {kind: shard.device for kind, shard in here.shards.items()}
    return Trunk(options.seed, here, kinds), devices


def complaints(
    plain: Result,
    cached: Result,
    *,
    speculate: bool = False,
    chunked: bool = False,
    forked: bool = False,
) -> list[str]:
    """The violations found."""
    wanted, found = plain.totals, cached.totals
    differing = [key for key, row in wanted.logits.items() if not same(row, found.logits.get(key))]
    said = []
    if differing or wanted.logits.keys() != found.logits.keys():
        first = min(differing, default=("-", 0))
        said.append(
            f"logits differ at {len(differing)} of {len(wanted.logits)} positions, first in "
            f"{first[0]} at {first[1]}"
        )
    if wanted.text != found.text:
        said.append(
            "text differs in "
            f"{sum(wanted.text[name] != found.text.get(name) for name in wanted.text)} answers"
        )
    spoilt = [name for name in wanted.bytes if wanted.bytes[name] != found.bytes.get(name)]
    if spoilt:
        said.append(
            f"the blocks of {len(spoilt)} of {len(wanted.bytes)} requests hold other bytes, first "
            f"of {min(spoilt)}"
        )
    said += [f"no block came from {tier}" for tier in TIERS if not getattr(found, tier)]
    said += [  # host and storage as one: which of them still has a state is a matter of order
        f"no {name} block came from {' or '.join(tiers)}"
        for name, hits in cached.groups.items()
        for tiers in (TIERS[:1], TIERS[1:])
        if not any(hits[tier] for tier in tiers)
    ]
    if not found.preemptions:
        said.append("nobody was preempted")
    if speculate and not 0 < found.accepted < found.drafted:
        said.append(f"{found.accepted} of {found.drafted} drafts were accepted")
    if chunked and not found.continued:
        said.append("no prompt was computed in chunks")
    if forked and not found.forks:
        said.append("nobody was forked")
    return said


def same(a: np.ndarray, b: np.ndarray | None) -> bool:
    """To the last bit."""
    return b is not None and a.tobytes() == b.tobytes() and bool(np.isfinite(a).all())


def _hits(tier: str, result: Result) -> int:
    return int(getattr(result.totals, tier))


def table(plain: Result, cached: Result) -> Table:
    """The two runs side by side."""
    shown = Table(title="a tiny GPT, served twice")
    for name in ("", "plain", "kvactors"):
        shown.add_column(name, justify="right" if name else "left")

    def row(name: str, of: Callable[[Result], Any]) -> None:
        shown.add_row(name, str(of(plain)), str(of(cached)))

    row("positions compared", lambda r: len(r.totals.logits))
    row("chunks computed", lambda r: r.totals.chunks)
    row("tokens computed", lambda r: r.totals.computed)
    row("tokens reused", lambda r: r.totals.reused)
    for tier in TIERS:
        row(f"blocks reused from {tier}", partial(_hits, tier))
    for name, hits in cached.groups.items():
        for tier in TIERS:
            shown.add_row(f"{name} blocks reused from {tier}", "", str(hits[tier]))
    row("forks", lambda r: r.totals.forks)
    row("drafts accepted", lambda r: f"{r.totals.accepted} of {r.totals.drafted}")
    row("chunks that took blocks later", lambda r: r.totals.continued)
    row("preemptions", lambda r: r.totals.preemptions)
    row("admissions put off", lambda r: r.totals.refused)
    row("blocks evicted from device", lambda r: r.device_evictions)
    row("blocks evicted from host", lambda r: r.host_evictions)
    row("blocks written to storage", lambda r: r.written)
    row("iterations (widest)", lambda r: f"{r.iterations} ({r.widest})")
    row("seconds", lambda r: f"{r.seconds:.2f}")
    shown.add_row("time saved", "", f"{1 - cached.seconds / plain.seconds:.0%}")
    return shown


def summary(plain: Result, cached: Result, said: list[str]) -> dict[str, Any]:
    """For --json."""
    runs = {}
    for name, run in (("plain", plain), ("kvactors", cached)):
        counted = {k: v for k, v in vars(run.totals).items() if isinstance(v, int)}
        runs[name] = {k: v for k, v in run._asdict().items() if k != "totals"} | counted
    return {"positions": len(plain.totals.logits), "complaints": said, **runs}


async def serve(options: Options) -> tuple[Result, Result]:
    """Both runs."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        config = cache_config(options, directory)
        async with model(options, config, directory) as (trunk, devices):
            alone = trunk
            if config.cache.groups:  # without a cache a group has as many blocks as [layout]
                alone, _ = local_model(options, dict.fromkeys(KINDS, options.blocks["full"]))
            plain = await plain_run(options, alone)
            cached = await cached_run(options, trunk, config, devices)
    return plain, cached


def serve_http(options: Options) -> None:
    """Answer over HTTP until SIGTERM or Ctrl-C. Requests that run are answered to the end, for
    DRAIN seconds at most, then the cache is closed."""
    try:
        import uvicorn
        from tiny_gpt.http_api import Api
    except ModuleNotFoundError as error:
        sys.exit(f"--http needs the extra `example` of kvactors: {error}")

    @asynccontextmanager
    async def opened(sample: Callable[[str, int, np.ndarray], int]) -> AsyncIterator[Any]:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            config = cache_config(options, directory)
            async with model(options, config, directory) as (trunk, devices):
                device = devices.pop("full", None)
                async with kvactors.open(config, device, group_devices=devices) as cache:
                    server = Server(
                        _as_cache(cache),
                        trunk,
                        sample,
                        Totals(),
                        drafts=DRAFTS if options.speculate else 0,
                        chunk=options.chunk_tokens,
                        running=RUNNING,
                        compare=False,
                    )
                    async with server.serving():
                        yield cache, server

    uvicorn.run(Api(opened).app, port=options.http, timeout_graceful_shutdown=DRAIN)


def first_fault(error: Exception) -> Exception:
    """The first error inside nested exception groups."""
    return first_fault(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


def main(options: Options) -> int:
    """Serve, compare, tell."""
    quiet()
    if options.http is not None:
        serve_http(options)
        return 0
    try:
        plain, cached = asyncio.run(serve(options))
    except ExceptionGroup as group:
        print(f"FAILED: a run ended early: {first_fault(group)!r}", file=sys.stderr)
        return 1
    said = complaints(
        plain,
        cached,
        speculate=options.speculate,
        chunked=options.chunk_tokens > 0,
        forked=options.samples > 1,
    )
    console = Console()
    console.print(table(plain, cached))
    if options.json:
        Path(options.json).write_bytes(
            msgspec.json.format(msgspec.json.encode(summary(plain, cached, said)), indent=2)
        )
    for one in said:
        print(f"FAILED: {one}", file=sys.stderr)
    if not said:
        equal = (
            f"{len(plain.totals.logits)} positions, and in the blocks of {len(plain.totals.bytes)} "
            "requests"
        )
        console.print(f"equal to the last bit at {equal}")
    return 1 if said else 0


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", choices=("gqa", "mla"), default="gqa")
    parser.add_argument(
        "--layers",
        type=lambda text: tuple(text.split(",")),
        default=("full",),
        metavar="KIND,..",
        help=f"kinds of the layers in turn: {', '.join(KINDS)} (default: full)",
    )
    parser.add_argument(
        "--samples", type=int, default=1, help="answers to each message: the further ones are forks"
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes the heads are split over")
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--restart", action="store_true", help="close the cache and open it again between turns"
    )
    parser.add_argument(
        "--speculate", action="store_true", help="decode with n-gram drafts, and sample greedily"
    )
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=0,
        metavar="N",
        help="chunked prefill: blocks for N tokens of a prompt at once (0: for all)",
    )
    parser.add_argument("--json", default="", metavar="OUT", help="write what was counted there")
    parser.add_argument(
        "--break",
        dest="breaking",
        choices=("swap_blocks", "flip_bit"),
        default="",
        help="damage blocks of the kind that is first in --layers: must fail",
    )
    parser.add_argument(
        "--http",
        type=int,
        nargs="?",
        const=8000,
        metavar="PORT",
        help="answer OpenAI's API on 127.0.0.1 instead (8000; 0: any free port)",
    )
    options = Options(**vars(parser.parse_args(arguments)))
    if options.http is not None:
        unused = ("samples", "conversations", "turns", "restart", "json", "breaking")
        for name in unused:
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"--{name.replace('breaking', 'break')} has no effect with --http")
    if options.chunk_tokens < 0:
        parser.error(f"--chunk-tokens must be at least 0, not {options.chunk_tokens}")
    if options.samples < 1:
        parser.error(f"--samples must be at least 1, not {options.samples}")
    for kind in options.layers:
        if kind not in KINDS:
            parser.error(f"--layers has {kind!r}: choose from {', '.join(KINDS)}")
    if "full" not in options.layers[: SIZES.layers]:
        parser.error(
            f"--layers has no full layer among its first {SIZES.layers}: add full, the layers of "
            "[layout]"
        )
    if options.ranks > 1 and set(options.layers) != {"full"}:
        parser.error(f"--ranks {options.ranks} needs --layers full: groups work in one process")
    if options.speculate and "state" in options.layers:
        parser.error(
            "--speculate needs --layers without state: a state cannot go back to before a rejected "
            "draft"
        )
    return options


if __name__ == "__main__":
    sys.exit(main(parse()))
