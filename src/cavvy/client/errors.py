"""Errors of the client, by what the caller does next.

* ApiError           the server refused, and says why: code, message, hint and HTTP status +
  Unreachable      no server answers there; start one or look at its log
    - Lost           the connection ended after the request was sent; it may have been acted on +
      StartFailed      the embedded server could not be started; the hint names its log +
      IncompatibleVersions     this client and that server cannot work together; the hint says which
      to update
"""


class ApiError(Exception):
    """An error with a stable code, a message for people, a hint that says what to do, and the
    HTTP status (0: none).
    """

    def __init__(self, code: str, message: str, hint: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.status = status


class Unreachable(ApiError):
    """No server answers there."""


class ConnectionLost(Unreachable):
    """The connection ended after the request was sent; the server may have acted on it."""


class StartFailed(ApiError):
    """The embedded server could not be started."""


class IncompatibleVersions(ApiError):
    """This client and that server cannot work together."""
