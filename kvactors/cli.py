"""The command line: run, replay, sweep, store, top."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import structlog
from cyclopts import App, CycloptsError, Parameter
from msgspec import to_builtins
from rich.console import Console

from kvactors.actor.log import structlog_settings
from kvactors.capacity import in_blocks
from kvactors.errors import ConfigError, KVActorsError
from kvactors.scenario.output import (
    Output,
    check_distinct,
    live_line,
    to_stdout,
    version,
    write_json,
    write_output,
)
from kvactors.scenario.pages import Watching, check_charts, sweep_page
from kvactors.scenario.recording import record_command
from kvactors.scenario.replay import ReplayConfig, replay
from kvactors.scenario.report import Totals, totals_line
from kvactors.scenario.runner import run_scenario, with_temporary
from kvactors.scenario.shipped import find_file, print_scenarios
from kvactors.scenario.spec import requests_of
from kvactors.scenario.trace import read_trace
from kvactors.settings import check, read_toml
from kvactors.settings.check import in_bytes
from kvactors.settings.valkey import SCHEMES
from kvactors.settings_report import config as config_app
from kvactors.settings_report import size
from kvactors.signals import GONE, flush_stdout, run_terminable, sigterm_ends, usable_streams
from kvactors.top import top

app = App(
    name="kvactors",
    help="A tiered KV cache of asyncio actors: scenarios, trace replay, stores, metrics.",
    version=version,
)
app.register_install_completion_command(add_to_startup=True)
app.command(config_app)
app.command(size)
app.command(top)
app.command(record_command, name="record")


JsonFile = Annotated[Output, Parameter(help="The report as JSON.")]
PageFile = Annotated[Output, Parameter(help="Page with charts. Needs the extra [report].")]
TraceFile = Annotated[
    Output, Parameter(help="Trace of messages and transfers, for ui.perfetto.dev.")
]
MetricsPort = Annotated[
    int,
    Parameter(
        help="Port of /metrics, /health and /statistics during the run. Needs the extra [metrics]."
    ),
]
MetricsHost = Annotated[str, Parameter(help="The address of the metrics port.")]


@app.command
def run(
    scenario: Path | None = None,
    /,
    *,
    list: Annotated[bool, Parameter(negative="")] = False,  # noqa: A002
    json: JsonFile | None = None,
    html: PageFile | None = None,
    trace: TraceFile | None = None,
    metrics_port: MetricsPort | None = None,
    metrics_host: MetricsHost = "127.0.0.1",
    seed: int | None = None,
    virtual: Annotated[bool, Parameter(negative="--real")] = False,
) -> int:
    """Run a scripted scenario. The exit status is 0 only if its expectations hold.

    Parameters
    ----------
    scenario
        A TOML file, or a scenario of the package such as quickstart.
    list
        Print the scenarios of the package.
    seed
        Replaces the scenario's seed.
    virtual
        Run on a seeded loop of virtual time.
    """
    if (scenario is None) != list:
        raise ConfigError("run needs a SCENARIO, or --list, which prints those of the package")
    if scenario is None:
        print_scenarios(Console())
        return 0
    check_distinct((scenario,), json=json, html=html, trace=trace)
    watching = Watching(
        json=json, html=html, trace=trace, port=metrics_port, host=metrics_host, virtual=virtual
    )
    data = read_toml(find_file(scenario, "scenario"))
    with live_line(requests_of(data)) as show:
        spec, report = run_scenario(
            data,
            seed=seed,
            virtual=virtual,
            progress=lambda totals: show(totals_line(totals), totals.requests),
            observe=watching.observing,
            record=watching.record,
        )
    return watching.conclude(report, spec, report.failures())


@app.command(name="replay")
def replay_command(
    trace: Path,
    /,
    *,
    config: Path | None = None,
    timed: Annotated[bool, Parameter(negative="")] = False,
    speed: float | None = None,
    prefill_tokens_per_s: float | None = None,
    decode_tokens_per_s: float | None = None,
    step_tokens: int | None = None,
    limit: int | None = None,
    json: JsonFile | None = None,
    html: PageFile | None = None,
    trace_out: TraceFile | None = None,
    metrics_port: MetricsPort | None = None,
    metrics_host: MetricsHost = "127.0.0.1",
) -> int:
    """Replay a request trace with real bytes, verifying every loaded block. The exit status is 0
    only if nothing is wrong. With --timed a serving loop with continuous batching reports
    latencies with the cache, without one and with an exact LRU.

    Parameters
    ----------
    trace
        JSON lines, plain or gzip, or small_chat, a trace of the package.
    config
        TOML with a cache's settings and a [replay] table, or one of the package.
    timed
        Send requests at the times of the trace.
    speed
        Factor on the trace's clock, with --timed.
    prefill_tokens_per_s
        Prompt tokens that the modelled engine computes in a second, with --timed.
    decode_tokens_per_s
        Its decode steps in a second.
    step_tokens
        Prompt tokens in a step at most.
    limit
        Requests at most.
    """
    check_distinct((trace, config), json=json, html=html, trace_out=trace_out)
    watching = Watching(json=json, html=html, trace=trace_out, port=metrics_port, host=metrics_host)
    trace = find_file(trace, "trace")
    with TemporaryDirectory(prefix="kvactors-") as folder:
        data = read_toml(find_file(config, "settings")) if config else {}
        settings = ReplayConfig.from_mapping(with_temporary(data, folder))
        given = {
            "mode": "timed" if timed else None,
            "speed": speed,
            "prefill_tokens_per_s": prefill_tokens_per_s,
            "decode_tokens_per_s": decode_tokens_per_s,
            "step_tokens": step_tokens,
            "limit": limit,
        }
        given = {name: value for name, value in given.items() if value is not None}
        table = to_builtins(settings.replay) | given
        settings = ReplayConfig.from_mapping(to_builtins(settings) | {"replay": table})
        if speed is not None and settings.replay.mode != "timed":
            raise ConfigError("--speed needs --timed")
        total = None
        if Console(stderr=True).is_terminal:
            bounds = {"coarse": settings.replay.coarse, "limit": settings.replay.limit}
            total = sum(1 for _ in read_trace(trace, **bounds))
        with live_line(total) as show:

            def progress(totals: Totals) -> None:
                show(totals_line(totals), totals.requests)

            report = run_terminable(replay(trace, settings, progress, watching.observing))
    failed = list(report.errors)
    if report.corrupt_blocks_served:
        failed.append(f"{report.corrupt_blocks_served} corrupt blocks served")
    if report.flush["divergence"]:
        failed.append(f"sinks diverge from the tiers on {report.flush['divergence']} blocks")
    return watching.conclude(report, settings, failed)


@app.command(name="sweep")
def sweep_command(
    trace: Path,
    /,
    *,
    config: Path | None = None,
    device: Annotated[list[str] | None, Parameter(negative="")] = None,
    block_bytes: str | None = None,
    coarse: int = 1,
    limit: int = 0,
    retain: bool = True,
    json: JsonFile | None = None,
    html: Output | None = None,
) -> int:
    """Compute the hit rates of caches of every size on a trace: LRU and the offline optimum in one
    pass, RETAIN in a run for each size.

    Parameters
    ----------
    trace
        JSON lines, plain or gzip.
    config
        TOML with a cache's settings and a [replay] table. Its tiers are reported, its layout gives
        the bytes of a block.
    device
        Device size in blocks (4096) or bytes ("8 GiB"). May be repeated.
    block_bytes
        Bytes of a block on all layers (65536 or "64 KiB"). Default: of the config's layout.
    coarse
        Keep every so many-th block id, for larger blocks. A config's has precedence.
    limit
        Requests at most, 0 for all.
    retain
        Run RETAIN. --no-retain saves most of the time.
    html
        Page with a chart. Needs the extra [report].
    """
    from kvactors.layout import make_layout
    from kvactors.scenario.sweep import print_sweep, sweep

    check_distinct((trace, config), json=json, html=html)
    if html is not None:
        check_charts()
    trace = find_file(trace, "trace")
    nbytes = None if block_bytes is None else check.in_bytes(block_bytes, "--block-bytes")
    if nbytes == 0:
        raise ConfigError("--block-bytes must be at least 1")
    settings = None
    if config is not None:
        settings = ReplayConfig.from_mapping(read_toml(find_file(config, "settings")))
        coarse, limit = settings.replay.coarse, limit or settings.replay.limit
        layout = make_layout(settings.layout, settings.cache.block_size)
        settings = in_blocks(settings, layout, settings.storage)
        nbytes = layout.block_bytes if nbytes is None else nbytes
    with live_line(1.0) as show:
        report = sweep(
            trace,
            sizes=[check.in_blocks(size, "--device", nbytes) for size in device or ()],
            coarse=coarse,
            limit=limit,
            block_bytes=nbytes,
            config=settings,
            retain=retain,
            progress=show,
        )
    print_sweep(report, Console(stderr=any(map(to_stdout, (json, html)))))
    write_json(report, json)
    if html is not None:
        write_output(sweep_page(report).encode(errors="replace"), html)
    return 0


store = App(
    name="store",
    help="The file stores under a directory, or the stores of objects under a URL: what they hold, "
    "whether it is whole, and which are not needed any more.",
)
app.command(store)


def is_no_server(_: Any, place: str) -> None:
    """Validator: the URL of a server is refused."""
    if place.partition(":")[0] in (*SCHEMES, "unix"):
        raise ValueError(
            "use `valkey-cli --scan --pattern 'kvactors/*'`, cache.clear(storage=True) and "
            "storage.valkey.ttl_s for the objects of a Valkey server (docs/how-to/valkey.md)"
        )


StoreFolder = Annotated[
    str,
    Parameter(
        help="As storage.directory, a folder below it, or a URL as storage.url.",
        validator=is_no_server,
    ),
]
FoundFile = Annotated[Output, Parameter(help="What was found, as JSON.")]


@store.command(name="list")
def store_list(directory: StoreFolder, /, *, json: FoundFile | None = None) -> int:
    """List the stores under a directory or a URL. Nothing is changed."""
    return show_stores(directory, json, verify=False)


@store.command(name="verify")
def store_verify(directory: StoreFolder, /, *, json: FoundFile | None = None) -> int:
    """Read and check every object of the file stores under a directory. The exit status is 1 if any
    object or table is bad. Objects under a URL are checked when a cache reads them."""
    return show_stores(directory, json, verify=True)


@store.command(name="prune")
def store_prune(
    directory: StoreFolder,
    /,
    *,
    keep: int = 1,
    namespace: str | None = None,
    max_bytes: str | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    json: Output | None = None,
) -> int:
    """Remove file stores of other layouts and format versions, and damaged ones, or those of a
    namespace. Under a URL, remove the oldest objects. The exit status is 1 if one was refused.

    Parameters
    ----------
    keep
        Stores kept for each model, namespace and rank: those opened last.
    namespace
        Remove every store, or under a URL the objects, of this namespace only.
    max_bytes
        Bytes ("2 TiB") that may stay under a URL. Needed with a URL, for which keep has no use.
    dry_run
        Print what would be removed, and remove nothing.
    json
        What was done, as JSON.
    """
    from kvactors.storage.inspect import prune, prune_lines

    if ("://" in directory) != (max_bytes is not None):
        raise ConfigError("--max-bytes is for a URL, and is needed with one: how much may stay")
    if max_bytes is not None:
        from kvactors.storage.inspect_objects import prune_objects

        most = in_bytes(max_bytes, "--max-bytes")
        done = asyncio.run(prune_objects(directory, most, namespace, dry_run=dry_run))
    else:
        done = prune(directory, keep=keep, namespace=namespace, dry_run=dry_run)
    show_lines(prune_lines(done, dry_run=dry_run), done, json)
    return 1 if any(one.refused for one in done) else 0


def show_stores(directory: str, json: Path | None, *, verify: bool) -> int:
    """Print the stores found. Returns exit status 1 if any of them is bad."""
    from kvactors.storage.inspect import inspect, inspection_lines

    if "://" not in directory:
        found = inspect(directory, verify=verify)
    elif verify:
        raise ConfigError(
            f"{directory}: objects are verified when a cache reads them, and not here"
        )
    else:
        from kvactors.storage.inspect_objects import inspect_objects

        found = asyncio.run(inspect_objects(directory))
    show_lines(inspection_lines(found), found, json)
    return 1 if any(one.bad or (verify and one.state == "damaged") for one in found) else 0


def show_lines(lines: Iterable[str], data: Any, json: Path | None) -> None:
    """Print lines, and write the data that they are about."""
    for line in lines:
        print(line, file=sys.stderr if to_stdout(json) else None)
    write_json(data, json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Invalid input gives exit status 2 and one line on standard error."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    usable_streams()
    try:
        status = carry_out(words)
        flush_stdout()
    except SystemExit as end:  # rich ends so if standard output is a pipe that nothing reads
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        status = GONE
    except (CycloptsError, KVActorsError, OSError, UnicodeDecodeError) as error:
        status = GONE if isinstance(error, BrokenPipeError) else 2
        if status != GONE:
            text = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                text = f"{error.filename}: {error.strerror}"
            print("kvactors:", " ".join(text.split()), file=sys.stderr)
        with suppress(OSError):
            flush_stdout()
    sys.exit(status)


def carry_out(words: list[str]) -> int:
    """Carry out the command of some arguments. Returns the exit status."""
    errors_only = structlog.make_filtering_bound_logger(40)
    with (
        sigterm_ends(),
        structlog_settings(
            wrapper_class=errors_only, logger_factory=structlog.PrintLoggerFactory(sys.stderr)
        ),
    ):
        status = app(words, result_action="return_value", exit_on_error=False, print_error=False)
    return status if isinstance(status, int) else 0
