"""Shared by several tests and proof tools: models, stand-ins and helpers."""
