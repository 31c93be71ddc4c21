"""Turns errors of other modules into ApiProblems."""

from cavvy.api.errors import ApiProblem, RetryLater
from cavvy.control.job_service import JobServiceError, UnsupportedTask
from cavvy.providers import base as providers
from cavvy.spec.problems import SpecError
from cavvy.store import base as store

KNOWN = (SpecError, JobServiceError, store.StoreError, providers.ProviderError, OSError)

_OF_STORE = {
    store.StaleVersion: "conflict",
    store.NameConflict: "conflict",
    store.AllocationConflict: "conflict",
    store.DependencyMissing: "invalid-task",
    store.HashMismatch: "invalid-request",
    store.RowNotFound: "job-not-found",
}


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
        case store.ProjectArchived():
            return ApiProblem("project-archived", str(error))
        case store.ProjectBusy():
            return ApiProblem("project-busy", str(error))
        case providers.TryAgain() | providers.NoCapacity():
            return RetryLater("provider-unreachable", str(error), after_s=5)
        case providers.ProviderError():
            return ApiProblem("provider-refused", str(error))
        case OSError(errno=28 | 122):  # ENOSPC, EDQUOT
            return RetryLater(
                "disk-full", f"the server's disk is full: {error.strerror}", after_s=10
            )
        case _:
            codes = (code for kind, code in _OF_STORE.items() if isinstance(error, kind))
            code = next(codes, None)
            return None if code is None else ApiProblem(code, str(error))


def _explain_unusable(error: store.StoreError) -> ApiProblem:
    """Return the ApiProblem for a database or key that cannot be used. The database may recover
    automatically; a key that cannot be used requires action by a person.
    """
    if isinstance(error, store.KeyUnusable):
        return ApiProblem("key-unusable", str(error))
    return RetryLater("database-unusable", str(error), after_s=5)
