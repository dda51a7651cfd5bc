"""Facts of the running engine that SGLang does not pass to its storage."""

from __future__ import annotations

from sglang.srt.runtime_context import get_model, get_parallel, get_spec

from kvactors.integrations.engine import model_digest


def replica_of(dp_rank: int) -> int:
    """The number of the data parallel replica: its own processes, or its part of one worker group,
    where `dp_rank` is the worker's."""
    try:
        own = get_parallel().dp_rank
    except (AttributeError, RuntimeError, ValueError):
        own = None
    return dp_rank or own or 0


def digest_of_models() -> str:
    """Identifies the files of model and draft model, and the settings that change their KV."""
    model, draft = get_model(), get_spec()
    settings = {
        "json_model_override_args": model.json_model_override_args,
        "quantization": model.quantization,
        "dtype": str(model.dtype),
        "load_format": str(model.load_format),
    }
    if draft.speculative_draft_model_path:
        settings["draft"] = model_digest(
            draft.speculative_draft_model_path,
            {"quantization": draft.speculative_draft_model_quantization},
            revision=draft.speculative_draft_model_revision,
            cache=model.download_dir,
        )
    return model_digest(
        model.model_path, settings, revision=model.revision, cache=model.download_dir
    )
