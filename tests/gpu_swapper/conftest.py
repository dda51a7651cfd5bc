"""The stand-in driver as a fixture."""

from tests.support.cuda import fake

__all__ = ["fake"]
