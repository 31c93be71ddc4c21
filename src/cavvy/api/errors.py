"""Every error of the API has a stable code, an HTTP status, a message and a hint that says what to
do.

* ApiProblem        raised by routes; its code is in CODES
  + RetryLater        the same request may succeed later (503, 507)

`explain` turns errors of other modules into errors of the API. CODES are the rows of
`errors.csv`, and of capabilities; `python -m cavvy.api.errors` also writes
`docs/reference/errors.md` from them, from the answers of capabilities' own servers, and from
`state_errors.csv`, the codes of `server.state_dir.StateDirError`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from cavvy.catalog.tables import read_table
from cavvy.control.job_service import JobServiceError, UnsupportedTask
from cavvy.frame.discover import read_rows
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


class ErrorCode(Struct, frozen=True, kw_only=True):
    """One error code: its HTTP status, its meaning, and the hint that its answers contain by
    default."""

    status: int
    meaning: str
    hint: str


def _read_codes() -> Iterator[tuple[str, ErrorCode]]:
    own = read_rows("errors", lambda capability: capability.errors)
    for row in (*own, *read_table(__package__, "errors")):
        status, meaning, hint = int(row["status"]), row["meaning"], row["hint"]
        yield row["code"], ErrorCode(status=status, meaning=meaning, hint=hint)


CODES: Mapping[str, ErrorCode] = dict(_read_codes())  # those of the core, which are last, prevail


class ApiProblem(Exception):
    """Raised if a request failed. `code` is a key of CODES, and `message` gives the reason."""

    def __init__(
        self, code: str, message: str, hint: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = CODES[code].status
        self.message = message
        self.hint = hint or CODES[code].hint
        self.headers = headers or {}


class RetryLater(ApiProblem):
    """Raised if a request failed, but the same request can succeed later."""

    def __init__(self, code: str, message: str, *, after_s: int = 1) -> None:
        super().__init__(code, message, headers={"Retry-After": str(after_s)})


def reference() -> str:
    """Return the text of docs/reference/errors.md."""
    return "\n".join([*_tell_codes(), *_tell_answers(), *_tell_state_errors()]) + "\n"


def _tell_codes() -> Sequence[str]:
    rows = [
        f"| `{name}` | {code.status} | {code.meaning} | {code.hint} |"
        for name, code in sorted(CODES.items())
    ]
    return [
        "# Error codes",
        "",
        "Read this page when a command or the API answered with a code, and you want to know what "
        "it means and what to do.",
        "",
        "Written by `python -m cavvy.api.errors > docs/reference/errors.md`; do not edit.",
        "",
        "Every error of the API has the same form; `code` never changes its meaning, `message` is "
        "for people:",
        "",
        "```json",
        '{"code": "job-not-found", "message": "project default has no job x", "hint": "..."}',
        "```",
        "",
        "Below them are the answers of services, and the errors of a server that cannot start.",
        "",
        "| code | status | meaning | what to do |",
        "|---|---|---|---|",
        *rows,
    ]


def _tell_answers() -> Sequence[str]:
    """Return the lines about the answers of capabilities' own servers, if there are any."""
    answers = read_rows("answers", lambda capability: capability.answers)
    rows = [
        f"| `{row['code']}` | {row['status'].replace(' ', ', ')} | {row['meaning']} | "
        f"{row['hint']} |"
        for row in sorted(answers, key=lambda row: row["code"])
    ]
    if not rows:
        return []
    return [
        "",
        "## Answers of services",
        "",
        "A request to a service gets these from [the gateway](gateway.md#statuses), not from "
        'the API: as `{"error": {"code": ..., "message": ...}}`, or with `call` for what is no '
        "error. One code is in both tables: the API's `queue-full` is about the queue of "
        "calls that the server keeps, the one below about requests that wait in the gateway.",
        "",
        "| code | status | meaning | what to do |",
        "|---|---|---|---|",
        *rows,
    ]


def _tell_state_errors() -> Sequence[str]:
    rows = [
        f"| `{row['code']}` | {row['meaning']} | {row['hint']} |"
        for row in read_table(__package__, "state_errors")
    ]
    return [
        "",
        "## A server that cannot start, move or be saved",
        "",
        "No request is answered then: the command that starts, saves, restores or adopts a server "
        "prints the message and what to do, without the code.",
        "",
        "| code | meaning | what to do |",
        "|---|---|---|",
        *rows,
    ]


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


if __name__ == "__main__":
    sys.stdout.write(reference())
