"""Where device blocks live."""
