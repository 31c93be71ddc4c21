"""Turns errors of other modules into ApiProblems."""

from cavvy.api.errors import ApiProblem, RetryLater
from cavvy.control.job_service import JobServiceError, UnsupportedTask
from cavvy.providers import base as providers
from cavvy.spec.problems import SpecError
from cavvy.store import base as store

KNOWN = (SpecError, JobServiceError, store.StoreError, providers.ProviderError, OSError)


def explain(error: Exception) -> ApiProblem | None:
    """Return the ApiProblem for an error of another module, or None if the error shows a bug in
    Cavvy."""
    match error:
        case SpecError():
            return ApiProblem("invalid-task", str(error), error.hint)
        case UnsupportedTask():
            return ApiProblem("task-refused", str(error), error.hint)
        case JobServiceError():
            return ApiProblem("conflict", str(error), error.hint)
        case store.StoreFull():
            return RetryLater("disk-full", str(error), after_s=10)
        case store.StoreUnusable() | store.LeaseLost():
            return _explain_unusable(error)
        case store.StaleVersion() | store.NameConflict() | store.AllocationConflict():
            return ApiProblem("conflict", str(error))
        case store.HashMismatch():
            return ApiProblem("invalid-request", str(error))
        case store.RowNotFound():
            return ApiProblem("job-not-found", str(error))
        case providers.TryAgain() | providers.NoCapacity():
            return RetryLater("provider-unreachable", str(error), after_s=5)
        case providers.ProviderError():
            return ApiProblem("provider-refused", str(error))
        case OSError(errno=28 | 122):  # ENOSPC, EDQUOT
            return RetryLater(
                "disk-full", f"the server's disk is full: {error.strerror}", after_s=10
            )
        case _:
            return None


def _explain_unusable(error: store.StoreError) -> ApiProblem:
    """A database may answer again by itself; a key needs a person."""
    if isinstance(error, store.KeyUnusable):
        return ApiProblem("key-unusable", str(error))
    return RetryLater("database-unusable", str(error), after_s=5)
