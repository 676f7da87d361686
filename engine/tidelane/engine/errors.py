"""Errors by what the caller does about them."""

from __future__ import annotations


class CannotServe(ValueError):
    """The engine can never run as asked: do not restart it, tell the person; the message says what to change."""


class EngineStuck(RuntimeError):
    """Work was launched and never came back: restart the engine."""


class FrontLost(RuntimeError):
    """The HTTP front died: restart the engine."""


class PrefillSideLost(RuntimeError):
    """The process that prefills ended before it was ready for the first time: restart the engine."""
