"""What ships for testing: models, loops and helpers for your own tests."""
