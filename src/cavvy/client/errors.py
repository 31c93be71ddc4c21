"""Errors of the client. The caller should handle each class of error separately.

ApiError                    the server refused: code, message, hint and HTTP status
  Unreachable               no server answers; start a server or look at its log
    ConnectionLost          the connection ended; the server may have processed the request
  StartFailed               the embedded server could not be started; the hint names its log
  SourceChanged             a file changed between its snapshot and its upload; take a new snapshot
  IncompatibleVersions      client and server are incompatible; the hint names the one to update
"""

from typing import ClassVar

# Codes of errors after which a repeated request may succeed. `server-start-failed` is one of them,
# because a new server may be killed before it is ready.
_PASSING = frozenset(
    {"server-unreachable", "connection-lost", "server-start-timeout", "server-start-failed"}
)
# errors of a proxy that cannot reach the server, or gets no answer from it
_OF_PROXIES = frozenset({"http-502", "http-503", "http-504"})
# A running server may recover from such an error by itself. If a start fails with this code, a
# person must act.
NO_DATABASE = "database-unusable"


# the hint of a server about a request that is not valid, if it has no better one
FOR_PROGRAMS = "compare the request with /v1/openapi.json"


class ApiError(Exception):
    """An error with a stable code, a message, a hint about what to do, and the HTTP status (0
    without a response).
    """

    def __init__(self, code: str, message: str, hint: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.status = status

    @property
    def passing(self) -> bool:
        """True if it makes sense to repeat the request: no server answered it, or the server's
        database did not answer.
        """
        return self.code in _PASSING | _OF_PROXIES or (self.code == NO_DATABASE and self.status > 0)


class Unreachable(ApiError):
    """Raised if no server answers at the address."""


class ConnectionLost(Unreachable):
    """Raised if the connection ended after the request was sent. The server may have processed the
    request."""


class StartFailed(ApiError):
    """Raised if the embedded server could not be started."""


class SourceChanged(ApiError):
    """Raised if a file no longer has the content that is to be uploaded."""

    CODE: ClassVar[str] = "blob-mismatch"  # also the server's code for bytes with another hash

    def __init__(self, path: str) -> None:
        super().__init__(
            self.CODE,
            f"{path} changed before it was uploaded",
            "submit again when no program changes the file, or list it in .cavvyignore",
            422,
        )


class IncompatibleVersions(ApiError):
    """Raised if this client and the server cannot work together."""
