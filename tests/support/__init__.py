"""What several tests and proof tools share: models, stand-ins and helpers."""
