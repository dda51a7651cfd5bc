"""As in the SDK."""
