"""Log lines of JSON: `handler.setFormatter(kvactors.logs.JsonFormatter())`."""

from kvactors.actor.log import JsonFormatter

__all__ = ["JsonFormatter"]
