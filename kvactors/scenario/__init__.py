"""Scripted runs and trace replay."""
