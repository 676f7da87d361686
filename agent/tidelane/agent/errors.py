"""Why the agent does not do what it was asked, named by what the caller should do next."""

from __future__ import annotations


class AgentError(Exception):
    """Anything the agent says no to."""


class Rejected(AgentError):
    """Ask for something else: this can never run."""


class Outdated(AgentError):
    """Look again at what is wanted: a newer generation is already in force."""


class NoRoom(AgentError):
    """Ask another node, or again when a claim here has ended."""


class TryLater(AgentError):
    """Ask again soon: the agent is shutting down, or could not save its state."""


class CannotStart(AgentError):
    """The agent's own settings or state folder need an administrator."""
