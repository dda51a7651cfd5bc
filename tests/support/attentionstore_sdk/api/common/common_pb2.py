"""Media, as numbers."""

MEDIA_HBM = 1
