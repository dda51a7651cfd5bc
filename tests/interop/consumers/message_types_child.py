"""vLLM's and SGLang's own message types, in a process of an environment that has them: what they
make of recorded messages.

    python message_types_child.py vllm|sglang

The types' modules need none of the packages that importing the engines would need: their parents
are put in place as empty packages.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
from answer_lines import answer_on_output

EMPTY = {
    "vllm": ("vllm", "vllm.config", "vllm.utils", "vllm.distributed", "vllm.v1", "vllm.v1.core"),
    "sglang": ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"),
}
MEDIA = ("GPU", "CPU", "STORAGE", "CPU_PINNED", "DISK")
MODULE = {"vllm": "vllm.distributed.kv_events", "sglang": "sglang.srt.disaggregation.kv_events"}


def load(engine: str) -> Any:
    """The engine's module of KV events."""
    found = importlib.util.find_spec(engine)
    assert found is not None
    assert found.submodule_search_locations is not None
    root = Path(found.submodule_search_locations[0])
    for name in EMPTY[engine]:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    if engine == "vllm":  # of what it imports, all that it uses
        put("torch")
        put("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int)
    else:
        put("sglang.srt.runtime_context", get_parallel=None)
    return importlib.import_module(MODULE[engine])


def put(name: str, **attributes: Any) -> None:
    """A module with nothing but these attributes."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module


class Types:
    """The types of one engine, as maps and as the arrays of its earlier versions."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        module = load(engine)
        kinds = (module.BlockStored, module.BlockRemoved, module.AllBlocksCleared)
        self.fields = {
            kind.__name__: [field.name for field in msgspec.structs.fields(kind)] for kind in kinds
        }
        self.as_maps = msgspec.msgpack.Decoder(module.KVEventBatch)
        arrays = [self._array(kind) for kind in kinds]
        self.as_arrays = msgspec.msgpack.Decoder(
            tuple[float, list[arrays[0] | arrays[1] | arrays[2]], int | None]
        )  # type: ignore[valid-type]

    def _array(self, kind: Any) -> Any:
        fields = [
            (field.encode_name, field.type)
            if field.required
            else (field.encode_name, field.type, None)
            for field in msgspec.structs.fields(kind)
        ]
        return msgspec.defstruct(kind.__name__, fields, tag=kind.__name__, array_like=True)

    def map_message(self, payload: bytes, passed: set[str]) -> str:
        """Empty if the types take a message with maps and would send the same. passed: fields that
        the types do not have are added to it."""
        batch = self.as_maps.decode(payload)
        stamp, events, rank = msgspec.msgpack.decode(payload)
        passed |= {
            name
            for event in events
            for name in event.keys() - {"type", *self.fields[event["type"]]}
        }
        encoded = msgspec.msgpack.encode(batch)
        known = [stamp, [self._known(event) for event in events], rank]
        if self.engine == "vllm":
            same = encoded == msgspec.msgpack.encode(known)
            return "" if same else "vLLM would send other bytes"
        sent = msgspec.msgpack.decode(encoded)  # SGLang leaves out fields of None
        same = _without_none(sent) == _without_none(known)
        return "" if same else "SGLang would send other values"

    def _known(self, event: dict[str, Any]) -> dict[str, Any]:
        names = {"type", *self.fields[event["type"]]}
        return {name: value for name, value in event.items() if name in names}

    def array_message(self, payload: bytes) -> str:
        """Empty if the types take a message with arrays, each field in its place."""
        raw = msgspec.msgpack.decode(payload)
        for event, values in zip(self.as_arrays.decode(payload)[1], raw[1], strict=True):
            if type(event).__name__ == "BlockStored":
                count = len(event.block_hashes)
                right = len(event.token_ids) == count * event.block_size and (
                    event.extra_keys is None or len(event.extra_keys) == count
                )
                if not right:
                    return f"the fields of a BlockStored do not fit together: {values!r}"
            if getattr(event, "medium", "GPU") not in MEDIA:
                return f"the medium is not in its place: {values!r}"
        return ""

    def check(self, dialect: str, payloads: list[str]) -> dict[str, Any]:
        """Decode messages with the types. Returns how many, those they reject or would send
        differently, and the fields they do not have."""
        passed: set[str] = set()
        wrong = []
        for text in payloads:
            payload = base64.b64decode(text)
            try:
                array = dialect == "array"
                failure = (
                    self.array_message(payload) if array else self.map_message(payload, passed)
                )
            except msgspec.MsgspecError as error:
                failure = f"rejected: {error}"
            if failure:
                wrong.append(failure)
        return {
            "messages": len(payloads),
            "wrong": wrong[:5],
            "wrong_count": len(wrong),
            "fields_passed_over": sorted(passed),
        }


def _without_none(batch: list[Any]) -> list[Any]:
    stamp, events, rank = batch
    given = [{name: one for name, one in event.items() if one is not None} for event in events]
    return [stamp, given, rank]


if __name__ == "__main__":
    answer_on_output(Types(sys.argv[1]))
