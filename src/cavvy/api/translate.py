"""What the errors of the rooms below mean to who asked: each becomes a Problem, in this one
place.
"""

from cavvy.api.errors import Later, Problem
from cavvy.control.desk import DeskError, NotHonoured
from cavvy.providers import base as places
from cavvy.spec.problems import SpecError
from cavvy.store import base as store

KNOWN = (SpecError, DeskError, store.StoreError, places.ProviderError, OSError)


def explain(error: Exception) -> Problem | None:
    """The Problem that an error of another room is; None for a fault of ours."""
    match error:
        case SpecError():
            return Problem("invalid-task", str(error), error.hint)
        case NotHonoured():
            return Problem("task-refused", str(error), error.hint)
        case DeskError():
            return Problem("conflict", str(error), error.hint)
        case store.Full():
            return Later("disk-full", str(error), after_s=10)
        case store.Unusable():
            return Later("database-unusable", str(error), after_s=5)
        case store.Stale() | store.Conflict() | store.Held():
            return Problem("conflict", str(error))
        case store.Mismatch():
            return Problem("invalid-request", str(error))
        case store.NotFound():
            return Problem("job-not-found", str(error))
        case places.TryAgain() | places.NoCapacity():
            return Later("place-unreachable", str(error), after_s=5)
        case places.ProviderError():
            return Problem("place-refused", str(error))
        case OSError(errno=28 | 122):  # ENOSPC, EDQUOT
            return Later("disk-full", f"no room: {error.strerror}", after_s=10)
        case _:
            return None
