"""What can go wrong with sandboxes.

CavvyError
  SandboxError         any of the following
    IsolationMissing   the machine lacks a wall that the sandbox needs, or was required
    SandboxNotFound    there is no such sandbox
    SandboxEnded       the sandbox has ended, so nothing can be done in it
    SandboxLost        the sandbox, or the job in which it ran, was lost
    SandboxFileError   a file of the sandbox cannot be read or written
"""

from cavvy.sdk.errors import CavvyError, InvalidArgument


class SandboxError(CavvyError):
    """Raised if something cannot be done with a sandbox."""


class IsolationMissing(SandboxError):
    """Raised if the machine lacks a wall that each sandbox needs, or any that
    `isolation="required"` asks for. The message names what is missing."""


class SandboxNotFound(SandboxError):
    """Raised if there is no sandbox with this ID. Ended sandboxes are forgotten with their host."""


class SandboxEnded(SandboxError):
    """Raised if the sandbox has ended, so nothing can be done in it."""


class SandboxLost(SandboxError):
    """Raised if the sandbox, or the job in which it ran, was lost."""


class SandboxFileError(SandboxError, OSError):
    """Raised if a file of the sandbox cannot be read or written. `errno` is the error's number, or
    0."""

    def __init__(self, message: str, number: int = 0) -> None:
        SandboxError.__init__(self, message)
        self.errno = number


_KINDS: dict[str, type[CavvyError]] = {
    each.__name__: each
    for each in (IsolationMissing, SandboxNotFound, SandboxEnded, SandboxLost, InvalidArgument)
}


def make_error(kind: str, text: str) -> CavvyError:
    """Return the exception for what a host has refused."""
    return _KINDS.get(kind, SandboxError)(text)
