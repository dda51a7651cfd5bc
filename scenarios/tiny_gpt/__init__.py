"""A tiny GPT served from its cache: the model, its ranks and the serving loop of
`serve_tiny_gpt.py`."""
