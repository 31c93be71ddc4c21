"""The exceptions of the Python interface. The text of each exception states the problem and how to
solve it.

CavvyError              any error of this interface
  InvalidArgument       an argument has a value that is not possible
  InvalidTask           the task or one of its files must be changed
  NoOffer               no offer of the configured providers meets the task's requirements
  ConsentNeeded         the offers cost money, and the caller did not agree to pay
  JobNotFound           the project has no job with this name
  JobFailed             the job ended without success; `status` is its last state
  WaitTimeout           the job did not reach the wanted state in time; the job continues
  ServerUnavailable     no server answers, or the embedded server cannot be started
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cavvy.client import ApiError
    from cavvy.sdk.status import JobStatus
    from cavvy.spec.problems import SpecProblem


class CavvyError(Exception):
    """An error. `message` states the problem, and `hint` suggests a fix. If the server reported the
    error, `code` is the error's code, as listed in [errors](errors.md).
    """

    def __init__(self, message: str, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class InvalidTask(CavvyError, ValueError):
    """Raised if the task, or a file that the task names, must be changed. `problems` contains one
    item for each mistake in the task's text.
    """

    problems: "tuple[SpecProblem, ...]" = ()


class InvalidArgument(CavvyError, ValueError):
    """Raised if an argument has an impossible value, such as a negative time limit. An argument of
    a wrong type raises TypeError."""


class NoOffer(CavvyError):
    """Raised if no offer of the configured providers meets the task's requirements."""


class ConsentNeeded(CavvyError):
    """Raised if the offers cost money, and the caller has not agreed to pay. The message shows the
    price. To agree, pass `consent` or `max_cost`; for a function, write `with
    app.run(consent=True):` around its calls."""


class JobNotFound(CavvyError, LookupError):
    """Raised if the project has no job with this name or ID."""


class JobFailed(CavvyError):
    """Raised if the job failed or was stopped. The message ends with the last lines of the job's
    log."""

    status: "JobStatus"


class WaitTimeout(CavvyError, TimeoutError):
    """Raised if the job did not reach the wanted state within the time limit. The job continues to
    run. `status` is the job's last state.
    """

    status: "JobStatus"


class ServerUnavailable(CavvyError, ConnectionError):
    """Raised if no server answers, or the embedded server cannot be started."""


_CONSENT_HINT = (
    "pass consent=True to agree to this price, or max_cost=DOLLARS to agree and to stop the job "
    "before it costs more"
)
_BY_CODE: dict[str, type[CavvyError]] = {
    "invalid-task": InvalidTask,
    "task-refused": InvalidTask,
    "no-offer": NoOffer,
    "consent-needed": ConsentNeeded,
    "job-not-found": JobNotFound,
}


def make_error(error: "ApiError") -> CavvyError:
    """Convert an error of the transport to the matching public exception."""
    from cavvy.client import StartFailed, Unreachable

    if isinstance(error, Unreachable | StartFailed):
        return ServerUnavailable(error.message, error.hint, error.code)
    kind = _BY_CODE.get(error.code, CavvyError)
    hint = _CONSENT_HINT if kind is ConsentNeeded else error.hint
    return kind(error.message, hint, error.code)


@contextmanager
def public_errors() -> Iterator[None]:
    """Raise CavvyError instead of the errors of internal modules."""
    from cavvy.client import ApiError
    from cavvy.settings import SettingsError
    from cavvy.spec.workdir import FreezeError

    try:
        yield
    except ApiError as error:
        raise make_error(error) from error
    except SettingsError as error:
        raise CavvyError(error.message, error.hint, error.code) from error
    except FreezeError as error:
        raise InvalidTask(str(error), code=error.code) from error
