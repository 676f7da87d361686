"""What can go wrong between the operator and the world, named by what the reconciler does about it."""

from __future__ import annotations


class OperatorError(Exception):
    """Any of them."""


class Retry(OperatorError):
    """It may work later: plan again. `after_s` None: after a back-off that grows."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Conflict(Retry):
    """The object is another one, or another version of it, than was thought: look again at once."""

    def __init__(self, message: str) -> None:
        super().__init__(message, after_s=0.0)


class Refused(Retry):
    """The cluster answers and says no: it may work once somebody has changed a right or a setting."""


class Deposed(Retry):
    """Another operator may act by now: whatever this was, it is that one's to do."""


class NoCluster(OperatorError):
    """There is nothing to connect to: the user must say where the cluster is."""


class NoRoom(OperatorError):
    """The agent has no room for the replica: place it elsewhere."""


class CannotRun(OperatorError):
    """The agent says that the replica can never run as asked: tell the user, and wait for another generation."""
