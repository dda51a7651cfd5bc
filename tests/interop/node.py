"""A worker as a case sees it: a kvactors process that serves prompts, can be killed, and is asked
what its tiers hold."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.interop.consumers.base import MODEL, Source
from tests.interop.processes import Child
from tests.interop.recorder import Recorder
from tests.interop.truth import Chain, Truth
from tests.interop.workload import BLOCK, Prompt, Workload

SERVE = 90.0
"""Seconds within which prompts must be served. Only a hang takes as long."""


class Node:
    """A worker's rank with tiny tiers, so that blocks are evicted, offloaded, stored and loaded all
    the time.

    source: its events. workload: where its prompts come from. sink: settings of its kv_events sink
    beside the endpoints. for_engines: whether the engines' own types must take its messages.
    """

    def __init__(
        self,
        folder: Path,
        source: Source,
        base: tuple[str, str],
        workload: Workload,
        sink: dict[str, Any],
        tables: dict[str, Any],
    ) -> None:
        self.folder, self.source, self.workload = folder, source, workload
        self.dialect = sink.get("dialect", "map")
        self.for_engines = self.dialect == "map" or sink.get("arrays_for", "vllm") == "vllm"
        self.recorder = Recorder(source.endpoint)
        self._seed = 0
        self.child: Any = None
        endpoint, replay_endpoint = base
        events = {
            "kind": "kv_events",
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint,
            "dp_rank": source.rank,
        }
        self._tables = {
            "cache": {"block_size": BLOCK, "model": MODEL},
            "device": {"num_blocks": 64},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4},
            "host": {"slots": 80},
            "storage": {
                "backend": "file",
                "directory": str(folder / f"store-{source.worker}-{source.rank}"),
                "capacity_blocks": 160,
            },
            "flush": {"sinks": [events | sink]},
            **tables,
        }

    def start(self) -> None:
        """Start the process."""
        name = f"worker-{self.source.worker}-{self.source.rank}"
        self.child = Child(
            name,
            [sys.executable, "-m", "tests.interop.worker"],
            self.folder / f"{name}.log",
            lines=True,
        )
        opened = self.child.ask({"do": "open", "tables": self._tables})
        assert (opened["endpoint"], opened["replay_endpoint"]) == (
            self.source.endpoint,
            self.source.replay_endpoint,
        ), opened

    def kill(self) -> None:
        """kill -9."""
        self.child.kill()
        self.recorder.take()

    def restart(self, *, store: bool = True) -> None:
        """A new process at the same endpoints, after `kill`. store: with the store of the one
        before it."""
        if not store:
            self._tables["storage"] |= {"directory": self._tables["storage"]["directory"] + "-new"}
        self.child.close()
        self.start()

    # -- requests

    def begin(self, prompts: Sequence[Prompt], clears: int = 0) -> None:
        """Begin to serve prompts. `done` waits for the end of it."""
        self._seed += 1
        messages = [prompt.message() for prompt in prompts]
        self.child.lines.send(
            {"do": "serve", "prompts": messages, "lanes": 4, "seed": self._seed, "clears": clears}
        )

    def done(self) -> int:
        """How many prompts were served."""
        return int(self.child.lines.receive(SERVE)["served"])

    def serve(self, count: int = 60, *, clears: int = 0) -> int:
        """Serve new prompts to their end. Returns how many were served."""
        self.begin(self.workload.prompts(count), clears)
        return self.done()

    def request(self, prompt: Prompt) -> tuple[int, int, int]:
        """Serve one prompt. Returns its hits on device, host and storage."""
        device, host, storage = self.child.ask({"do": "request", "prompt": prompt.message()})[
            "hits"
        ]
        return device, host, storage

    def clear(self, *, storage: bool = False) -> None:
        """Clear device and host. storage: and the store."""
        self.child.ask({"do": "clear", "storage": storage})

    # -- the truth

    def chains(self, prompts: Sequence[Prompt]) -> list[Chain]:
        """The block hashes of prompts."""
        return list(
            self.child.ask({"do": "chains", "prompts": [prompt.message() for prompt in prompts]})
        )

    def truth(self) -> Truth:
        """The blocks that the tiers' owners hold, at rest."""
        residency = self.child.ask({"do": "rest"}, SERVE)
        truth = Truth(residency, self.chains(self.workload.drawn))
        assert not truth.unknown, f"{len(truth.unknown)} resident blocks are of no prompt"
        return truth

    def close(self) -> None:
        """End the worker."""
        self.recorder.take()
        if self.child is not None:
            self.child.close()
        self.recorder.close()
