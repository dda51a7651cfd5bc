"""The models that SGLang loads here (`SGLANG_EXTERNAL_MODEL_PACKAGE`): importing all of its models
takes longer than the rest of a start."""
